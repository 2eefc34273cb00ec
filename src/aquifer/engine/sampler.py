"""Sampler: chooses the next tokens from logits.

Each row is independent: its token depends on its own logits, parameters, seed and position only.
The order of the steps is vLLM's: allowed tokens, biases, penalties, temperature, min-p, top-k,
top-p. The first two, which few requests use, are `aquifer.engine.logit_changes`; the rest is
`aquifer.kernels.sampling`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import torch

from aquifer.cache.base import IntArray
from aquifer.engine.logit_changes import LogitChanges
from aquifer.engine.outputs import TokenLogprobs
from aquifer.engine.params import SamplingParams
from aquifer.engine.step_input import SlotAssignment
from aquifer.kernels.sampling.columns import SamplingColumns, write_counts
from aquifer.kernels.sampling.sample import Variant, sample
from aquifer.memory.transfer import Uploads, download, upload


class SamplingMode(IntEnum):
    """How tokens are chosen from logits; each kind of step can do what those below it can."""

    GREEDY = 0
    PLAIN = 1  # by temperature alone
    FULL = 2  # with top-k, top-p or min-p
    PENALIZED = 3  # with penalties

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingMode:
        """The least that does for these parameters."""
        if params.has_penalties:
            return cls.PENALIZED
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            return cls.FULL
        return cls.PLAIN if params.temperature > 0 else cls.GREEDY


_VARIANTS: dict[SamplingMode, Variant] = {
    SamplingMode.GREEDY: "greedy",
    SamplingMode.PLAIN: "plain",
    SamplingMode.FULL: "full",
    SamplingMode.PENALIZED: "full",
}


_NO_ROWS = np.zeros(0, np.int64)

_LEAST_TOP_P = float(np.finfo(np.float32).tiny)
"""A smaller top-p keeps the most probable token too, but would be 0 in float32 and keep none."""

_LEAST_REPETITION = 1e-20
"""A smaller repetition penalty orders tokens likewise, but logits over it would be infinite."""


class Sampler:
    """Samples for the sequences of one model, with their parameters on the device.

    Rows with extras are those with logits that the host has to change (biases, allowed tokens, no
    stop token yet) or to report.

    Args:
        num_slots: slots, which are numbered from 1.
        vocab_size: columns of the logits.
        device: device of the logits.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        num_rows = num_slots + 1
        self._device = device
        self.columns = SamplingColumns.empty(num_rows, 0, vocab_size, device)
        self._assigned: list[SlotAssignment | None] = [None] * num_rows
        self._mode = np.zeros(num_rows, np.int8)
        self._changes = LogitChanges(num_rows, vocab_size)
        self._num_logprobs = np.full(num_rows, -1, np.int64)  # -1 is none
        self._may_have_extras = np.zeros(num_rows, np.bool_)
        # The row of counts of each slot, -1 for none, and the rows that no slot has. Since few
        # requests need one, there are fewer rows than slots.
        self._counts_row = np.full(num_rows, -1, np.int64)
        self._free_rows: list[int] = []

    def assign(self, assigned: Sequence[SlotAssignment], uploads: Uploads) -> None:
        """Store the parameters of sequences that got a slot.

        It may replace the counts of `columns`, so steps with penalties cannot be captured.

        Args:
            assigned: the slots, and the parameters of their sequences.
            uploads: bring the parameters to the device, to be sent before the slots are sampled.
        """
        for one in assigned:
            self._assigned[one.slot] = one
            self._mode[one.slot] = SamplingMode.of(one.params)
            self._changes.assign(one)
            self._num_logprobs[one.slot] = -1 if one.num_logprobs is None else one.num_logprobs
            self._may_have_extras[one.slot] = (
                one.params.changes_logits
                or one.params.min_tokens > 0
                or one.num_logprobs is not None
            )
        slots = np.array([one.slot for one in assigned], np.int64)
        self._share_out_counts(slots, [one.slot for one in assigned if one.params.has_penalties])
        floats = np.zeros((6, len(slots)), np.float32)
        ints = np.zeros((3, len(slots)), np.int64)
        for i, one in enumerate(assigned):
            params = one.params
            floats[:, i] = (
                params.temperature,
                max(params.top_p, _LEAST_TOP_P),
                params.min_p,
                max(params.repetition_penalty, _LEAST_REPETITION),
                params.presence_penalty,
                params.frequency_penalty,
            )
            counts_row = int(self._counts_row[one.slot])
            if params.has_penalties:
                known = upload(one.token_ids.astype(np.int64), self._device)
                num_prompt = one.num_prompt_tokens
                write_counts(
                    self.columns.counts[counts_row], known[:num_prompt], known[num_prompt:]
                )
            seed = int(np.uint64(one.seed).astype(np.int64))
            ints[:, i] = max(params.top_k, 0), seed, counts_row
        # Two floats are as long as an integer.
        rows = slots[None], ints, floats.reshape(-1).view(np.int64).reshape(3, -1)
        uploads.add(np.concatenate(rows), self._write)

    def _write(self, rows: torch.Tensor) -> None:
        """Overwrite columns: [7, n] int64, that is slots, 3 integers, and 6 floats by twos."""
        floats = rows[4:].reshape(-1).view(torch.float32).view(6, -1)
        self.columns.write(rows[0], floats, rows[1:4])

    def assigned(self, slot: int) -> SlotAssignment:
        """The assignment of a slot's present sequence."""
        found = self._assigned[slot]
        assert found is not None, "a slot that was never assigned"
        return found

    def extras(self, slots: IntArray, num_tokens: IntArray) -> IntArray:
        """Indices of the rows that need more than `sample`.

        Args:
            slots: [n], the slot of each row.
            num_tokens: [n], tokens that the row's sequence has.
        """
        if not np.count_nonzero(self._may_have_extras[slots]):  # as in nearly every step
            return _NO_ROWS
        reports = self._num_logprobs[slots] >= 0
        return np.flatnonzero(self._changes.are_needed(slots, num_tokens) | reports)

    def mode(self, slots: IntArray) -> SamplingMode:
        """The kind of step that can sample for all of these slots."""
        return SamplingMode(int(self._mode[slots].max(initial=0)))

    def num_logprobs(self, slots: IntArray) -> IntArray:
        """How many of the most probable tokens to report for each slot; -1 for no report."""
        return self._num_logprobs[slots]

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        out: torch.Tensor,
        mode: SamplingMode,
    ) -> None:
        """Choose a token for each row, without host synchronisation.

        Args:
            logits: [n, vocab], left as they are.
            slots: [n] int64, the slot of each row, -1 for rows that are left alone.
            num_tokens: [n] int64, tokens that the row's sequence has.
            out: [n] int64, overwritten but for rows that are left alone.
            mode: at least what any of the rows needs.
        """
        sample(logits, slots, num_tokens, self.columns, out, variant=_VARIANTS[mode])

    def changed_logits(
        self, logits: torch.Tensor, slots: IntArray, num_tokens: IntArray
    ) -> torch.Tensor:
        """Logits with the changes that each row's request asks for.

        Args:
            logits: [n, vocab], left as they are.
            slots: [n], the slot of each row.
            num_tokens: [n], tokens that the row's sequence has.

        Returns: a copy; `logits` itself if no row changes.
        """
        return self._changes.apply(logits, slots, num_tokens)

    def _share_out_counts(self, slots: IntArray, needing: list[int]) -> None:
        """Give some of these slots rows of counts, and take those of the slots' former sequences.

        Rows are added if there are too few.

        Args:
            slots: the slots.
            needing: those with penalties.
        """
        rows = self._counts_row[slots]
        if rows.max(initial=-1) >= 0:
            self._free_rows += rows[rows >= 0].tolist()
            self._counts_row[slots] = -1
        missing = len(needing) - len(self._free_rows)
        if missing > 0:
            num_rows, vocab_size = self.columns.counts.shape
            # At least twice as many rows, so that this is rare.
            num_more = max(missing, num_rows)
            counts = self.columns.counts.new_zeros((num_rows + num_more, vocab_size))
            counts[:num_rows] = self.columns.counts
            self.columns = dataclasses.replace(self.columns, counts=counts)
            self._free_rows += range(num_rows, num_rows + num_more)
        for slot in needing:
            self._counts_row[slot] = self._free_rows.pop()


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_logprobs: IntArray
) -> Callable[[], list[TokenLogprobs]]:
    """Log probabilities of each row's token and of the most probable ones.

    Args:
        logits: [n, vocab], as the model gave them.
        tokens: [n], the token to report first.
        num_logprobs: [n], how many of the most probable to report; all, if there are fewer.

    Returns:
        A function that returns one entry for each row, to be called once the device is done.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > own).sum(1) + 1
    num_logprobs = np.minimum(num_logprobs, logprobs.shape[1])
    num_reported = max(int(num_logprobs.max()), 1)
    top_values, top_ids = logprobs.topk(num_reported, dim=1)
    # Two copies to the host, of integers and of floats.
    ids = download(torch.cat((tokens.unsqueeze(1), ranks.unsqueeze(1), top_ids), 1))
    values = download(torch.cat((own, top_values), 1))

    def entries() -> list[TokenLogprobs]:
        return [
            TokenLogprobs(
                token_ids=[token, *top_ids[:count]],
                logprobs=[logprob, *top_values[:count]],
                ranks=[rank, *range(1, count + 1)],
            )
            for count, (token, rank, *top_ids), (logprob, *top_values) in zip(
                num_logprobs.tolist(), ids.tolist(), values.tolist(), strict=True
            )
        ]

    return entries
