"""Progress bars on standard error: shown on a terminal only, removed when they are done."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from aquifer.engine.reports import LoadProgress

_REFRESH_HZ = 10


def counting_bar(show: bool = True, refresh_hz: float = _REFRESH_HZ) -> Progress:
    """A bar that counts items, drawn so many times a second."""
    columns = (MofNCompleteColumn(), TimeRemainingColumn())
    return _bar(show, *columns, refresh_hz=refresh_hz)


class LoadingBar:
    """A context manager that shows a bar for each model that is loading."""

    def __init__(self) -> None:
        self._bar = _bar(True, DownloadColumn(binary_units=True), TransferSpeedColumn())
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LoadingBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def update(self, progress: LoadProgress) -> None:
        """Update the bar of a model."""
        if progress.model not in self._tasks:
            self._tasks[progress.model] = self._bar.add_task(f"loading {progress.model}")
        task = self._tasks[progress.model]
        self._bar.update(task, total=progress.total_bytes, completed=progress.loaded_bytes)

    def stop(self) -> None:
        """Remove the bars; a second call does nothing."""
        self._bar.stop()


def _bar(show: bool, *columns: ProgressColumn, refresh_hz: float = _REFRESH_HZ) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=console,
        refresh_per_second=refresh_hz,
        disable=not (show and console.is_terminal),
        transient=True,
    )
