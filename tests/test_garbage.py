"""Garbage collection while requests run."""

from __future__ import annotations

import gc

from aquifer.garbage import old_objects_left_out


def test_old_objects_are_left_out_in_the_body_only() -> None:
    assert not gc.get_freeze_count()
    with old_objects_left_out():
        assert gc.get_freeze_count() > 1000
    assert not gc.get_freeze_count()


def test_a_choice_of_the_program_stays() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with old_objects_left_out():
            pass
        # Reference counts still free a few.
        assert gc.get_freeze_count() > 0.9 * count
    finally:
        gc.unfreeze()
