"""Snapshots of the scheduler's books, for policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from aquifer.engine.lane import Lane
from aquifer.engine.policies import Candidate, RunningRequest
from aquifer.engine.sequence import SequenceGroup


class Candidates(Sequence[Candidate]):
    """A queue as admission policies see it: read-only, and built only as far as it is read."""

    def __init__(self, waiting: list[SequenceGroup]) -> None:
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [_candidate(group) for group in self._waiting[index]]
        return _candidate(self._waiting[index])


def _candidate(group: SequenceGroup) -> Candidate:
    return Candidate(
        arrival=group.arrival,
        num_prompt_tokens=group.num_prompt_tokens,
        num_tokens=max([len(sequence.token_ids) for sequence in group.sequences]),
        num_sequences=len(group.sequences),
        num_preemptions=group.num_preemptions,
    )


def running_request(lane: Lane, group: SequenceGroup) -> RunningRequest:
    """A running request as policies for victims see it."""
    return RunningRequest(
        model=lane.name,
        arrival=group.arrival,
        num_tokens=lane.slots.count_tokens(group),
        num_sequences=len(group.sequences),
        num_preemptions=group.num_preemptions,
    )
