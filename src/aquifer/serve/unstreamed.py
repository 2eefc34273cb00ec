"""Requests that have output nothing yet, so that another engine can run them from their start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from aquifer.serve.messages import Abort, Add, Outputs


@dataclass(frozen=True, slots=True)
class Placed:
    """A request that was placed on an engine.

    Args:
        add: the message that started it.
        num_lost: engine processes that have died while they had it.
        aborted: indices of its completions that were aborted since.
    """

    add: Add
    num_lost: int = 0
    aborted: tuple[int, ...] = ()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.add.request.request_id

    @property
    def numbers(self) -> range:
        """The numbers of its completions."""
        return range(self.add.number, self.add.number + self.add.request.params.num_completions)


class Unstreamed:
    """The requests of an engine that have output nothing yet, in the order in which they came."""

    def __init__(self) -> None:
        self._requests: dict[str, Placed] = {}  # by request id
        self._ids: dict[int, str] = {}  # of requests, by the numbers of their completions

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._requests)

    @property
    def requests(self) -> list[Placed]:
        """All of them."""
        return [*self._requests.values()]

    def add(self, placed: Placed) -> None:
        """Add a request that was just placed."""
        self._requests[placed.request_id] = placed
        self._ids.update(dict.fromkeys(placed.numbers, placed.request_id))

    def drop(self, request_id: str) -> None:
        """Forget a request: it has output something, or was aborted."""
        if (placed := self._requests.pop(request_id, None)) is not None:
            for number in placed.numbers:
                del self._ids[number]

    def take(self, request_id: str) -> Placed | None:
        """Forget a request; returns it, or None if it is not here."""
        placed = self._requests.get(request_id)
        self.drop(request_id)
        return placed

    def abort(self, message: Abort) -> None:
        """A request or one of its completions is aborted."""
        placed = self._requests.get(message.request_id)
        if placed is not None and message.index is not None:
            aborted = (*placed.aborted, message.index)
            if len({*aborted}) < placed.add.request.params.num_completions:
                self._requests[message.request_id] = replace(placed, aborted=aborted)
                return
        self.drop(message.request_id)

    def drop_with(self, outputs: Outputs) -> None:
        """Forget the requests of which these are outputs."""
        if not self._ids:
            return
        others = (number for number, _ in outputs.others)
        for number in chain(outputs.numbers, others, outputs.refused):
            if (request_id := self._ids.get(number)) is not None:
                self.drop(request_id)

    def take_all(self) -> list[Placed]:
        """Forget all of them; returns them."""
        placed = self.requests
        self._requests.clear()
        self._ids.clear()
        return placed
