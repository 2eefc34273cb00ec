"""Queue: the waiting requests of one model, by client."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from aquifer.engine.sequence import SequenceGroup


class Queue:
    """The waiting requests of one model, by client.

    Those of a client are in order of arrival, preempted ones too.
    """

    def __init__(self) -> None:
        self._by_client: dict[int, list[SequenceGroup]] = {}  # no list is empty
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All requests, client by client."""
        for groups in self._by_client.values():
            yield from groups

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._by_client.get(group.client, ())

    @property
    def clients(self) -> list[int]:
        """The clients that have requests here."""
        return list(self._by_client)

    @property
    def most_new(self) -> int:
        """The most tokens that the first request of a client may bring; 0 if there is none."""
        firsts = (groups[0] for groups in self._by_client.values())
        return max((group.max_total - group.num_prompt_tokens for group in firsts), default=0)

    def of(self, client: int) -> Sequence[SequenceGroup]:
        """The requests of a client."""
        return self._by_client.get(client, ())

    def find(self, client: int, arrival: int) -> SequenceGroup:
        """The request of a client that arrived with this number; it must be here."""
        return next(group for group in self._by_client[client] if group.arrival == arrival)

    def append(self, group: SequenceGroup) -> None:
        """Put a request that has just arrived behind all of its client."""
        self._by_client.setdefault(group.client, []).append(group)
        self._num += 1

    def put_back(self, group: SequenceGroup) -> None:
        """Put a preempted request in its place among those of its client."""
        groups = self._by_client.setdefault(group.client, [])
        insort(groups, group, key=lambda other: other.arrival)
        self._num += 1

    def remove(self, group: SequenceGroup) -> None:
        """Take a request out; it must be here."""
        groups = self._by_client[group.client]
        groups.remove(group)
        self._num -= 1
        if not groups:
            del self._by_client[group.client]
