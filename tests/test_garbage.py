"""Garbage collection while requests run."""

from __future__ import annotations

import gc

import pytest

from aquifer.garbage import old_objects_left_out


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing was left out in this process before."""
    gc.unfreeze()
    monkeypatch.setattr("aquifer.garbage._left_out.by_program", False)


def test_old_objects_are_left_out_in_the_body_only() -> None:
    for _ in range(2):
        assert not gc.get_freeze_count()
        with old_objects_left_out():
            assert gc.get_freeze_count() > 1000
            with old_objects_left_out():
                pass
            assert gc.get_freeze_count() > 1000
    assert not gc.get_freeze_count()


def test_what_python_leaves_out_is_no_choice_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 begins with some hundred objects that it has left out."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    with old_objects_left_out():
        monkeypatch.undo()
        assert gc.get_freeze_count() > 1000
    assert not gc.get_freeze_count()


def test_a_choice_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with old_objects_left_out():
            pass
        with monkeypatch.context() as patches:  # which is asked for once: it counts all objects
            patches.delattr(gc, "get_freeze_count")
            with old_objects_left_out():
                pass
        # Reference counts still free a few.
        assert gc.get_freeze_count() > 0.9 * count
    finally:
        gc.unfreeze()
