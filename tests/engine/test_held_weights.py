"""What is held: weights that are being copied to the host cache, and those that neighbours read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aquifer.engine.held_weights import HeldWeights


def test_what_was_held_since_a_mark() -> None:
    reuse: Any = SimpleNamespace(num_loan_changes=3, has_loans=False)
    held = HeldWeights(reuse)
    assert not held.was_any(held.mark())

    mark = held.mark()
    reuse.num_loan_changes, reuse.has_loans = 4, True
    assert held.was_any(mark)
    assert held.was_any(held.mark())
    reuse.num_loan_changes, reuse.has_loans = 5, False
    assert held.was_any(mark), "it has just ended, and may have made room"
    assert not held.was_any(held.mark())

    waits: list[float | None] = []
    saving: Any = SimpleNamespace(is_saving=True, is_saved_within=waits.append)
    held.note_saving(saving)
    mark = held.mark()
    held.wait(0.5)
    assert waits == [0.5]
    saving.is_saving = False
    assert held.was_any(mark)
    assert not held.was_any(held.mark())
    held.wait(0.5)
    assert waits == [0.5]
