"""Snapshots of the scheduler's books, for policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from aquifer.cache.base import IntArray
from aquifer.engine.clients import Clients
from aquifer.engine.lane import Lane
from aquifer.engine.lane_lengths import has_region
from aquifer.engine.policies import (
    AdmissionSnapshot,
    Candidate,
    ClientState,
    RunningRequest,
)
from aquifer.engine.sequence import SequenceGroup
from aquifer.predict.forecaster import Asked, template_of

_ONLY_CLIENT = {0: ClientState()}


class Candidates(Sequence[Candidate]):
    """A queue as admission policies see it: read-only, and built only as far as it is read."""

    def __init__(self, waiting: Sequence[SequenceGroup]) -> None:
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [candidate(group) for group in self._waiting[index]]
        return candidate(self._waiting[index])


class Regions(Sequence[bool]):
    """Whether there is a free region for each request of a queue; found out only as it is read."""

    def __init__(self, lane: Lane, waiting: Sequence[SequenceGroup]) -> None:
        self._lane = lane
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> bool: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bool]: ...

    def __getitem__(self, index: int | slice) -> bool | Sequence[bool]:
        if isinstance(index, slice):
            return [has_region(self._lane, group) for group in self._waiting[index]]
        return has_region(self._lane, self._waiting[index])


def candidate(group: SequenceGroup) -> Candidate:
    """A waiting request as policies see it."""
    return Candidate(
        arrival=group.arrival,
        num_prompt_tokens=group.num_prompt_tokens,
        num_tokens=max([len(sequence.token_ids) for sequence in group.sequences]),
        num_sequences=len(group.sequences),
        num_preemptions=group.num_preemptions,
        client=group.client,
    )


def asked(group: SequenceGroup) -> Asked:
    """A request that has arrived, as forecasters see it."""
    request = group.request
    return Asked(
        prompt_token_ids=request.prompt_token_ids,
        most_tokens=group.limit_total - group.num_prompt_tokens,
        client=request.client,
        template=template_of(request.prompt_token_ids),
        temperature=request.params.temperature,
        top_p=request.params.top_p,
    )


def running_request(lane: Lane, group: SequenceGroup) -> RunningRequest:
    """A running request as policies see it."""
    return RunningRequest(
        model=lane.name,
        arrival=group.arrival,
        num_tokens=lane.slots.count_tokens(group),
        num_sequences=len(group.sequences),
        num_preemptions=group.num_preemptions,
        client=group.client,
        expected_left=_expected_left(lane, group),
    )


def _expected_left(lane: Lane, group: SequenceGroup) -> float | None:
    """Tokens that a running request is expected to get yet; None where it has no forecast."""
    slots = np.array([s.slot for s in group.sequences if s.slot is not None], np.int64)
    if not len(slots) or not lane.forecasts.is_known[slots].all():
        return None
    table = lane.slots
    num_outputs = np.maximum(table.num_tokens[slots] - table.num_prompt[slots], 0)
    return float(lane.forecasts.expected_left(slots, num_outputs).sum())


def admission_snapshot(
    lane: Lane,
    lanes: Iterable[Lane],
    clients: Clients,
    blocked: SequenceGroup | None,
    num_running: int | None = None,
) -> AdmissionSnapshot:
    """The queues of a model, for admission policies.

    Args:
        lane: the model's lane.
        lanes: all lanes.
        clients: the clients.
        blocked: the request, of any lane, that was refused memory last, or preempted, and waits.
        num_running: requests of the model that ran before this step; None for those that run now.
    """
    waiting = {client: lane.waiting.of(client) for client in lane.waiting.clients}
    return AdmissionSnapshot(
        queues={client: Candidates(groups) for client, groups in waiting.items()},
        regions={client: Regions(lane, groups) for client, groups in waiting.items()},
        clients=_ONLY_CLIENT if len(clients) == 1 else _states(lanes, clients),
        num_running=len(lane.running) if num_running is None else num_running,
        num_free_slots=lane.slots.num_free,
        blocked=None if blocked is None else candidate(blocked),
    )


def running_sequences(lane: Lane, clients: Clients) -> IntArray:
    """Sequences of each client that have a slot of a model, [number of clients]."""
    table = lane.slots
    return np.bincount(table.client[table.in_order], minlength=len(clients))


def _states(lanes: Iterable[Lane], clients: Clients) -> dict[int, ClientState]:
    num_running = np.zeros(len(clients), np.int64)
    for lane in lanes:
        num_running += running_sequences(lane, clients)
    pairs = zip(clients.served_tokens.tolist(), num_running.tolist(), strict=True)
    return {client: ClientState(*pair) for client, pair in enumerate(pairs)}


def active_clients(lanes: Iterable[Lane], clients: Clients) -> set[int]:
    """The clients that have requests."""
    active: set[int] = set()
    for lane in lanes:
        active.update(lane.waiting.clients)
        active.update(running_sequences(lane, clients).nonzero()[0].tolist())
    return active


def is_stuck(lane: Lane, group: SequenceGroup) -> bool:
    """Whether a running request is the one that its cache had no place for."""
    slot = lane.cache.stuck_slot
    return slot is not None and any(sequence.slot == slot for sequence in group.sequences)
