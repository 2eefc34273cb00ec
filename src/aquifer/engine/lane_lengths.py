"""Lengths of a lane's sequences: learnt when they end, and used to find regions."""

from __future__ import annotations

from aquifer.cache.bucketed import BucketedCache
from aquifer.engine.lane import Lane
from aquifer.engine.sequence import Sequence, SequenceGroup

_OUTPUT_WEIGHT = 0.02
"""EMA weight of the latest output in the mean length of outputs."""


def learn(lane: Lane, sequence: Sequence) -> None:
    """Learn from the length of a sequence that comes to its own end now."""
    group, num_tokens = sequence.group, len(lane.slots.tokens(sequence))
    if sequence.slot is not None:
        lane.cache.finished(sequence.slot, num_tokens)
    num_outputs = num_tokens - group.num_prompt_tokens
    lane.output_tokens += (num_outputs - lane.output_tokens) * _OUTPUT_WEIGHT
    if lane.forecaster is not None and group.outlook is not None:
        lane.forecaster.ended(group.outlook, num_outputs)


def has_region(lane: Lane, group: SequenceGroup) -> bool:
    """Whether a waiting request could begin in a free region of its bucket. True where KV is in no
    buckets."""
    if not isinstance(lane.cache, BucketedCache):
        return True
    first = group.live[0]
    return lane.cache.has_region(len(first.token_ids), group.limit_total, lane.told(first))
