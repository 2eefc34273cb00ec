"""Routes of the engine's outputs to the streams of their requests."""

from __future__ import annotations

from dataclasses import dataclass

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.errors import AquiferError
from aquifer.serve.messages import Outputs
from aquifer.serve.streams import Output, Tokens, TokenStream, indexes_of


@dataclass(frozen=True, slots=True)
class _Route:
    """Destination of a request's outputs, kept until the last one has arrived."""

    stream: TokenStream
    number: int  # of the first completion; the next ones have the next numbers
    indexes: set[int]  # completions that have not received their last output


@dataclass(slots=True)
class _Completion:
    """Destination of a completion's tokens, kept until its last output has arrived."""

    stream: TokenStream
    request_id: str
    index: int
    has_begun: bool = False
    tokens: Tokens | None = None  # the last ones, to which others may be added ...
    num_batches: int = 0  # ... as long as no more batches of the stream were taken


class Routes:
    """Routes of all running requests, by request id, and by the numbers of their completions.

    Args:
        first_number: of the first completion.
    """

    def __init__(self, first_number: int) -> None:
        self._routes: dict[str, _Route] = {}
        self._completions: dict[int, _Completion] = {}  # by number
        self._next_number = first_number

    def __len__(self) -> int:
        """Requests that expect outputs."""
        return len(self._routes)

    def add(self, request: Request, stream: TokenStream) -> int:
        """Add a request; return the number of its first completion, as in `Add`."""
        number, indexes = self._next_number, indexes_of(request)
        self._next_number += len(indexes)
        self._routes[request.request_id] = _Route(stream, number, indexes)
        for index in indexes:
            self._completions[number + index] = _Completion(stream, request.request_id, index)
        return number

    def end(self, request_id: str, index: int | None = None) -> bool:
        """Expect no more outputs of a request, or with an index of one of its completions.

        Returns: whether any were expected.
        """
        route = self._routes.get(request_id)
        if route is None or (index is not None and index not in route.indexes):
            return False
        for ended in [*route.indexes] if index is None else [index]:
            route.indexes.discard(ended)
            del self._completions[route.number + ended]
        if not route.indexes:
            del self._routes[request_id]
        return True

    def fail(self, error: AquiferError) -> list[str]:
        """End all streams with an error; return the ids of the requests that ran."""
        routes, self._routes = self._routes, {}
        self._completions.clear()
        for stream in {route.stream for route in routes.values()}:
            stream.fail(error)
        return list(routes)

    def deliver(self, outputs: Outputs, now_s: float) -> None:
        """Deliver outputs, which arrived at `now_s` of time.monotonic().

        Those that were in flight when their completion was aborted are dropped.
        """
        for number, error in outputs.refused.items():
            if (completion := self._completions.get(number)) is not None:
                self.end(completion.request_id)
                completion.stream.fail(error)
        if outputs.counts:
            for number, token_ids in outputs.tokens():
                if (completion := self._completions.get(number)) is not None:
                    output = TokenOutput(completion.request_id, token_ids, completion.index)
                    self._deliver(output, now_s)
        else:
            self._deliver_tokens(outputs, now_s)
        for _, output in outputs.others:
            self._deliver(output, now_s)

    def _deliver_tokens(self, outputs: Outputs, now_s: float) -> None:
        """Deliver outputs that are one token each."""
        completions = self._completions
        for number, token_id in zip(outputs.numbers, outputs.token_ids, strict=True):
            completion = completions.get(number)
            if completion is None:
                continue
            stream, tokens = completion.stream, completion.tokens
            if tokens is not None and completion.num_batches == stream.num_batches:
                tokens.token_ids.append(token_id)
                tokens.arrived_s.append(now_s)
                continue
            completion.tokens = tokens = Tokens(
                completion.request_id, completion.index, [token_id], [now_s]
            )
            completion.num_batches = stream.num_batches
            stream.put(tokens, now_s, not completion.has_begun)
            completion.has_begun = True

    def _deliver(self, output: TokenOutput, now_s: float) -> None:
        """Deliver any other output."""
        route = self._routes.get(output.request_id)
        if route is None:
            return
        is_error = output.finish_reason == "error"  # ends the whole request
        is_urgent = output.finish_reason is not None
        completion = self._completions.get(route.number + output.index)
        if completion is not None:
            completion.tokens = None  # tokens that follow come after this output
            is_urgent = is_urgent or not completion.has_begun
            completion.has_begun = True
        elif not is_error:
            return
        if output.finish_reason is not None:
            self.end(output.request_id, None if is_error else output.index)
        route.stream.put(Output(output, now_s), now_s, is_urgent)
