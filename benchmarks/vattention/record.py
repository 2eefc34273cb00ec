"""The result of one part, which is written after each measurement."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from aquifer.bench.result import save

Cell = TypeVar("Cell")


class Record:
    """Figures of a part, and the file that gets them.

    A part that is stopped keeps what it has measured, and one that takes too long leaves out its
    last measurements, whose names the file has.

    Args:
        part: name of the part.
        file: where to write; None for nowhere.
        limit_s: seconds after which no measurement begins.

    Attributes:
        content: the figures.
    """

    def __init__(self, part: str, file: Path | None, limit_s: float) -> None:
        self.content: dict[str, Any] = {"benchmark": "vattention", "part": part, "left_out": []}
        self._part = part
        self._file = file
        self._end_s = time.monotonic() + limit_s
        self._console = Console(stderr=True)

    @property
    def has_time(self) -> bool:
        """Whether another measurement may begin."""
        return time.monotonic() < self._end_s

    def cells(self, cells: Mapping[str, Cell]) -> Iterator[tuple[str, Cell]]:
        """Yield measurements to be made, by name, as long as there is time; saves after each.

        Progress is a line before each one: a bar's thread would disturb what is measured.
        """
        for number, (name, cell) in enumerate(cells.items(), 1):
            if not self.has_time:
                self.leave_out(name, "no time was left")
                continue
            self._console.print(f"[dim]{self._part} {number}/{len(cells)}:[/dim] {name}")
            yield name, cell
            self.save()

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a measurement was not made."""
        self.content["left_out"].append(f"{name}: {reason}")
        self._console.print(f"{self._part}: {name} is left out: {reason}", markup=False)

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Append a row to one of the lists."""
        self.content.setdefault(key, []).append(dict(row))

    def save(self) -> None:
        """Write the file."""
        if self._file is not None:
            save(self._file, self.content)


def find(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any] | None:
    """The first row with these values; None if there is none."""
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    return None
