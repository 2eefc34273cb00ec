"""The thread that maps pages ahead of need, while a step computes.

The length of every sequence in the next step is known when this one is launched: one token more
(vAttention, section 4, observation 1). So the pages for it can be mapped meanwhile, and no driver
call is left on the step's own path (section 5.4.2). Calls of the driver release the interpreter's
lock, so that they run beside the loop and not in turn with it.

The thread calls the driver and nothing else: who has which page is written by the loop alone, when
it hands out the work and when it takes it back.

It begins when the step is launched, and pauses while the next one is prepared (`gate.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from aquifer.errors import DriverError
from aquifer.memory.gate import Gate
from aquifer.memory.pages import Page, PageTable

Piece = tuple[int, Sequence[Page]]
"""An address, and pages of one size to map one after the other from there on."""


class BackgroundMapper:
    """Maps pages in a thread of its own, in the order in which they were submitted.

    Args:
        pages: the device's pages.
        gate: the pool's, where the loop enters it.
    """

    def __init__(self, pages: PageTable, gate: Gate | None = None) -> None:
        self._pages = pages
        self._gate = gate or Gate()
        self._thread = ThreadPoolExecutor(
            1, "aquifer-page-mapper", initializer=pages.enter_background
        )
        self._submitted: list[tuple[Future[None], Sequence[Piece]]] = []  # and not begun

    def submit(self, pieces: Sequence[Piece]) -> Future[None]:
        """Map pages after the next `begin`; the future's error is a `DriverError`, and then none is
        mapped.

        Pre-condition: the addresses stay reserved and the pages in use until the future is done.
        """
        future: Future[None] = Future()
        self._submitted.append((future, pieces))
        return future

    def begin(self) -> None:
        """Begin with what was submitted."""
        if self._submitted:
            submitted, self._submitted = self._submitted, []
            self._thread.submit(self._map_all, submitted)

    def finish(self, future: Future[None]) -> None:
        """Wait until the pages of this future are mapped.

        Raises:
            DriverError: the device refused.
        """
        if not future.done():
            self._gate.open()
            self.begin()
        future.result()

    def close(self) -> None:
        """Finish what was submitted, and end the thread."""
        self.begin()
        self._thread.shutdown()

    def _map_all(self, submitted: Sequence[tuple[Future[None], Sequence[Piece]]]) -> None:
        for future, pieces in submitted:
            try:
                self._map(pieces)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _map(self, pieces: Sequence[Piece]) -> None:
        done: list[Piece] = []
        try:
            for address, pages in pieces:
                self._gate.wait()
                self._pages.map(address, pages)
                done.append((address, pages))
        except DriverError:
            for address, pages in done:
                self._pages.unmap(address, pages)
            raise
