"""Garbage collection while requests run."""

from __future__ import annotations

import gc

import pytest

from aquifer.garbage import PacedCollections, old_objects_left_out


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


def test_new_objects_are_collected_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    generations: list[int] = []
    monkeypatch.setattr(gc, "collect", generations.append)
    now_s = 100.0
    paced = PacedCollections(lambda: now_s)
    for _ in range(8):
        paced.collect_some()
        paced.collect_some()  # it is not time
        now_s += 0.3
    assert generations == [0, 0, 0, 1, 0, 0, 0, 1]


def test_python_leaves_many_new_objects_alone_where_as_many_end() -> None:
    """What `PacedCollections` is for; if a new version counts otherwise, it may go."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1000, 2, 20)
    try:
        old: list[list[int]] = [[] for _ in range(20_000)]
        gc.collect()
        new: list[list[int]] = []
        while old:
            old.pop()
            new.append([])
        num_young = sum(len(gc.get_objects(generation)) for generation in (0, 1))
        assert num_young > 15_000
        PacedCollections().collect_some()
        PacedCollections().collect_some()
        assert len(gc.get_objects(0)) < 1000
    finally:
        gc.set_threshold(*thresholds)
    assert len(new) == 20_000
