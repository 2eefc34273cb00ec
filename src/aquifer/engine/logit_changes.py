"""Changes of single logits that requests ask for: allowed tokens, biases, and no stop token yet.

Few requests have any. All rows of a step are changed by the same few operations: one row after the
other would take a GPU longer than the step itself, for all that run in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.base import IntArray
from aquifer.engine.step_input import SlotAssignment
from aquifer.memory.transfer import upload


@dataclass(frozen=True, slots=True)
class _Changes:
    """What a sequence's request asks for."""

    allowed: IntArray | None  # None for all tokens
    biased: IntArray
    biases: npt.NDArray[np.float32]  # of these
    stops: IntArray
    may_lack_others: bool  # whether the stop tokens may be all that are allowed


class LogitChanges:
    """The changes of the sequences of one model, by their slots.

    Args:
        num_rows: slots, and one more: they are numbered from 1.
        vocab_size: columns of the logits.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._changes: list[_Changes | None] = [None] * num_rows
        self._always = np.zeros(num_rows, np.bool_)
        self._min_total = np.zeros(num_rows, np.int64)

    def assign(self, one: SlotAssignment) -> None:
        """Store the changes of a sequence that got a slot."""
        params, slot = one.params, one.slot
        self._always[slot] = params.changes_logits
        self._min_total[slot] = one.min_total_tokens
        self._changes[slot] = None
        if params.changes_logits or params.min_tokens > 0:
            bias, allowed = params.logit_bias or {}, params.allowed_token_ids
            self._changes[slot] = _Changes(
                None if allowed is None else _array(allowed),
                _array(bias),
                np.array(list(bias.values()), np.float32),
                _array(sorted(one.stop_ids)),
                allowed is not None or len(one.stop_ids) >= self._vocab_size,
            )

    def are_needed(self, slots: IntArray, num_tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Whether `apply` changes each row.

        Args:
            slots: [n], the slot of each row.
            num_tokens: [n], tokens that the row's sequence has.
        """
        return np.asarray(self._always[slots] | (num_tokens < self._min_total[slots]))

    def apply(self, logits: torch.Tensor, slots: IntArray, num_tokens: IntArray) -> torch.Tensor:
        """Logits with the changes.

        Args:
            logits: [n, vocab], left as they are.
            slots: [n], the slot of each row.
            num_tokens: [n], tokens that the row's sequence has.

        Returns: a copy; `logits` itself if no row changes.
        """
        rows = np.flatnonzero(self.are_needed(slots, num_tokens))
        if not len(rows):
            return logits
        logits = logits.clone()
        changes = [self._of(slot) for slot in slots[rows].tolist()]
        allowed = {
            row: each.allowed
            for row, each in zip(rows.tolist(), changes, strict=True)
            if each.allowed is not None
        }
        if allowed:
            places = _places(allowed, allowed.values(), logits.device)
            kept = logits[places]
            logits.index_fill_(0, _upload(allowed, logits.device), -math.inf)
            logits[places] = kept
        if any(len(each.biased) for each in changes):
            places = _places(rows, [each.biased for each in changes], logits.device)
            biases = upload(np.concatenate([each.biases for each in changes]), logits.device)
            logits[places] += biases.to(logits.dtype)
        must_not_stop = num_tokens[rows] < self._min_total[slots[rows]]
        for may_lack_others in (False, True):
            forbidden = {
                row: each.stops
                for row, each, is_early in zip(rows.tolist(), changes, must_not_stop, strict=True)
                if is_early and each.may_lack_others == may_lack_others and len(each.stops)
            }
            if forbidden:
                _forbid(logits, forbidden, may_lack_others=may_lack_others)
        return logits

    def _of(self, slot: int) -> _Changes:
        changes = self._changes[slot]
        assert changes is not None, "a slot of a request that changes nothing"
        return changes


def _forbid(logits: torch.Tensor, stops: dict[int, IntArray], *, may_lack_others: bool) -> None:
    """Forbid tokens that would end the output, unless no other token is left.

    Args:
        logits: [n, vocab], changed in place.
        stops: by row.
        may_lack_others: whether that is to be looked at.
    """
    places = _places(stops, stops.values(), logits.device)
    kept = logits[places]
    logits[places] = -math.inf
    if may_lack_others:
        has_others = logits[_upload(stops, logits.device)].isfinite().any(1)
        counts = [len(each) for each in stops.values()]
        number = upload(np.repeat(np.arange(len(stops)), counts), logits.device)
        logits[places] = torch.where(has_others[number], -math.inf, kept)


def _places(
    rows: Iterable[int], tokens: Iterable[IntArray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the tokens of each row."""
    columns = list(tokens)
    repeated = np.repeat(_array(rows), [len(each) for each in columns])
    at = upload(np.stack((repeated, np.concatenate(columns))), device)
    return at[0], at[1]


def _array(numbers: Iterable[int]) -> IntArray:
    return np.array(list(numbers), np.int64)


def _upload(numbers: Iterable[int], device: torch.device) -> torch.Tensor:
    return upload(_array(numbers), device)
