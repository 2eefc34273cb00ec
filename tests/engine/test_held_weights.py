"""What is held: weights that are being loaded, copied to the host cache, or read by neighbours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aquifer.engine.held_weights import HeldWeights
from aquifer.engine.reports import ModelState


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


def test_weights_that_are_being_loaded_are_held() -> None:
    reuse: Any = SimpleNamespace(num_loan_changes=0, has_loans=False)
    held = HeldWeights(reuse)
    waits: list[float | None] = []
    host: Any = SimpleNamespace(state=ModelState.LOADING, is_filled_within=waits.append)
    held.note_loading(host)
    mark = held.mark()
    held.wait(0.5)
    assert waits == [0.5]
    host.state = ModelState.RESIDENT
    assert held.was_any(mark), "it has just ended, and its weights may go"
    assert not held.was_any(held.mark())
    held.wait(0.5)
    assert waits == [0.5]
