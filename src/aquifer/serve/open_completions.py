"""The completions of an engine that have not ended, and the numbers that stand for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.serve.messages import Outputs, process_of


@dataclass(slots=True)
class _Numbered:
    """A request with completions that have not ended."""

    model: str
    number: int  # of its first completion
    indexes: set[int]  # of completions that have not ended


class OpenCompletions:
    """The completions of an engine that have not ended.

    The engine process packs outputs by it; the first process knows by it which requests an engine
    process has.

    Attributes:
        num_requests: requests that have any, by model.
    """

    def __init__(self) -> None:
        self.num_requests: Counter[str] = Counter()
        self._requests: dict[str, _Numbered] = {}  # by request id
        self._ids: dict[int, str] = {}  # of requests, by the number of the first completion

    def __len__(self) -> int:
        """Requests that have any."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has any."""
        return request_id in self._requests

    def add(self, request: Request, number: int) -> None:
        """Number the completions of a request, from `number` on."""
        indexes = set(range(request.params.num_completions))
        self._requests[request.request_id] = _Numbered(request.model, number, indexes)
        self._ids[number] = request.request_id
        self.num_requests[request.model] += 1

    def end(self, request_id: str, index: int | None) -> None:
        """Forget a completion that has ended, or with None all of a request; others are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if index is not None:
            request.indexes.discard(index)
        if index is None or not request.indexes:
            del self._requests[request_id]
            del self._ids[request.number]
            self.num_requests[request.model] -= 1

    def of_process(self, process: int) -> list[str]:
        """Return the ids of the requests of a web process, by its serial number."""
        return [
            request_id
            for request_id, request in self._requests.items()
            if process_of(request.number) == process
        ]

    def pack(self, step: Iterable[TokenOutput]) -> tuple[Outputs, frozenset[str]]:
        """Pack the outputs of a step.

        Those of completions that were in flight when their request was aborted are left out.

        Returns: the outputs, and the models of completions that have ended as they should.
        """
        outputs = Outputs()
        counts: list[int] = []
        completed: set[str] = set()
        for output in step:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            number = request.number + output.index
            if output.has_only_tokens:
                outputs.numbers.append(number)
                counts.append(len(output.token_ids))
                outputs.token_ids.extend(output.token_ids)
                continue
            outputs.others.append((number, output))
            if output.finish_reason not in (None, "error"):
                completed.add(request.model)
            self._end_with(output)
        if len(outputs.token_ids) != len(counts):
            outputs.counts.extend(counts)
        return outputs, frozenset(completed)

    def end_with(self, outputs: Outputs) -> None:
        """Forget the completions of which these are the last outputs."""
        for number in outputs.refused:
            if number in self._ids:
                self.end(self._ids[number], None)
        for _, output in outputs.others:
            self._end_with(output)

    def take_all(self) -> list[int]:
        """Forget all; return the number of one completion of each request."""
        numbers = [request.number + min(request.indexes) for request in self._requests.values()]
        self._requests.clear()
        self._ids.clear()
        self.num_requests.clear()
        return numbers

    def _end_with(self, output: TokenOutput) -> None:
        if output.finish_reason == "error":  # ends the whole request
            self.end(output.request_id, None)
        elif output.finish_reason is not None:
            self.end(output.request_id, output.index)
