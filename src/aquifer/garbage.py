"""Python's garbage collection: kept from stopping a step for 100 ms and more.

Libraries leave a million objects after the start. A full collection looks for unreachable cycles in
all of them, every few seconds while requests run, and none is ever found there.
"""

from __future__ import annotations

import atexit
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NEW_OBJECTS = 4_000
"""New objects, less those that have ended, until the next collection, for which all requests wait.
Requests make many, and reference counts free nearly all of them."""

_YOUNG_COLLECTIONS = 2
"""Collections of new objects until one that looks at those too that were left by these: at what
retained prefixes and open connections are made of. 20 of them left 80 000, for 50 ms."""

_OLD_COLLECTIONS = 20
"""Collections of these until one of all objects that were made since `collect_less`."""

_EVERY_S = 0.25
"""Time between two collections of `PacedCollections`: some hundred objects come to stay in it."""

_PACED_COLLECTIONS = 4
"""Every so many of these look at those too that the others have left."""

_FEW_OBJECTS = 5_000
"""Python 3.12 itself leaves some 400 objects out from its start. A program that leaves out what it
has imported leaves out a hundred thousand and more."""


def collect_nothing() -> None:
    """Collect nothing until `collect_less`: imports and loading make objects that stay.

    For the start of a process that serves, a fiftieth of which collections would take.
    """
    gc.disable()


def collect_less() -> None:
    """Leave all objects that exist out of collections from now on, and collect less often.

    For a process that serves; to be called when everything is loaded.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # Triton checks that all of its objects are freed at the end
    gc.set_threshold(_NEW_OBJECTS, _YOUNG_COLLECTIONS, _OLD_COLLECTIONS)


class PacedCollections:
    """Collects new objects now and then, when its owner has to wait anyway.

    Python counts the objects that are made, less those that end, old ones among them. Where as many
    requests end as begin, it counts next to none, and collects nothing until its new objects are
    all that there are: 9000 after 1400 requests, in 8 to 15 ms. Collected so, they take less than
    one.

    Args:
        clock_s: returns the time in seconds.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._next_s = clock_s()
        self._num_collections = 0

    def collect_some(self) -> None:
        """Collect, if it is time."""
        now_s = self._clock_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        self._num_collections += 1
        gc.collect(0 if self._num_collections % _PACED_COLLECTIONS else 1)


def collect_nothing_at_exit() -> None:
    """Collect nothing while this process ends: the system takes all of its memory.

    With torch imported, collections at the end take 0.5 to 1 s. To be called at the start, so that
    what others do at the end comes first. Where Triton is imported, it changes nothing: that checks
    at the end that all of its objects were freed, and prints those that were not.
    """
    atexit.register(_freeze_without_triton)


@contextmanager
def old_objects_left_out() -> Iterator[None]:
    """Leave the objects that exist out of collections in the body.

    If the program has left some out itself, nothing changes, here and later: it has made its own
    choice, and to ask each time takes 70 ms for a million objects.
    """
    if not _left_out.here and not _left_out.by_program:
        _left_out.by_program = gc.get_freeze_count() > _FEW_OBJECTS
    if _left_out.here or _left_out.by_program:
        yield
        return
    _left_out.here = True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _left_out.here = False


@dataclass(slots=True)
class _LeftOut:
    """Where objects are left out of collections."""

    here: bool = False  # in the body of `old_objects_left_out`
    by_program: bool = False  # that this process runs, by a call of `gc.freeze`


_left_out = _LeftOut()


def _freeze_without_triton() -> None:
    if "triton" not in sys.modules:
        gc.freeze()
