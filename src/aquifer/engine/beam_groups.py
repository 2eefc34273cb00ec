"""Beam search in slots: beams continue, fork and end once the candidates of all are known."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from aquifer.engine.lane import Lane
from aquifer.engine.outputs import RequestTiming, TokenLogprobs, TokenOutput
from aquifer.engine.sequence import Beams, Sequence, SequenceGroup


def collect(reports: Iterable[tuple[Sequence, TokenLogprobs]]) -> list[SequenceGroup]:
    """Store the candidates of beams; returns the groups that have those of all their beams."""
    groups: dict[int, SequenceGroup] = {}
    for sequence, report in reports:
        assert sequence.group.beams is not None
        sequence.group.beams.candidates[sequence] = report
        groups[sequence.group.arrival] = sequence.group
    return [
        group
        for group in groups.values()
        if group.beams is not None and len(group.beams.candidates) == len(group.beams.live)
    ]


def advance(lane: Lane, group: SequenceGroup, beams: Beams, now_s: float) -> None:
    """Go on with the best continuations of all beams.

    The first continuation of each beam stays in its slot. The others take slots of beams that have
    no continuation, and fork before the next step.
    """
    table = lane.slots
    parents = beams.live
    reports = [beams.candidates[parent] for parent in parents]
    beams.candidates.clear()
    # The first entry of each is the sampled token, which has no meaning here.
    chosen = beams.search.advance(
        np.array([report.token_ids[1:] for report in reports], np.int64),
        np.array([report.logprobs[1:] for report in reports], np.float32),
    )
    if not chosen:
        return
    going_on = {parents[index] for index, _ in chosen}
    idle = [sequence for sequence in group.sequences if sequence not in going_on]
    for sequence in idle:
        if sequence in parents:
            lane.clear_slot(sequence, now_s)
    tokens = [table.tokens(parent).copy() for parent in parents]
    in_place: set[Sequence] = set()
    beams.live = []
    for index, token in chosen:
        parent = parents[index]
        if parent not in in_place:
            in_place.add(parent)
            assert parent.slot is not None
            table.append(parent.slot, token)
            beams.live.append(parent)
        else:
            child = idle.pop()
            child.token_ids = np.append(tokens[index], np.int32(token))
            child.fork_tokens = len(tokens[index])
            table.set_parent(child, parent)
            beams.live.append(child)


def results(group: SequenceGroup, beams: Beams, timing: RequestTiming) -> list[TokenOutput]:
    """Outputs of a search that is over: its completions, best first, each in one output."""
    outputs = []
    for index, found in enumerate(beams.search.results()):
        output = TokenOutput(group.request.request_id, found.token_ids, index)
        output.finish_reason = found.finish_reason
        output.cumulative_logprob = found.cumulative_logprob
        last = found.token_ids[-1]
        if found.finish_reason == "stop" and last not in group.eos_ids:
            output.stop_reason = last
        output.timing = timing
        output.num_cached_tokens = (group.num_cached_tokens or 0) if index == 0 else 0
        outputs.append(output)
    return outputs
