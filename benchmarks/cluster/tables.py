"""Tables of README.md, from the results.

python benchmarks/cluster/tables.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cluster.run import COUNTS

from aquifer.engine.policies.placement import PLACEMENTS

_HERE = Path(__file__).resolve().parent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates_table(found: dict[str, Any]) -> str:
    """Sustained rates by placement and number of workers, one for each seed."""
    rows = []
    for name, row in found.items():
        cells = [
            ", ".join(f"{rate:.2g}" if rate else "none" for rate in row[str(count)]["rates"])
            if str(count) in row
            else ""
            for count in COUNTS
        ]
        rows.append([name, *cells])
    return table(["", *map(str, COUNTS)], rows)


def failure_table(found: dict[str, Any]) -> str:
    """TTFT before, during and after a failure."""
    rows = []
    for name in ("affinity", "least-loaded", "random"):
        for what in ("no failure", "failure"):
            row = found[name][what]
            cells = [
                f"{row[part]['ttft_p50_ms'] / 1e3:.2f}, {row[part]['ttft_p99_ms'] / 1e3:.2f}"
                for part in ("before", "while gone", "after")
            ]
            rows.append([name, what, *cells, str(len(row["failed"]))])
    return table(["", "", "before", "while gone", "after", "failed"], rows)


def mixed_table(found: dict[str, Any]) -> str:
    """TTFT on different devices."""
    rows = [
        [
            name,
            *(f"{found[name][f'ttft_p{part}_ms'] / 1e3:.2f}" for part in (50, 90, 99)),
            f"{found[name]['loaded_gb']:.0f}",
            f"{100 * found[name]['on_h200']:.0f} %",
        ]
        for name in PLACEMENTS
    ]
    return table(["", "p50", "p90", "p99", "GB loaded", "on the H200s"], rows)


def all_tables() -> list[str]:
    """All tables of README.md."""

    def results(part: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((_HERE / f"{part}.json").read_text())
        found: dict[str, Any] = content["results"]
        return found

    return [
        rates_table(results("rates")),
        failure_table(results("failure")),
        mixed_table(results("mixed")),
    ]


if __name__ == "__main__":
    print("\n\n".join(all_tables()))
