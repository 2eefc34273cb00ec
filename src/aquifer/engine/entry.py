"""Admission of one request: its slots, and its KV, which is computed, cached or copied back."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from aquifer.cache.prefix import Match
from aquifer.engine.headroom import Headroom
from aquifer.engine.lane import Lane
from aquifer.engine.preemption import Preemption
from aquifer.engine.sequence import SequenceGroup
from aquifer.memory.runs import num_equal


def look_up(lane: Lane, group: SequenceGroup) -> Match | None:
    """The retained prefix that a waiting request begins with; None if it uses none.

    A request that waits is asked again and again: what was found before is not looked up anew.
    """
    if lane.prefixes is None or not group.reads_prefixes or group.begins_anew:
        return None
    first = group.live[0]
    group.match = lane.prefixes.match(first.token_ids, lane.prefix_key(first), group.match)
    return group.match


def bring_in(lane: Lane, group: SequenceGroup, headroom: Headroom, now_s: float) -> bool:
    """Give a waiting request its slots and room for its tokens; if False, nothing has changed.

    Args:
        lane: the model's lane.
        group: the request; its KV is not on the host.
        headroom: checks that running sequences keep room to grow.
        now_s: the time.

    Raises:
        DriverError: the device refused memory; nothing has changed.
    """
    table, cache = lane.slots, lane.cache
    first, *others = group.live
    match = look_up(lane, group)
    num_cached = 0 if match is None else match.num_tokens
    if not headroom.has_room(lane, group, match):
        return False
    with ExitStack() as undo:
        if lane.prefixes is not None and match is not None:
            first.lease = lane.prefixes.lock(match)
            undo.callback(lane.unlock, first, None)
        adopted = match.blocks if match is not None and num_cached else []
        slot = lane.assign_slot(first, adopted)
        undo.callback(table.release, first)
        undo.callback(cache.release, slot)
        if match is not None and num_cached:
            assert lane.prefixes is not None
            if not cache.resume(slot, lane.prefixes.kept(match), num_cached):
                return False
        if not cache.admit(slot, len(first.token_ids)):
            return False
        if not _assign_rest(lane, group, undo):
            return False
        undo.pop_all()
    group.match = None
    lane.begin(first, num_cached)
    if lane.prefixes is not None and first.lease is not None:
        lane.prefixes.settle(first.lease)
    if group.num_cached_tokens is None:
        group.num_cached_tokens = num_cached
        if lane.prefixes is not None and first.lease is not None:
            lane.prefixes.record(first.lease, now_s)
    for sequence in others:
        # It runs its last token itself, to sample from logits of its own.
        shared = num_equal(first.token_ids, sequence.token_ids)
        sequence.fork_tokens = min(shared, len(sequence.token_ids) - 1)
        table.set_parent(sequence, first)
    lane.stop(first)
    return True


def bring_back(
    lane: Lane, group: SequenceGroup, headroom: Headroom, preemption: Preemption
) -> bool:
    """Give a swapped request its slots, and copy its KV back from the host.

    Returns: False if there is no room, and nothing has changed.

    Raises:
        DriverError: the device refused memory; nothing has changed.
    """
    table = lane.slots
    if not headroom.has_room(lane, group, None):
        return False
    swapped = [s.swapped for s in group.live if s.swapped is not None]
    with ExitStack() as undo:
        slots = []
        for sequence in group.live:
            slots.append(lane.assign_slot(sequence))
            undo.callback(table.release, sequence)
        if not _assign_rest(lane, group, undo):
            return False
        if not preemption.swap_in(lane.cache, slots, swapped):
            return False
        undo.pop_all()
    for sequence in group.live:
        assert sequence.swapped is not None
        lane.begin(sequence, sequence.swapped.num_tokens)
        sequence.swapped = None
        # KV that it retained while it begins anew would scatter its blocks.
        if lane.prefixes is not None and group.reads_prefixes and not group.begins_anew:
            match = lane.prefixes.match(sequence.token_ids, lane.prefix_key(sequence))
            sequence.lease = lane.prefixes.lock(match)
            lane.prefixes.settle(sequence.lease)
    return True


def swap_out(lane: Lane, group: SequenceGroup, preemption: Preemption) -> bool:
    """Copy the KV of a running request to the host, if that is cheaper; returns whether it did."""
    table = lane.slots
    movable = [s for s in group.live if s.slot is not None and s.parent is None]
    if len(movable) < len(group.live):
        return False  # some sequences wait for their parent: it has hardly begun
    slots = [s.slot for s in movable if s.slot is not None]
    if table.have_outgrown(np.array(slots)).any():
        return False  # some of the KV is to be computed again anyway
    num_tokens = table.num_computed[slots].tolist()
    swapped = preemption.swap_out(lane.cache, slots, num_tokens, lane.recompute_s)
    if swapped is None:
        return False
    for sequence, kv in zip(movable, swapped, strict=True):
        sequence.swapped = kv
    return True


def discard_swapped(group: SequenceGroup, preemption: Preemption | None) -> None:
    """Release what a request has on the host; it is computed again when it is admitted."""
    swapped = [s.swapped for s in group.sequences if s.swapped is not None]
    if swapped:
        assert preemption is not None
        preemption.discard(swapped)
    for sequence in group.sequences:
        sequence.swapped = None


def _assign_rest(lane: Lane, group: SequenceGroup, undo: ExitStack) -> bool:
    """Assign slots to the sequences of a group that begin later: other samples, beams to come.

    Where sequences cannot share blocks, each of them gets memory of its own at once. Pre-condition:
    there are enough slots.

    Args:
        lane: the model's lane.
        group: a request, of which some sequences have slots.
        undo: takes slots and memory back if it is not emptied.

    Returns: False if the pool is short.
    """
    table, cache = lane.slots, lane.cache
    for sequence in group.sequences:
        if sequence.slot is not None:
            continue
        slot = lane.assign_slot(sequence)
        undo.callback(table.release, sequence)
        undo.callback(cache.release, slot)
        if not cache.can_share and not cache.reserve(np.array([slot]), np.ones(1, np.int64)):
            return False
    return True
