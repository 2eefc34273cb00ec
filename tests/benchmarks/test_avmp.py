"""AVMP's benchmark: its streams, the rules of its allocators, and the paper's totals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.avmp.cells import MODELS, POOLS, Cell, play
from benchmarks.avmp.run import DYNAMIC, PAPER, draw, ooms, summary, table_2, variants
from benchmarks.avmp.statistics import Bootstrap
from benchmarks.avmp.tables import all_tables
from benchmarks.avmp.workloads import FIRST_SEEDS, SYNTHETIC, EventKind, make_stream

FOLDER = Path(__file__).parents[2] / "benchmarks" / "avmp"

DIGESTS = {
    "uniform_short": ("d57aa0d43f1d753f", "6f1504fa3ffe3631", "0db7a3a57c7ddd50"),
    "mixed_long": ("39b167add79fa8c6", "cbaeab557e52ad7f", "aa5880c06871331d"),
    "agentic_burst": ("834a88f84edce2a4", "59327d2a82953416", "6f1b779a9b11b4ab"),
}

TABLE_1 = {
    "padded_unified": (482.7, 573.0, 512.0, 1567.7),
    "fixed_dual_mr05": (7.3, 387.3, 157.3, 552.0),
    "fixed_dual_mr09": (522.0, 492.0, 207.3, 1221.3),
    "avmp_static_mr05": (7.3, 387.3, 157.3, 552.0),
    "avmp_dynamic_b128": (9.0, 364.3, 136.7, 510.0),
}


def _content() -> Any:
    return json.loads((FOLDER / "avmp.json").read_text())


@pytest.mark.parametrize("workload", SYNTHETIC)
def test_streams(workload: str) -> None:
    found = [make_stream(workload, FIRST_SEEDS[workload] + i, Path()).digest for i in range(3)]
    assert tuple(found) == DIGESTS[workload]


def test_events_of_a_stream() -> None:
    stream = make_stream("uniform_short", 1, Path())
    events = stream.events()
    assert events == sorted(events)
    prompt, generated, arrival = (
        int(values[7]) for values in (stream.prompt, stream.generated, stream.arrival)
    )
    ticks = {
        kind: [e.tick for e in events if (e.kind, e.request) == (kind, 7)] for kind in EventKind
    }
    assert ticks[EventKind.ARRIVAL] == [arrival]
    assert ticks[EventKind.DEPARTURE] == [arrival + prompt + generated]
    num_pages = -(-(prompt + generated) // 16) - -(-prompt // 16)
    assert len(ticks[EventKind.GROWTH]) == num_pages


@pytest.mark.parametrize("name", PAPER)
def test_cells_are_those_of_the_file(name: str) -> None:
    """Each variant, with the workload that comes first: the counts of the paper's Table 1."""
    expected = _content()["cells"][name]["uniform_short"]
    variant = variants()[name]
    cells: dict[str, list[Cell]] = {key: [] for key in expected}
    for number in range(3):
        stream = make_stream("uniform_short", 1 + number, Path())
        for model, sizes in MODELS.items():
            for pool, num_bytes in POOLS.items():
                cells[f"{model}, {pool}"].append(play(stream, variant.make(sizes, num_bytes)))
    assert round(ooms(cells)["mean"], 1) == TABLE_1[name][0]
    for key, seeds in expected.items():
        for cell, of_file in zip(cells[key], seeds, strict=True):
            for field in ("ooms", "completed", "clean", "evictions", "rebalances", "active_p50"):
                assert getattr(cell, field) == of_file[field]


def test_the_file_has_the_papers_totals() -> None:
    content = _content()
    for name, totals in TABLE_1.items():
        found = content["variants"][name]["ooms"]
        shown = [round(found[key]["mean"], 1) for key in (*SYNTHETIC, "total")]
        assert tuple(shown) == totals
    replayed = [round(found["ooms"], 2) for found in content["replay"].values()]
    assert replayed == [78.42, 2.33, 67.83, 2.33, 2.33]
    dynamic = content["variants"][DYNAMIC]
    assert (dynamic["completed"], dynamic["clean"]) == (11490, 1284)
    assert dynamic["rebalances_of_medians"] == 84
    assert dynamic["migrated_mib"] == pytest.approx(298.67, abs=0.01)
    assert content["seconds_of_240_cells"] < 180


def test_the_readme_has_the_tables() -> None:
    readme = (FOLDER / "README.md").read_text()
    for table in all_tables():
        assert table in readme


def test_a_bootstrap_of_what_does_not_differ() -> None:
    bootstrap = Bootstrap()
    same = bootstrap.difference([1, 5, 9], [1, 5, 9])
    assert (same.point, same.low, same.high) == (0, 0, 0)
    twice = bootstrap.ratio([2, 4, 8], [1, 2, 4])
    assert (twice.point, twice.low, twice.high) == (2, 2, 2)
    apart = bootstrap.difference([1, 2, 3, 10], [0, 0, 0, 0])
    assert apart.low < apart.point == 4 < apart.high


def test_figures_and_plot(tmp_path: Path) -> None:
    content = _content()
    draw(content, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    stream = make_stream("uniform_short", 1, Path())
    cells = {
        name: {
            workload: {
                f"{model}, 1 GiB": [play(stream, variants()[name].make(sizes, 1 << 30))]
                for model, sizes in MODELS.items()
            }
            for workload in SYNTHETIC
        }
        for name in PAPER
    }
    found = summary(cells[DYNAMIC])
    assert found["submitted"] == 6 * 512
    rows = table_2(cells)
    assert [row["variant"] for row in rows[7:10]] == [
        "avmp_static_mr05",
        "fixed_dual_mr09",
        "padded_unified",
    ]
    assert rows[7]["point"] == 0
