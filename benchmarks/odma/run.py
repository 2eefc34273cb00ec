"""ODMA's tables and figures: contiguous memory by forecast lengths, and what forecasts bring.

    python benchmarks/odma/run.py --data FOLDER [--parts pressure,real] [--output FOLDER]
    python benchmarks/odma/run.py --data FOLDER --parts device      (on a GPU)
    python benchmarks/odma/run.py --draw --parts device             (draws the file's figures again)

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
- overhead: the scheduler's own time;
- device: `utilisation` with a real model on a GPU, or elsewhere;
- served: `demand` with a real model on a GPU, or elsewhere, at its 95th percentile over time.

The last two are not among those that are run by default.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from aquifer.bench.result import save
from aquifer.sizes import parse_size

PARTS = {
    "accuracy": ("accuracy", 4000),
    "pressure": ("replays", 4000),
    "demand": ("replays", 4000),
    "steady": ("replays", 2500),
    "utilisation": ("replays", 3000),
    "grouping": ("replays", 2000),
    "drift": ("replays", 6000),
    "devices": ("replays", 3000),
    "real": ("real", 400),
    "overhead": ("real", 2000),
    "device": ("device", 4000),
    "served": ("served", 4000),
}
"""By name: the module of the measurement, and how many requests or steps it takes."""

_ON_GPU = ("device", "served")

_console = Console()


def run_part(
    part: str, data: Path, output: Path, number: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Measure a part, write its file, and draw it where Matplotlib is installed.

    Args:
        part: one of `PARTS`.
        data: folder of the traces.
        output: where the files go.
        number: requests or steps; None for as many as usual.
        settings: further arguments of the measurement.
    """
    module, usual = PARTS[part]
    measure: Callable[..., dict[str, Any]] = getattr(
        import_module(f"benchmarks.odma.{module}"), part
    )
    content = {"benchmark": "odma", "part": part, **measure(data, number or usual, **settings)}
    file = output / f"{part}.json"
    if "ways" in settings and file.exists():
        from benchmarks.odma.device import with_earlier

        content = with_earlier(content, json.loads(file.read_text()))
    save(file, content)
    draw_part(part, output)
    return content


def draw_part(part: str, output: Path) -> None:
    """Draw the figures of a part's file."""
    if importlib.util.find_spec("matplotlib") is None:
        _console.print(f"{part}: not drawn, as Matplotlib is not installed; use --draw elsewhere")
        return
    from benchmarks.odma import plots

    plots.draw(json.loads((output / f"{part}.json").read_text()), output / f"{part}.png")


def _ways(beginnings: str) -> list[str]:
    """The ways of part `device` that begin so."""
    from benchmarks.odma.device import WAYS

    return [way for way in WAYS if way.startswith(tuple(beginnings.split(",")))]


def main() -> None:
    """Measure the requested parts one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the traces")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--parts", default=",".join(part for part in PARTS if part not in _ON_GPU))
    parser.add_argument("--number", type=int, help="requests or steps of each part")
    parser.add_argument("--draw", action="store_true", help="draw what was measured before")
    group = parser.add_argument_group("parts device and served")
    group.add_argument("--model", help="checkpoint or configuration; llama-3-8b or qwen3-0.6b")
    group.add_argument("--device", help="cuda if not given")
    group.add_argument(
        "--kv-memory",
        type=parse_size,
        help="memory for KV: 12GiB if not given, or 32GiB for `served`, where it is to hold all",
    )
    group.add_argument("--memory", type=parse_size, help="memory in all; 32 GiB more if not given")
    group.add_argument("--page-size", type=parse_size, help="of paged and virtual")
    group.add_argument("--context", type=int, help="the longest context; 4096 if not given")
    group.add_argument("--max-num-seqs", type=int, help="requests at once; 1024, 256")
    group.add_argument("--speed", type=float, help="served: divides the trace's times; 6")
    group.add_argument("--seconds", type=float, help="device: length of each; 7 if not given")
    group.add_argument(
        "--ways",
        help="device: beginnings of those to measure, with commas between; the others stay as they "
        "are in the file; all if not given",
    )
    found = parser.parse_args()
    parts = found.parts.split(",")
    if not {*parts} <= {*PARTS}:
        parser.error(f"parts are {', '.join(PARTS)}")
    if found.draw:
        for part in parts:
            draw_part(part, found.output)
        return
    if found.data is None:
        parser.error("--data is needed")
    settings = {
        "model": found.model,
        "device": found.device,
        "kv_bytes": found.kv_memory,
        "memory_bytes": found.memory,
        "page_bytes": found.page_size,
        "context_tokens": found.context,
        "max_seqs": found.max_num_seqs,
        "speed": found.speed,
        "seconds": found.seconds,
        "ways": None if found.ways is None else _ways(found.ways),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    of_one = {"seconds": "device", "ways": "device", "speed": "served"}
    if given and parts not in [[part] for part in _ON_GPU]:
        parser.error(f"{', '.join(given)} are for --parts device or served alone")
    if wrong := [name for name in given if of_one.get(name, parts[0]) != parts[0]]:
        parser.error(f"{', '.join(wrong)} are not for --parts {parts[0]}")
    # The result files record the command, and the settings beside it; the user's folders do not
    # belong there.
    sys.argv = [sys.argv[0], "--data", "FOLDER", "--parts", found.parts]
    for part in parts:
        start_s = time.perf_counter()
        run_part(part, found.data, found.output, found.number, **given)
        _console.print(f"{part}: done after {time.perf_counter() - start_s:.1f} s")


if __name__ == "__main__":
    main()
