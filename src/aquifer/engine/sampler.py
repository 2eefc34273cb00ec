"""Which token comes next.

Every row is treated by itself: what it gets depends on its own logits, parameters, seed and
position only. The order of the steps is vLLM's: allowed tokens, biases, penalties, temperature,
min-p, top-k, top-p. The first two, which few requests ask for, are done here, row by row; the rest
is `aquifer.kernels.sampling`, for all rows at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from aquifer.cache.base import IntArray
from aquifer.engine.request import TokenLogprobs
from aquifer.engine.sequence import Choice, Sequence
from aquifer.engine.slots import SlotTable
from aquifer.kernels.sampling import Variant, sample
from aquifer.kernels.sampling_columns import SamplingColumns, write_counts
from aquifer.memory.transfer import download, upload

_VARIANTS: dict[Choice, Variant] = {
    Choice.GREEDY: "greedy",
    Choice.PLAIN: "plain",
    Choice.FULL: "full",
    Choice.OWN: "full",
}


class Sampler:
    """Samples for the sequences of one table, and keeps on the device what that takes.

    Args:
        table: the running sequences.
        vocab_size: columns of the logits.
        device: of the logits.
    """

    def __init__(self, table: SlotTable, vocab_size: int, device: torch.device) -> None:
        self._table = table
        self._device = device
        self.columns = SamplingColumns.empty(len(table.sequences), 0, vocab_size, device)
        # Who has each row of counts, by serial: rows go round, since few requests need one.
        self._counting = np.zeros(0, np.int64)

    def seat(self, slots: IntArray) -> bool:
        """Take over the parameters of sequences that have these slots now.

        Returns: whether `columns` has been replaced; steps captured before refer to the old ones.
        """
        sequences = [self._sequence(slot) for slot in slots.tolist()]
        grown = self._find_counts(sequences)
        floats = np.zeros((6, len(slots)), np.float32)
        ints = np.zeros((3, len(slots)), np.int64)
        for i, sequence in enumerate(sequences):
            params = sequence.request.params
            floats[:, i] = (
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
            counts_row = -1
            if sequence.has_penalties:
                counts_row = int(np.flatnonzero(self._counting == sequence.serial)[0])
                known = upload(sequence.token_ids.astype(np.int64), self._device)
                num_prompt = sequence.group.num_prompt_tokens
                write_counts(
                    self.columns.counts[counts_row], known[:num_prompt], known[num_prompt:]
                )
            seed = int(np.uint64(sequence.seed).astype(np.int64))
            ints[:, i] = max(params.top_k, 0), seed, counts_row
        self.columns.write(*(upload(array, self._device) for array in (slots, floats, ints)))
        return grown

    def choice(self, slots: IntArray) -> Choice:
        """What it takes to sample for these slots."""
        return Choice(int(self._table.choice[slots].max(initial=0)))

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        out: torch.Tensor,
        choice: Choice,
    ) -> None:
        """Choose a token for each row; nothing here asks the device or the table anything.

        Args:
            logits: [n, vocab].
            slots: [n] int64, the slot of each row, -1 for padding.
            num_tokens: [n] int64, tokens that the row's sequence has.
            out: [n] int64, overwritten.
            choice: what any of the rows needs.
        """
        sample(logits, slots, num_tokens, self.columns, out, variant=_VARIANTS[choice])

    def change_logits(self, logits: torch.Tensor, slots: IntArray, num_tokens: IntArray) -> None:
        """Apply what is particular to single requests to their rows, in place.

        Args:
            logits: [n, vocab].
            slots: [n], the slot of each row.
            num_tokens: [n], tokens that the row's sequence has.
        """
        for row in np.flatnonzero(self._table.choice[slots] == Choice.OWN).tolist():
            sequence = self._sequence(int(slots[row]))
            may_stop = bool(num_tokens[row] >= self._table.min_total[slots[row]])
            _change_logits(logits[row], sequence, may_stop)

    def _sequence(self, slot: int) -> Sequence:
        sequence = self._table.sequences[slot]
        assert sequence is not None
        return sequence

    def _find_counts(self, sequences: list[Sequence]) -> bool:
        """A row of counts for each sequence with penalties; whether there had to be more rows."""
        serials = [s.serial for s in sequences if s.has_penalties]
        if not serials:
            return False
        has_ended = ~np.isin(self._counting, self._table.serial)
        self._counting[has_ended | np.isin(self._counting, serials)] = -1
        free = np.flatnonzero(self._counting == -1)
        missing = len(serials) - len(free)
        if missing > 0:
            num_rows = len(self._counting)
            # At least twice as many, so that this happens seldom.
            counts = self.columns.counts.new_zeros(
                (num_rows + max(missing, num_rows), self.columns.counts.shape[1])
            )
            counts[:num_rows] = self.columns.counts
            self.columns = dataclasses.replace(self.columns, counts=counts)
            new_rows = np.full(len(counts) - num_rows, -1, np.int64)
            self._counting = np.append(self._counting, new_rows)
            free = np.flatnonzero(self._counting == -1)
        self._counting[free[: len(serials)]] = serials
        return missing > 0


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_logprobs: IntArray
) -> Callable[[], list[TokenLogprobs]]:
    """Log probabilities of each row's token and of the most probable ones.

    Args:
        logits: [n, vocab], as the model gave them.
        tokens: [n], the token to report first.
        num_logprobs: [n], how many of the most probable to report; all there are, if it is more.

    Returns:
        What gives one entry for each row, to be called once the device has done its work.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs > own).sum(1) + 1
    num_reported = min(max(int(num_logprobs.max()), 1), logprobs.shape[1])
    top_values, top_ids = logprobs.topk(num_reported, dim=1)
    parts = [download(part) for part in (tokens, own[:, 0], ranks, top_values, top_ids)]

    def entries() -> list[TokenLogprobs]:
        return [
            TokenLogprobs(
                token_ids=[token, *ids[:count]],
                logprobs=[logprob, *values[:count]],
                ranks=[rank, *range(1, count + 1)],
            )
            for count, token, logprob, rank, values, ids in zip(
                num_logprobs.tolist(), *(part.tolist() for part in parts), strict=True
            )
        ]

    return entries


def _change_logits(logits: torch.Tensor, sequence: Sequence, may_stop: bool) -> None:
    """One row, [vocab], in place."""
    params = sequence.request.params
    if params.allowed_token_ids is not None:
        _keep(logits, _ids(params.allowed_token_ids, logits))
    if params.logit_bias:
        ids = _ids(params.logit_bias, logits)
        biases = np.array(list(params.logit_bias.values()), np.float32)
        logits[ids] += upload(biases, logits.device).to(logits.dtype)
    if not may_stop:
        _forbid(logits, _ids(sorted(sequence.group.stop_ids), logits))


def _ids(ids: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    return upload(np.array(list(ids), np.int64), logits.device)


def _keep(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    kept = logits[allowed]
    logits.fill_(-math.inf)
    logits[allowed] = kept


def _forbid(logits: torch.Tensor, stops: torch.Tensor) -> None:
    """No token that would end the output; unless nothing else is left."""
    kept = logits[stops]
    logits[stops] = -math.inf
    logits[stops] = torch.where(logits.isfinite().any(), -math.inf, kept)
