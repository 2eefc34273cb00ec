"""A mapper without a thread: its work is done when a test says so, or when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from aquifer.memory.mapper import BackgroundMapper, Piece
from aquifer.memory.pages import PageTable


class _Work(Future[None]):
    """A call that is made at the latest when its result is asked for."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def run(self) -> None:
        if self.done():
            return
        try:
            self._call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        self.run()
        super().result(timeout)


class QueuedMapper(BackgroundMapper):
    """Keeps its work until `catch_up`."""

    def __init__(self, pages: PageTable) -> None:
        super().__init__(pages)
        self.work: list[_Work] = []

    def submit(self, pieces: Sequence[Piece]) -> Future[None]:
        work = _Work(lambda: self._map(pieces))
        self.work.append(work)
        return work

    def catch_up(self, count: int | None = None) -> None:
        waiting = [work for work in self.work if not work.done()]
        for work in waiting[:count]:
            work.run()
