"""AVMP's benchmark: its streams, the rules of its allocators, and the paper's totals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.avmp.cells import MODELS, POOLS, Cell, play
from benchmarks.avmp.run import (
    DYNAMIC,
    ORDERED,
    PAPER,
    draw,
    ooms,
    served_summary,
    summary,
    table_2,
    variants,
)
from benchmarks.avmp.served import SERVICES, Served, most_in_time, serve
from benchmarks.avmp.statistics import Bootstrap
from benchmarks.avmp.tables import all_tables
from benchmarks.avmp.workloads import FIRST_SEEDS, SYNTHETIC, EventKind, Stream, make_stream

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


JAMBA = MODELS["jamba_1_5_mini"]
MIB = 1 << 20


def _stream(*requests: tuple[int, int, int]) -> Stream:
    """A stream of (prompt, generated, arrival); a row is 256 KiB, a state 7 MiB."""
    return Stream(*(np.array(column, np.int64) for column in zip(*requests, strict=True)))


@pytest.mark.parametrize("name", SERVICES)
def test_where_there_is_room_nothing_waits(name: str) -> None:
    stream = _stream((64, 32, 0), (33, 20, 5), (128, 16, 16))
    found = serve(stream, JAMBA, 1 << 30, SERVICES[name])
    assert (found.completed, found.never_fit, found.preemptions) == (3, 0, 0)
    assert found.waits == [11, 0, 0]  # in the order of their ends
    assert found.last_tick == 16 + 128 + 16
    assert found.in_time == 3


@pytest.mark.parametrize(
    ("name", "waits", "in_time"),
    [("in order of arrival", [0, 96, 144], 1), ("shortest prompt first", [0, 32, 80], 2)],
)
def test_one_at_a_time(name: str, waits: list[int], in_time: int) -> None:
    """There is memory for one, and time for the first, or for both of the others."""
    stream = _stream((64, 32, 0), (32, 16, 0), (16, 16, 0))  # 96, 48 and 32 ticks
    found = serve(stream, JAMBA, 9 * MIB, SERVICES[name])
    assert found.completed == 3
    assert found.waits == waits
    assert found.most_bytes <= 9 * MIB
    assert found.in_time == in_time


def test_what_never_fits_is_not_admitted() -> None:
    stream = _stream((64, 16, 0), (16 * 8, 16, 0))  # 7 MiB, and 1.25 MiB or 2.25 MiB
    found = serve(stream, JAMBA, 33 * MIB // 4, SERVICES["in order of arrival"])
    assert (found.submitted, found.completed, found.never_fit) == (2, 1, 1)


def test_preempted_requests_lose_nothing() -> None:
    """All are admitted, and then there is no room for what they generate."""
    stream = _stream(*[(16, 160, 0)] * 4)
    found = serve(stream, JAMBA, 30 * MIB, SERVICES["in order of arrival"])
    assert found.completed == 4
    assert found.preemptions > 0
    assert found.most_bytes <= 30 * MIB


def test_upper_bound() -> None:
    # 7 MiB + 1 row for 20 ticks, and one row more for the last 3 of them.
    stream = _stream((16, 4, 0), (1600, 400, 0))
    row = MIB // 4
    alone = (28 * row + row) * 20 + 3 * row
    ticks = 2000
    assert most_in_time(stream, JAMBA, -(-alone // ticks)) == 0  # it has no room at once
    assert most_in_time(stream, JAMBA, 8 * MIB) == 1
    assert most_in_time(stream, JAMBA, 100 * MIB) == 2
    same = _stream(*[(16, 4, 0)] * 9)
    assert most_in_time(same, JAMBA, 28 * row + 2 * row) == 20 * 30 * row // alone == 1


def test_the_file_has_what_a_scheduler_serves() -> None:
    content = _content()
    least = 3 * content["variants"][DYNAMIC]["clean"]
    assert set(content["served"]) == set(SERVICES)
    for name, by_workload in content["served"].items():
        for found in by_workload.values():
            assert found["completed"] + found["never_fit"] == found["submitted"]
            assert found["in_time"] <= min(found["at_most"], found["completed"])
        assert content["seconds_of_served_cells"][name] < 180
    totals = {name: content["served"][name]["total"] for name in SERVICES}
    assert totals["shortest prompt first"]["in_time"] >= least
    shared = totals["shortest prompt first"]["in_time"]
    assert all(totals[name]["in_time"] < shared for name in SERVICES if name.startswith("avmp"))
    assert set(ORDERED) <= set(SERVICES)


def test_summary_of_served_cells() -> None:
    cells = [Served(3, 1, 1, 2, 3, 4, [5.0, 7.0]), Served(2, 0, 1, 2, 2, 0, [9.0, 9.0])]
    found = served_summary(cells)
    assert (found["submitted"], found["in_time"], found["completed"]) == (5, 2, 4)
    assert found["wait_ticks"]["mean"] == 7.5
