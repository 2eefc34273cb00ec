"""A thread that runs calls in order, and a turn of other work now and then while none waits."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class TurnThread:
    """A thread that runs calls in order, and turns of other work between them.

    Calls go first: a turn begins only while none waits, and asks with `is_free_for` whether it may
    go on.

    Args:
        name: of the thread.
        turn: does a part of the other work; returns seconds until the next turn. None for none.
    """

    def __init__(self, name: str, turn: Callable[[], float] | None) -> None:
        self._turn = turn
        self._calls: deque[Callable[[], None]] = deque()
        self._due_s = 0.0 if turn else math.inf  # on the clock of `time.monotonic`
        self._is_closing = False
        self._changed = threading.Condition()  # guards the last three
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the calls that wait."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have the thread call a function. Pre-condition: it has not been closed."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._changed:
            self._calls.append(run)
            self._changed.notify()
        return future

    def hasten(self) -> None:
        """Let the next turn begin as soon as no call waits."""
        with self._changed:
            if self._turn is not None:
                self._due_s = 0.0
                self._changed.notify()

    def is_free_for(self, seconds: float) -> bool:
        """Within a turn: wait so long; returns whether no call has come until then."""
        with self._changed:
            return not self._changed.wait_for(self._has_calls, seconds)

    def _has_calls(self) -> bool:
        return bool(self._calls) or self._is_closing

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._has_calls():
                    left_s = self._due_s - time.monotonic()
                    if left_s <= 0:
                        break
                    self._changed.wait(None if left_s == math.inf else left_s)
                call = self._calls.popleft() if self._calls else None
                if call is None and self._is_closing:
                    return
                if call is None:
                    self._due_s = math.inf  # unless it is hastened during the turn
            if call is not None:
                call()
            else:
                self._take_turn()

    def _take_turn(self) -> None:
        assert self._turn is not None
        try:
            next_s = time.monotonic() + self._turn()
        except Exception:  # calls are answered nevertheless: their callers wait for that
            _log.exception("%s does only what it is asked for from now on", self._thread.name)
            self._turn, next_s = None, math.inf
        with self._changed:
            self._due_s = min(self._due_s, next_s) if self._turn else math.inf
