"""Tables of README.md from the results: `python benchmarks/avmp/tables.py` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_WORKLOADS = ("uniform_short", "mixed_long", "agentic_burst")
_PAPER = (
    "padded_unified",
    "fixed_dual_mr05",
    "fixed_dual_mr09",
    "avmp_static_mr05",
    "avmp_dynamic_b128",
)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def all_tables() -> list[str]:
    """All tables, in the order of README.md."""
    content = json.loads((_HERE / "avmp.json").read_text())
    return [
        _counts(content, _PAPER),
        _compared(content),
        _replay(content),
        _counts(content, [f"avmp_dynamic_b{batch}" for batch in _BATCHES]),
        _hidden(content),
        _rules(content),
        _splits(content),
        _served(content),
        _served_workloads(content),
    ]


def _counts(content: Mapping[str, Any], names: Iterable[str]) -> str:
    rows = []
    for name in names:
        ooms = content["variants"][name]["ooms"]
        cells = [
            f"{ooms[key]['mean']:.1f} ± {ooms[key]['sigma']:.1f}" for key in (*_WORKLOADS, "total")
        ]
        rows.append([name, *cells])
    return _table(["", *_WORKLOADS, "total"], rows)


def _compared(content: Mapping[str, Any]) -> str:
    rows = [
        [
            row["variant"],
            row["figure"],
            row["workload"],
            f"{row['point']:.2f}",
            f"{row['low']:.2f}, {row['high']:.2f}",
        ]
        for row in content["table_2"]
    ]
    return _table(["against fixed_dual_mr05", "figure", "workload", "point", "95 %"], rows)


def _replay(content: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            f"{found['ooms']:.2f}",
            f"{found['active_p50']:.0f}",
            f"{found['completed']}",
            f"{found['clean']}",
            f"{found['goodput']:.0f}",
        ]
        for name, found in content["replay"].items()
    ]
    return _table(["", "ooms", "active, p50", "completed", "clean", "goodput, req/s"], rows)


def _hidden(content: Mapping[str, Any]) -> str:
    names = [
        *_PAPER,
        "padded, unique ids",
        "padded, filled",
        "padded, filled, unique ids",
        "shared pages: once",
    ]
    rows = []
    for name in names:
        found = content["variants"][name]
        rows.append(
            [
                name,
                f"{found['ooms']['total']['mean']:.1f}",
                f"{found['completed']:,}",
                f"{found['clean']:,}",
                f"{found['evictions']:,}",
                f"{found['stale']:,}",
            ]
        )
    return _table(["", "ooms", "completed", "clean", "evictions", "slots freed by others"], rows)


def _rules(content: Mapping[str, Any]) -> str:
    rules = ("once", "until it fits", "never")
    rows = []
    for name in ("padded", "dual", "dynamic", "shared pages"):
        cells = []
        for rule in rules:
            found = content["variants"][f"{name}: {rule}"]
            cells.append(f"{found['ooms']['total']['mean']:,.1f} ({found['clean']:,})")
        rows.append([name, *cells])
    return _table(["ooms (clean)", *(f"evicts {rule}" for rule in rules)], rows)


def _splits(content: Mapping[str, Any]) -> str:
    found = content["variants"]
    named = {"0.5": "fixed_dual_mr05", "0.9": "fixed_dual_mr09"}
    splits = ("0.02", "0.05", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")
    of = [found[named.get(split, f"split {split}")] for split in splits]
    rows = [
        ["ooms", *(f"{each['ooms']['total']['mean']:.0f}" for each in of)],
        ["clean", *(f"{each['clean']:,}" for each in of)],
    ]
    return _table(["part for states", *splits], rows)


def _served(content: Mapping[str, Any]) -> str:
    clean = content["variants"]["avmp_dynamic_b128"]["clean"]
    rows = []
    for name, by_workload in content["served"].items():
        seconds = content["seconds_of_served_cells"][name]
        found = by_workload["total"]
        wait = found["wait_ticks"]
        rows.append(
            [
                name,
                f"{found['in_time']:,} ({found['in_time'] / clean:.1f})",
                f"{found['at_most']:,}",
                f"{found['completed']:,}",
                f"{found['never_fit']}",
                f"{wait['mean']:,.0f}, {wait['p50']:,.0f}, {wait['p99']:,.0f}",
                f"{found['preemptions']:,}",
                f"{seconds:.0f}",
            ]
        )
    return _table(
        [
            "",
            "clean in time (of dynamic)",
            "at most",
            "all that may wait",
            "never fit",
            "wait in ticks: mean, p50, p99",
            "preemptions",
            "seconds",
        ],
        rows,
    )


def _served_workloads(content: Mapping[str, Any]) -> str:
    rows = []
    for workload in (*_WORKLOADS, "sharegpt_replay"):
        row = [workload]
        for name in ("in order of arrival", "shortest prompt first"):
            found = content["served"][name][workload]
            wait = found["wait_ticks"]
            row += [
                f"{found['in_time']:,}",
                f"{wait['mean']:,.0f}, {wait['p50']:,.0f}, {wait['p99']:,.0f}",
            ]
        rows.append([*row, f"{found['at_most']:,}", f"{found['submitted']:,}"])
    return _table(
        [
            "",
            "in order of arrival",
            "wait",
            "shortest prompt first",
            "wait",
            "at most",
            "requests",
        ],
        rows,
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print("\n\n".join(all_tables()))
