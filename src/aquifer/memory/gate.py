"""The gate that keeps other threads from the driver while the engine's loop prepares a step.

Calls of the driver exclude each other, and Python runs one thread at a time. So a thread that
creates or maps pages ahead of need holds up the loop again and again, if it does so while a step is
planned and launched. While the loop waits for the device, it costs nothing.
"""

from __future__ import annotations

import threading
from types import TracebackType

_MOST_S = 0.005
"""The longest time for which the others wait: the loop may not wait for the device at all."""


class Gate:
    """Context manager for the loop: within it, other threads that call `wait` wait."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()

    def __enter__(self) -> None:
        self._is_open.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open.set()

    def open(self) -> None:
        """Let the others go on: the loop is about to wait for one of them."""
        self._is_open.set()

    def wait(self) -> None:
        """Wait until the loop prepares no step, or for 5 ms: for a thread that holds no lock."""
        self._is_open.wait(_MOST_S)
