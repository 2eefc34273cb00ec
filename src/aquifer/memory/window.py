"""Pages of another process, mapped at addresses of this one to be read."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from aquifer.memory.driver.base import Driver, ExportedPages


class Window:
    """Pages of another process, one after the other.

    They are not the pool's, and not in its books: their memory is the other process's.

    Args:
        driver: maps them.
        num_bytes: of all of them.
        pages: they come in pieces, each of which is closed when the next one is asked for.

    Raises:
        DriverError: the device refused; nothing is left.
    """

    def __init__(self, driver: Driver, num_bytes: int, pages: Iterable[ExportedPages]) -> None:
        with ExitStack() as undo:
            address = driver.reserve(num_bytes)
            undo.callback(driver.free, address, num_bytes)
            place = address
            for piece in pages:
                handles = driver.adopt(piece)
                undo.callback(driver.release, handles)
                driver.map(place, handles)
                undo.callback(driver.unmap, place, piece.page_bytes, len(handles))
                place += piece.page_bytes * len(handles)
            self.bytes: torch.Tensor = driver.view(address, num_bytes)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Unmap them. Pre-condition: no work in flight reads them."""
        del self.bytes
        self._undo.close()
