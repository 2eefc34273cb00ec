"""Which slots sequences get."""

from __future__ import annotations

import numpy as np

from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.sequence import Sequence, SequenceGroup
from aquifer.engine.slots import SlotTable


def sequence(number: int) -> Sequence:
    request = Request(str(number), "m", [1, 2], SamplingParams(max_tokens=4), 0.0)
    group = SequenceGroup.of(
        request,
        number,
        np.array([1, 2], np.int32),
        seed=0,
        max_total=6,
        stop_ids=frozenset(),
    )
    (only,) = group.sequences
    return only


def test_prompts_that_are_admitted_together_are_neighbours() -> None:
    """Also behind a slot that is free alone."""
    table = SlotTable(8, 16)
    first, *others = (sequence(number) for number in range(5))
    assert table.assign(first) == 1
    assert [table.assign(each) for each in others] == [2, 3, 4, 5]
    table.release(first)
    assert [table.assign(sequence(number)) for number in (5, 6)] == [6, 7]
    # The rest are alone: the lowest of them.
    assert [table.assign(sequence(number)) for number in (7, 8)] == [1, 8]
    assert table.num_free == 0


def test_a_slot_that_is_asked_for() -> None:
    table = SlotTable(4, 16)
    kept = sequence(0)
    assert table.assign(kept, 3) == 3
    assert table.free == [1, 2, 4]
    table.release(kept)
    assert table.free == [1, 2, 3, 4]
