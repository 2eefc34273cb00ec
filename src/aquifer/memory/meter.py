"""Keeps the pool's figure of what the process holds on the device outside of pages.

NVIDIA's management library knows it, and takes tens of milliseconds to answer where many pages
exist, in which no page is created or mapped. So it is asked in a thread, when there is nothing to
run. While steps run, the figure follows what is known without asking, which is torch's memory:
hardly anything else grows then.
"""

from __future__ import annotations

import threading
import time

from aquifer.errors import DriverError
from aquifer.memory.pool import PagePool


class OverheadMeter:
    """Accounts the overhead of a pool's process from time to time.

    Args:
        pool: the pool.

    Attributes:
        every_s: seconds between two updates, and until the system is asked when nothing runs.
        longest_busy_s: seconds until it is asked although steps run.
    """

    def __init__(self, pool: PagePool) -> None:
        self.every_s = 10.0
        self.longest_busy_s = 600.0
        self._pool = pool
        self._driver = pool.driver
        self._updated_s = self._asked_s = time.monotonic()
        self._asked = threading.Event()
        self._closing = False
        self._found: int | None = None  # and not accounted yet
        self._thread = threading.Thread(target=self._run, name="aquifer-overhead", daemon=True)

    def start(self) -> None:
        """Ask in the thread from now on, where the device has its own management library."""
        if self._driver.runs_ahead:
            self._thread.start()

    def update(self, *, is_idle: bool) -> None:
        """Account what the system has answered meanwhile, and look again if it is time.

        Args:
            is_idle: whether there is no work for the device.
        """
        now_s = time.monotonic()
        if now_s - self._asked_s >= (self.every_s if is_idle else self.longest_busy_s):
            self._asked_s = self._updated_s = now_s
            if self._thread.is_alive():
                self._asked.set()
            else:
                self._found = self._driver.overhead_bytes()
        elif now_s - self._updated_s >= self.every_s:
            self._updated_s = now_s
            self._found = self._driver.overhead_bytes(asks_system=False)
        found, self._found = self._found, None
        if found is not None:
            self._pool.account_overhead(found)

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
