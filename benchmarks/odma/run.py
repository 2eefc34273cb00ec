"""ODMA's tables and figures: contiguous memory by forecast lengths, and what forecasts bring.

    python benchmarks/odma/run.py --data FOLDER [--parts pressure,real] [--output FOLDER]

FOLDER has the traces. Each part writes PART.json, most also PART.png:

- accuracy: how well lengths are predicted, by the paper's measure and by others;
- pressure: preemptions and goodput in short memory, without forecasts, with them, with wrong ones;
- demand: goodput in many amounts of memory, and how often the demand exceeds each;
- steady: the same at a steady rate;
- utilisation: how much of contiguous memory holds tokens, by who reserves it;
- grouping: requests in order of arrival, and grouped by bucket;
- devices: several devices in short memory, by where requests are placed;
- drift: the same trace through two shifts of its lengths;
- real: a small model on the CPU in short memory;
- overhead: the scheduler's own time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.odma import accuracy, plots, real, replays
from rich.console import Console

from aquifer.bench.result import save

PARTS: dict[str, tuple[Callable[[Path, int], dict[str, Any]], int]] = {
    "accuracy": (accuracy.accuracy, 4000),
    "pressure": (replays.pressure, 4000),
    "demand": (replays.demand, 4000),
    "steady": (replays.steady, 2500),
    "utilisation": (replays.utilisation, 3000),
    "grouping": (replays.grouping, 2000),
    "drift": (replays.drift, 6000),
    "devices": (replays.devices, 3000),
    "real": (real.real, 400),
    "overhead": (real.overhead, 2000),
}
"""By name: the measurement, and how many requests or steps it takes."""


def run_part(part: str, data: Path, output: Path, number: int | None = None) -> dict[str, Any]:
    """Measure a part, write its file, and draw it."""
    measure, usual = PARTS[part]
    content = {"benchmark": "odma", "part": part, **measure(data, number or usual)}
    save(output / f"{part}.json", content)
    plots.draw(content, output / f"{part}.png")
    return content


def main() -> None:
    """Measure the requested parts one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--number", type=int, help="requests or steps of each part")
    found = parser.parse_args()
    parts = found.parts.split(",")
    if not {*parts} <= {*PARTS}:
        parser.error(f"parts are {', '.join(PARTS)}")
    # The result files record the command; the user's folders do not belong there.
    sys.argv = [sys.argv[0], "--data", "FOLDER", "--parts", found.parts]
    console = Console()
    for part in parts:
        start_s = time.perf_counter()
        run_part(part, found.data, found.output, found.number)
        console.print(f"{part}: done after {time.perf_counter() - start_s:.1f} s")


if __name__ == "__main__":
    main()
