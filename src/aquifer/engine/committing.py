"""Committing: records the results of a step, that is new tokens, ends and the next beams."""

from __future__ import annotations

import numpy as np

from aquifer.cache.base import IntArray
from aquifer.engine import beam_groups
from aquifer.engine.lane import Lane
from aquifer.engine.lane_lengths import note_end
from aquifer.engine.outputs import RequestTiming, TokenLogprobs, TokenOutput
from aquifer.engine.sequence import Sequence, SequenceGroup
from aquifer.engine.slots import STOP_IDS_PER_SLOT
from aquifer.engine.step_input import StepInput, StepOutput
from aquifer.engine.stopping import find_endings


def commit_tokens(
    lane: Lane,
    plan: StepInput,
    result: StepOutput,
    kept: IntArray,
    slots: IntArray,
    with_each_token: bool,
    now_s: float,
) -> list[TokenOutput]:
    """Commit the rows of sequences that the device continues.

    Args:
        lane: the model's lane.
        plan: the step that was run.
        result: its results.
        kept: [n], rows of the result with sequences that are still running.
        slots: [n], their slots.
        with_each_token: False to report first and last tokens and those with extras only.
        now_s: the time.
    """
    table = lane.slots
    tokens, given = result.tokens[kept], result.counts[kept]
    lengths = table.num_known[slots]
    endings = find_endings(table, slots, lengths, tokens, given)
    counts = endings.counts
    if tokens.shape[1] == 1:
        table.token_ids[slots, lengths] = tokens[:, 0]
    else:
        rows, places = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        table.token_ids[slots[rows], lengths[rows] + places] = tokens[rows, places]
    table.num_known[slots] = lengths + counts
    if table.drafts:
        # Later plans counted with the most tokens.
        missing = plan.most_new[kept] - given
        table.num_tokens[slots] -= missing
        table.num_computed[slots] -= missing
    ends = endings.stops | endings.is_full
    first = lengths == table.num_prompt[slots]
    special = ends | first | table.is_special[slots]
    reported = counts > 0 if with_each_token else special & (counts > 0)
    outputs: list[TokenOutput] = []
    rows = reported.nonzero()[0]
    if not len(rows):
        return outputs
    for i, slot, new, is_special in zip(
        rows.tolist(),
        slots[rows].tolist(),
        tokens[rows].tolist(),
        special[rows].tolist(),
        strict=True,
    ):
        sequence = table.sequences[slot]
        assert sequence is not None
        output = TokenOutput(sequence.group.request.request_id, new, sequence.index)
        outputs.append(output)
        if len(new) > 1:
            output.token_ids = new[: counts[i]]
        if is_special:
            stopped = _stops_late(sequence, output, int(lengths[i])) or bool(endings.stops[i])
            reports = result.logprobs.get(int(kept[i]))
            if reports is not None:
                output.logprobs = reports[: len(output.token_ids)]
            _note(lane, sequence, output, stopped, bool(ends[i]), now_s)
    return outputs


def commit_beams(
    lane: Lane, slots: list[int], rows: list[int], result: StepOutput, now_s: float
) -> list[TokenOutput]:
    """Commit the rows of beams; a search advances once the candidates of all beams are known."""
    reports: list[tuple[Sequence, TokenLogprobs]] = []
    for slot, row in zip(slots, rows, strict=True):
        sequence = lane.slots.sequences[slot]
        assert sequence is not None
        reports.append((sequence, result.logprobs[row][0]))
    outputs: list[TokenOutput] = []
    for group in beam_groups.collect(reports):
        beams = group.beams
        assert beams is not None
        if group.first_token_s is None:
            lane.retain(beams.live[0], now_s)
            group.first_token_s = now_s
        beam_groups.advance(lane, group, beams, now_s)
        if beams.search.finished:
            outputs += beam_groups.results(group, beams, timing(group, now_s))
            for beam in beams.live:
                note_end(lane, beam)
            lane.end_all(group, now_s)
    return outputs


def skip_steps(lane: Lane, slots: IntArray, num_steps: int, tokens: IntArray) -> None:
    """Record that sequences decoded for some steps, each with the same token in all of them.

    It is for a replay, which knows that in these steps no sequence ends and none is admitted, and
    has reserved room for them.

    Args:
        lane: the model's lane.
        slots: [n], slots of sequences that decode.
        num_steps: number of steps.
        tokens: [n], the token of each sequence.
    """
    table = lane.slots
    places = table.num_tokens[slots][:, None] + np.arange(num_steps)
    table.token_ids[slots[:, None], places] = tokens[:, None]
    table.num_known[slots] += num_steps
    table.num_tokens[slots] += num_steps
    table.num_computed[slots] += num_steps


def timing(group: SequenceGroup, now_s: float) -> RequestTiming:
    """Timestamps of a request that ends now."""
    return RequestTiming(group.request.arrival_s, group.scheduled_s, group.first_token_s, now_s)


def _note(
    lane: Lane,
    sequence: Sequence,
    output: TokenOutput,
    stopped: bool,
    ended: bool,
    now_s: float,
) -> None:
    """Complete an output that has the first or the last token of a sequence."""
    group = sequence.group
    if not sequence.has_output:
        sequence.has_output = True
        output.prompt_logprobs = sequence.prompt_logprobs
        lane.retain(sequence, now_s)
        if group.first_token_s is None:
            group.first_token_s = now_s
            output.num_cached_tokens = group.num_cached_tokens or 0
    if stopped or ended:
        output.finish_reason = "stop" if stopped else "length"
        last = output.token_ids[-1]
        if stopped and last not in group.eos_ids:
            output.stop_reason = last
        output.timing = timing(group, now_s)
        note_end(lane, sequence)
        lane.end(sequence, now_s)


def _stops_late(sequence: Sequence, output: TokenOutput, num_tokens: int) -> bool:
    """Find stop tokens beyond those in the slot table, and cut the output at the first one.

    Args:
        sequence: the sequence that got the tokens.
        output: its new tokens.
        num_tokens: tokens that it had before.
    """
    group = sequence.group
    if len(group.stop_ids) <= STOP_IDS_PER_SLOT:
        return False
    min_total = group.num_prompt_tokens + group.request.params.min_tokens
    for i, token in enumerate(output.token_ids):
        if token in group.stop_ids and num_tokens + i >= min_total:
            del output.token_ids[i + 1 :]
            return True
    return False
