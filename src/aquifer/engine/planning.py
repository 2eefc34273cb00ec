"""Planning: the tokens that running sequences run next, and the step that runs them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from aquifer.cache.journal import KVOp
from aquifer.cache.spans import IntArray, Spans
from aquifer.engine.queue import Queue
from aquifer.engine.slots import SlotTable
from aquifer.engine.step_input import SlotAssignment, StepInput

_LEAST_PROMPT_TOKENS = 64
"""Prompt tokens that a step may always have beside sequences that decode, so that prompts end."""

_LEAST_TOKENS_BESIDE = 1024
"""Prompt tokens of a step of `StepBudget.beside_s`, at least: with fewer, a large model would read
its weights as often for prompts as it does for decodes."""

_LEAST_CUT = 0.75
"""The least part of a budget that it may be cut to for the sake of a captured step: these are up to
a quarter apart. Beyond the largest, steps run kernel by kernel, and take as long as they need."""

_LAUNCHES = 2
"""How many times the host's own time for a launch the device's work must be, so that the device is
still at it when the next step, with the requests that came meanwhile, is launched."""

_LAUNCH_WEIGHT = 0.2
"""EMA weight of the latest launch."""

_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Tokens that a step may have.

    Args:
        max_batched_tokens: most tokens of any step.
        max_prefill_s: time limit of the prompts in a step in which sequences decode, in seconds;
            None for none.
        beside_s: seconds of prompts in such a step where there is no limit, if some sequences will
            decode longer than those that are read: more steps then read the weights for both, and
            fewer for decoding alone. None to fill each step.
        least_enough_s: the least that `enough_s` is; None where the device does not run ahead of
            the host.
        launch_s: seconds that the host takes to launch a step that reads prompts.
    """

    max_batched_tokens: int
    max_prefill_s: float | None = None
    beside_s: float | None = None
    least_enough_s: float | None = None
    launch_s: float | None = None

    @property
    def enough_s(self) -> float | None:
        """Work for the device, in seconds, with which a step is launched although more requests
        wait, if it idles meanwhile; None where it does not run ahead of the host."""
        if self.least_enough_s is None or self.launch_s is None:
            return self.least_enough_s
        return max(self.least_enough_s, _LAUNCHES * self.launch_s)

    def with_launch(self, seconds: float) -> StepBudget:
        """The budget after a step that reads prompts was launched in that time."""
        before = seconds if self.launch_s is None else self.launch_s
        return replace(self, launch_s=before + _LAUNCH_WEIGHT * (seconds - before))

    def enough_tokens(self, prefill_s: Callable[[float, float], float]) -> int | None:
        """Prompt tokens of `enough_s`, at most those of a step; None for no limit.

        Args:
            prefill_s: as in `tokens`.
        """
        enough_s = self.enough_s
        if enough_s is None:
            return None
        counts = range(1, self.max_batched_tokens)
        return 1 + bisect_left(counts, enough_s, key=lambda count: prefill_s(0, count))

    def tokens(
        self,
        table: SlotTable,
        prefill_s: Callable[[float, float], float],
        captured_sizes: Sequence[int],
        waiting: Queue,
    ) -> int:
        """Token budget of a model's next step.

        Args:
            table: its sequences, of which some run in the step.
            prefill_s: seconds to compute a stretch of a prompt, given its first position and
                length.
            captured_sizes: numbers of tokens for which its steps are captured, ascending. A step
                of another number takes as long as one of the next larger, so a budget is cut to the
                next smaller, if that is near.
            waiting: its requests that wait.
        """
        if self.max_prefill_s is None and self.beside_s is None:
            return self.max_batched_tokens
        slots = table.in_order
        is_reading = _is_reading(table, slots)
        if not waiting and not is_reading.any():
            return self.max_batched_tokens
        # Those that a step in flight may end with their last token run no more.
        num_decodes = int(np.count_nonzero(_missing(table, slots)[~is_reading]))
        if not num_decodes:
            return self.max_batched_tokens
        limit_s, least_prompt = self.max_prefill_s, _LEAST_PROMPT_TOKENS
        if limit_s is None and _outlast(
            table, slots[~is_reading], slots[is_reading], waiting.most_new
        ):
            limit_s, least_prompt = self.beside_s, _LEAST_TOKENS_BESIDE
        if limit_s is None:
            return self.max_batched_tokens
        first = 0 if is_reading.sum() == 0 else int(table.num_computed[slots[is_reading.argmax()]])
        num_prompt = bisect_right(
            range(1, self.max_batched_tokens + 1),
            limit_s,
            key=lambda count: prefill_s(first, count),
        )
        budget = min(self.max_batched_tokens, num_decodes + max(num_prompt, least_prompt))
        below = bisect_right(captured_sizes, budget) - 1
        least = max(num_decodes + _LEAST_PROMPT_TOKENS, _LEAST_CUT * budget)
        if below >= 0 and captured_sizes[below] >= least:
            return captured_sizes[below]
        return budget


def next_tokens(
    table: SlotTable, slots: IntArray, max_batched_tokens: int
) -> tuple[IntArray, IntArray]:
    """Tokens that running sequences have to run, as (slots, counts), cut to the token budget.

    Args:
        table: the model's sequences.
        slots: those that may run, in order of arrival.
        max_batched_tokens: the token budget.
    """
    missing = _missing(table, slots)
    if table.drafts:
        missing = _with_drafts(table, slots, missing)
    if missing.sum() <= max_batched_tokens:
        runs = missing > 0
        return slots[runs], missing[runs]
    is_reading = _is_reading(table, slots)
    order = np.argsort(is_reading, kind="stable")
    slots, missing = slots[order], missing[order]
    before = np.cumsum(missing) - missing
    counts = np.clip(max_batched_tokens - before, 0, missing)
    return slots[counts > 0], counts[counts > 0]


