"""Ends of sequences: at a stop token, or at their longest length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aquifer.cache.base import IntArray
from aquifer.engine.slots import SlotTable

BoolArray = npt.NDArray[np.bool_]


class Endings(NamedTuple):
    """How many new tokens of each row count, and which sequences end with the last of them."""

    counts: IntArray  # [n], new tokens up to the end of the sequence
    stops: BoolArray  # [n], whether the last of them is a stop token
    is_full: BoolArray  # [n], whether the sequence reaches its longest length


def find_endings(
    table: SlotTable, slots: IntArray, lengths: IntArray, tokens: IntArray, counts: IntArray
) -> Endings:
    """Find the new token that ends the sequence of each row, if there is one.

    Stop tokens beyond `STOP_IDS_PER_SLOT` are not checked here: see `SlotTable.is_special`.

    Args:
        table: columns of the sequences.
        slots: [n], slots of the rows.
        lengths: [n], tokens that each sequence had before.
        tokens: [n, k], new tokens.
        counts: [n], how many of them are valid.
    """
    max_total = table.max_total[slots]
    if tokens.shape[1] == 1:  # as in nearly every step
        lengths = lengths + counts
        is_full = lengths >= max_total
        is_stop = table.stop_ids[slots] == tokens
        if not np.count_nonzero(is_stop):
            return Endings(counts, np.zeros(len(slots), np.bool_), is_full)
        stops = is_stop.any(1) & (lengths > table.min_total[slots]) & (counts > 0)
        return Endings(counts, stops, is_full)
    counts = np.minimum(counts, max_total - lengths)
    places = np.arange(tokens.shape[1])
    may_stop = lengths[:, None] + places >= table.min_total[slots, None]
    is_stop = (tokens[:, :, None] == table.stop_ids[slots, None]).any(2) & may_stop
    is_stop &= places < counts[:, None]
    stops = is_stop.any(1)
    counts = np.where(stops, is_stop.argmax(1) + 1, counts)
    return Endings(counts, stops, lengths + counts >= max_total)
