"""Lengths of a lane's sequences: learnt when they end, and used to find regions."""

from __future__ import annotations

from aquifer.cache.bucketed import BucketedCache
from aquifer.engine.lane import Lane
from aquifer.engine.sequence import Sequence, SequenceGroup
from aquifer.predict.ended import EndedOutput

_OUTPUT_WEIGHT = 0.02
"""EMA weight of the latest output in the mean length of outputs."""


def note_end(lane: Lane, sequence: Sequence) -> None:
    """Learn from the length of a sequence that comes to its own end now, at once or together with
    other devices."""
    group, num_tokens = sequence.group, len(lane.slots.tokens(sequence))
    num_outputs = num_tokens - group.num_prompt_tokens
    outlook = group.outlook
    if lane.forecaster is not None and outlook is not None:
        lane.forecaster.judge(outlook, num_outputs)
    classes = () if outlook is None else outlook.asked.classes
    ended = EndedOutput(group.num_prompt_tokens, num_outputs, classes)
    if lane.ended is None:
        learn(lane, ended)
    else:
        lane.ended.append(ended)


def learn(lane: Lane, ended: EndedOutput) -> None:
    """Learn from the length of an output of the lane's model, on this device or another."""
    lane.cache.learn(ended.num_tokens)
    lane.output_tokens += (ended.num_outputs - lane.output_tokens) * _OUTPUT_WEIGHT
    if lane.forecaster is not None:
        lane.forecaster.learn(ended)


def learns(lane: Lane) -> bool:
    """Whether anything depends on what is learnt of lengths."""
    return lane.forecaster is not None or isinstance(lane.cache, BucketedCache)


def has_region(lane: Lane, group: SequenceGroup) -> bool:
    """Whether a waiting request could begin in a free region of its bucket. True where KV is in no
    buckets."""
    if not isinstance(lane.cache, BucketedCache):
        return True
    first = group.live[0]
    return lane.cache.has_region(len(first.token_ids), group.limit_total, lane.told(first))
