"""Where the time of a start goes."""

from __future__ import annotations

import re

from tests.serve.running import RunningServer, eventually

from aquifer.engine.reports import LoadProgress, Stage
from aquifer.serve.start_times import StartTimes

LINE = re.compile(
    r"Started in (\d+\.\d) s: processes and devices (\d+\.\d), weights (\d+\.\d), "
    r"first steps and web side (\d+\.\d)\n"
)


def test_each_report_ends_a_part():
    reports: list[tuple[float, Stage]] = [
        (12.0, "weights"),
        (12.5, "weights"),
        (13.0, "kernels"),
        (13.25, "steps"),
        (14.0, "weights"),  # of another model
        (14.5, "steps"),
    ]
    clock = iter([10.0, *(now_s for now_s, _ in reports), 15.0])
    times = StartTimes(lambda: next(clock))
    for _, stage in reports:
        times.update(LoadProgress("m", 1, 2, stage))
    assert times.summary() == (
        "Started in 5.0 s: processes and devices 2.0, weights 1.2, kernels 0.5, "
        "captured steps 0.8, first steps and web side 0.5"
    )


def test_a_start_without_models():
    clock = iter([1.0, 3.0])
    assert StartTimes(lambda: next(clock)).summary() == (
        "Started in 2.0 s: processes and devices 2.0"
    )


def test_a_server_logs_it(idle_server: RunningServer):
    eventually(lambda: LINE.search(idle_server.stderr) is not None, "it is logged")
    found = LINE.search(idle_server.stderr)
    assert found is not None
    whole, *parts = map(float, found.groups())
    assert abs(whole - sum(parts)) < 0.1 * len(parts)
