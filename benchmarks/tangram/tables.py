"""Tables of README.md from `models.json`: `python benchmarks/tangram/tables.py` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def tables(content: Mapping[str, Any]) -> list[str]:
    """Loading and TTFT by locality, TTFT by devices, and TTFT by split."""
    return [_loading(content), _ttft(content), _devices(content), _splits(content)]


def _loading(content: Mapping[str, Any]) -> str:
    return _by_level(content, lambda row: f"{row['loading_ms']:.0f}")


def _ttft(content: Mapping[str, Any]) -> str:
    return _by_level(content, lambda row: f"{row['ttft_mean_ms']:.0f}, {row['ttft_p99_ms']:.0f}")


def _by_level(content: Mapping[str, Any], shown: Any) -> str:
    modes = list(content["locality"]["h200"]["L1"])
    rows = [
        [setting, level, *(shown(row[mode]) for mode in modes)]
        for setting, found in content["locality"].items()
        for level, row in found.items()
    ]
    return _table(["", "", *modes], rows)


def _devices(content: Mapping[str, Any]) -> str:
    rows = []
    for rate, found in content["devices"].items():
        for name in found["2"]:
            cells = [
                f"{of[name]['ttft_p99_ms'] / 1e3:.1f} ({of[name]['ttft_mean_ms'] / 1e3:.1f})"
                if name in of
                else ""
                for of in found.values()
            ]
            rows.append([f"{rate}/s", name, *cells])
    counts = list(next(iter(content["devices"].values())))
    return _table(
        ["", "", *("1 device" if count == "1" else f"{count} devices" for count in counts)], rows
    )


def _splits(content: Mapping[str, Any]) -> str:
    settings = content["splits"]
    first = next(iter(settings.values()))
    rows = []
    for share in first:
        if share == "compared":
            continue
        cells = []
        for found in settings.values():
            row = found[share]
            cells.append(
                f"{row['ttft_mean_ms']:.0f}, {row['ttft_p99_ms']:.0f} | "
                f"{row['loading_ms']:.0f} | {100 * row['prefix_hits']:.0f} %"
            )
        rows.append([share if share == "one rule" else f"{100 * float(share):.0f} %", *cells])
    header = [""]
    for name in settings:
        header += [f"{name}: TTFT", "loading", "hits"]
    return _table(header, rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print("\n\n".join(tables(json.loads((_HERE / "models.json").read_text()))))
