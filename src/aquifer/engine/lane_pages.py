"""Pages that a request of a model takes, at most and at first; KV of all of its requests."""

from __future__ import annotations

from aquifer.engine.lane import Lane
from aquifer.engine.sequence import SequenceGroup


def most_pages(lane: Lane, num_prompt: int, num_total: int, num_sequences: int = 1) -> int:
    """Pages that a request takes at most: see `Footprint.most`.

    Sequences that outgrow their KV compute it again, each its own: then they share nothing.
    """
    outgrows = num_total - 1 > lane.slots.kv_limit_of(num_prompt)
    return lane.cache.footprint.most(1 if outgrows else num_prompt, num_total, num_sequences)


def most_pages_of(lane: Lane, group: SequenceGroup) -> int:
    """Pages that a request takes at most, waiting or running."""
    num_sequences = group.request.params.num_sequences
    return most_pages(lane, group.num_prompt_tokens, group.limit_total, num_sequences)


def longest(lane: Lane, num_pages: int, num_prompt: int, num_sequences: int = 1) -> int:
    """The largest `num_total` for which `most_pages` is not more: see `Footprint.longest`."""
    footprint, limit = lane.cache.footprint, lane.slots.kv_limit_of(num_prompt)
    found = footprint.longest(num_pages, num_prompt, num_sequences)
    if found - 1 <= limit:
        return found
    return max(footprint.longest(num_pages, 1, num_sequences), limit + 1)


def first_pages(lane: Lane) -> int:
    """Pages for the KV of the earliest request that waits, if any does."""
    if not lane.waiting:
        return 0
    group = min(lane.waiting, key=lambda group: group.arrival)
    return lane.cache.footprint.pages(len(group.live[0].token_ids) + 1)


def running_bytes(lane: Lane) -> int:
    """Bytes of the pages under running sequences; shared ones count for each."""
    return lane.cache.footprint.paged_bytes(lane.slots.num_computed[lane.slots.in_order])


def swapped_bytes(lane: Lane) -> int:
    """Bytes of KV that waiting requests have on the host."""
    return sum(
        sequence.swapped.num_bytes
        for group in lane.waiting
        for sequence in group.sequences
        if sequence.swapped is not None
    )
