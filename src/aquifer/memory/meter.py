"""The thread that measures what the process holds on the device outside of pages.

NVIDIA's management library may take tens of milliseconds to answer beside other calls of the
driver, and no step is to wait for it.
"""

from __future__ import annotations

import threading

from aquifer.errors import DriverError
from aquifer.memory.driver.base import Driver


class OverheadMeter:
    """Measures the overhead each time it is asked to.

    The host, where that takes microseconds, needs no thread.

    Args:
        driver: the device's.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._asked = threading.Event()
        self._closing = False
        self._found: int | None = None
        self._thread = threading.Thread(target=self._run, name="aquifer-overhead", daemon=True)

    def start(self) -> None:
        """Measure in the thread from now on, where the device has its own management library."""
        if self._driver.runs_ahead:
            self._thread.start()

    def ask(self) -> None:
        """Have the overhead measured soon, or at once without the thread."""
        if self._thread.is_alive():
            self._asked.set()
        else:
            self._found = self._driver.overhead_bytes()

    def take(self) -> int | None:
        """The latest figure in bytes; None if it was taken before."""
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._closing:
                return
            try:
                self._found = self._driver.overhead_bytes()
            except DriverError:
                continue  # the device failed, which the next step finds
