"""Progress bars on standard error: shown on a terminal only, removed when they are done."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from aquifer.engine.reports import LoadProgress, Stage
from aquifer.sizes import format_size

_REFRESH_HZ = 10

_STAGES: dict[Stage, str] = {"weights": "loading", "kernels": "compiling", "steps": "capturing"}


def counting_bar(show: bool = True, refresh_hz: float = _REFRESH_HZ) -> Progress:
    """A bar that counts items, drawn so many times a second."""
    columns = (MofNCompleteColumn(), TimeRemainingColumn())
    return _bar(show, *columns, refresh_hz=refresh_hz)


class LoadingBar:
    """A context manager that shows a bar for each model that is loading, and for each stage."""

    def __init__(self) -> None:
        self._bar = _bar(True, TextColumn("{task.fields[amount]}"))
        self._tasks: dict[tuple[str, Stage], TaskID] = {}

    def __enter__(self) -> LoadingBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def update(self, progress: LoadProgress) -> None:
        """Update the bar of a model's stage."""
        key = progress.model, progress.stage
        if key not in self._tasks:
            text = f"{_STAGES[progress.stage]} {progress.model}"
            self._tasks[key] = self._bar.add_task(text, amount="")
        amount = f"{progress.done} of {progress.total} {progress.stage}"
        if progress.stage == "weights":
            amount = f"{format_size(progress.done)} of {format_size(progress.total)}"
        self._bar.update(
            self._tasks[key], total=progress.total, completed=progress.done, amount=amount
        )

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