def _outlast(table: SlotTable, decoding: IntArray, reading: IntArray, most_new: int) -> bool:
    """Whether one of the sequences that decode may bring more tokens than any that is read, or than
    `most_new`."""
    left = (table.max_total - table.num_tokens)[decoding].max(initial=0)
    of_read = (table.max_total - table.num_prompt)[reading].max(initial=most_new)
    return bool(left > of_read)


def _missing(table: SlotTable, slots: IntArray) -> IntArray:
    """Tokens that each sequence has to run before it stops; its very last one is never run."""
    known = np.minimum(table.num_tokens[slots], table.max_total[slots] - 1)
    known = np.minimum(known, table.stop_at[slots])
    missing: IntArray = known - table.num_computed[slots]
    return missing


def _is_reading(table: SlotTable, slots: IntArray) -> npt.NDArray[np.bool_]:
    """Whether each sequence has more than one token to compute of what it was given."""
    computed = table.num_computed[slots]
    return (computed < table.num_given[slots]) & (table.num_tokens[slots] - computed > 1)


def all_decode(table: SlotTable) -> bool:
    """Whether each running sequence has one token to run, which the device sampled; not if none
    runs."""
    slots = table.in_order
    computed = table.num_computed[slots]
    decodes = (table.num_tokens[slots] - computed == 1) & (computed >= table.num_given[slots])
    return 0 < len(slots) == np.count_nonzero(decodes)


def make_step(
    name: str,
    table: SlotTable,
    slots: IntArray,
    counts: IntArray,
    kv_ops: tuple[KVOp, ...] = (),
    *,
    is_express: bool = False,
) -> StepInput:
    """The step that runs these tokens; the table counts it as done from now on.

    Args:
        name: the model's.
        table: its sequences' columns.
        slots: [n], which sequences run.
        counts: [n], how many tokens of each, drafts included.
        kv_ops: the journal of the KV cache since the last step.
        is_express: whether some clients' sequences sit it out.
    """
    starts = table.num_computed[slots]
    decodes = starts >= table.num_given[slots]
    num_decodes = num_single = int(np.count_nonzero(decodes))
    if num_decodes < len(slots):
        kinds = np.where(decodes, 0, np.where(counts == 1, 1, 2))
        num_single = int(np.count_nonzero(kinds <= 1))
        order = np.argsort(kinds, kind="stable")
        slots, counts, starts = slots[order], counts[order], starts[order]
    ends = starts + counts
    known = table.num_tokens[slots]
    sampled = (ends >= known).nonzero()[0]
    get_token = slots[sampled]
    most_new = table.most_new[get_token]
    if table.drafts:
        most_new = np.minimum(most_new, ends[sampled] - known[sampled] + 1)
    table.num_computed[slots] = ends
    table.num_tokens[get_token] += most_new
    admitted = slots[table.is_new[slots]].tolist()
    if admitted:
        table.is_new[admitted] = False
    spans = Spans.make(slots, starts, counts)
    return StepInput(
        model=name,
        spans=spans,
        serials=table.serial[slots],
        token_ids=_token_ids(table, spans, num_decodes),
        num_decodes=num_decodes,
        num_single=num_single,
        sampled=sampled,
        most_new=most_new,
        assigned=tuple(_assignment(table, slot) for slot in admitted),
        kv_ops=kv_ops,
        is_express=is_express,
    )


def _with_drafts(table: SlotTable, slots: IntArray, missing: IntArray) -> IntArray:
    """Tokens to run, plus drafts where all known tokens of a sequence are run."""
    most = np.minimum(table.most_new[slots], table.max_total[slots] - table.num_tokens[slots])
    return np.where(missing > 0, missing + np.maximum(most - 1, 0), 0)


def _token_ids(table: SlotTable, spans: Spans, num_decodes: int) -> IntArray:
    """The step's tokens, [num_tokens]; -1 where the device has them, or drafts them."""
    token_ids = np.empty(spans.num_tokens, np.int64)
    token_ids.fill(-1)
    if num_decodes < len(spans.slots):
        row = int(spans.offsets[num_decodes])
        parts = (spans.slots, spans.starts, spans.counts)
        chunks = (part[num_decodes:].tolist() for part in parts)
        for slot, start, count in zip(*chunks, strict=True):
            known = min(count, int(table.num_known[slot]) - start)
            token_ids[row : row + known] = table.token_ids[slot, start : start + known]
            row += count
    return token_ids


def _assignment(table: SlotTable, slot: int) -> SlotAssignment:
    """Everything that sampling needs to know of a slot's new sequence."""
    sequence = table.sequences[slot]
    assert sequence is not None
    group, params = sequence.group, sequence.request.params
    # Those of the first completion are reported. Another one may have to compute the prompt again.
    is_reported = sequence.prompt_logprobs is not None and not sequence.has_output
    prompt_logprobs = params.prompt_logprobs if is_reported else None
    needs_tokens = params.has_penalties or prompt_logprobs is not None
    return SlotAssignment(
        slot=slot,
        seed=sequence.seed,
        num_prompt_tokens=group.num_prompt_tokens,
        least_context_tokens=table.least_context(slot),
        min_total_tokens=int(table.min_total[slot]),
        stop_ids=group.stop_ids,
        params=params,
        num_logprobs=sequence.num_logprobs,
        num_prompt_logprobs=prompt_logprobs,
        token_ids=sequence.token_ids if needs_tokens else _NO_TOKENS,
    )
