"""A thread that runs calls, and turns of other work between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, current_thread

import pytest

from aquifer.weights.turns import TurnThread

WAIT_S = 30.0


@contextmanager
def started(turn: Callable[[TurnThread], float] | None) -> Iterator[TurnThread]:
    thread = TurnThread("turns", None if turn is None else lambda: turn(thread))
    thread.start()
    try:
        yield thread
    finally:
        thread.close()


def test_calls_run_in_order_in_the_thread():
    calls: list[int] = []
    with started(None) as thread:
        futures = [thread.submit(calls.append, number) for number in range(50)]
        assert thread.submit(lambda: current_thread().name).result(WAIT_S) == "turns"
        assert all(future.done() for future in futures)
        failing = thread.submit(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failing.result(WAIT_S)
        last = thread.submit(calls.append, 50)
    assert last.done()  # the end waits for what was asked for
    assert calls == list(range(51))


def test_turns_come_while_no_call_waits():
    turns: list[bool] = []
    begun, is_asked, ended = Event(), Event(), Event()

    def turn(thread: TurnThread) -> float:
        turns.append(thread.is_free_for(0.0))
        begun.set()
        assert is_asked.wait(WAIT_S)
        turns.append(thread.is_free_for(WAIT_S))
        ended.set()
        return math.inf

    with started(turn) as thread:
        assert begun.wait(WAIT_S)
        asked = thread.submit(ended.is_set)
        is_asked.set()
        assert asked.result(WAIT_S)  # the turn has ended before
        assert turns == [True, False]


def test_a_turn_that_is_hastened():
    """Also during a turn; otherwise there is none before its time."""
    left = 5
    done = Event()

    def turn(thread: TurnThread) -> float:
        nonlocal left
        left -= 1
        if left > 0:
            thread.hasten()
        else:
            done.set()
        return math.inf

    with started(turn) as thread:
        assert done.wait(WAIT_S)
        done.clear()
        thread.hasten()
        assert done.wait(WAIT_S)
        assert left == -1


def test_a_turn_that_fails_is_the_last_one():
    """Calls are still answered."""
    num_turns = 0

    def turn(thread: TurnThread) -> float:
        nonlocal num_turns
        num_turns += 1
        raise ValueError

    with started(turn) as thread:
        thread.hasten()
        for _ in range(3):
            assert thread.submit(lambda: 7).result(WAIT_S) == 7
            thread.hasten()
    assert num_turns == 1
