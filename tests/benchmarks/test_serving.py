"""`make bench-serving`: servers in turns, and their figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks.cpu.serving import Streams, busy, figures, measure, table_of
from tests.fake_openai import DONE, Answer, fake_server, text, usage

from aquifer.bench.serving.load import Run
from aquifer.bench.serving.stream import Stream
from aquifer.bench.workload import LengthRange
from aquifer.errors import EngineError

pytestmark = pytest.mark.usefixtures("imports_left_out")  # a load begins with a full collection

STREAMS = Streams([1, 2], [0, 0], LengthRange(4, 4), LengthRange(7, 7), vocab_size=99, seed=3)


def test_servers_take_turns_and_no_prompt_comes_twice() -> None:
    answer = Answer((text("a"), usage(7), DONE))
    with fake_server(answer) as one, fake_server(answer) as other:
        results = measure({"a": one.url, "b": other.url}, STREAMS, repeats=2)
    assert [(r["concurrency"], r["server"]) for r in results] == 2 * [
        *((1, "a"), (1, "b"), (2, "a"), (2, "b")),
    ]
    assert [r["completed"] for r in results] == 2 * [2, 2, 4, 4]
    assert table_of("title", results).row_count == 8
    bodies = [json.loads(body) for r in range(4) for body in STREAMS.load(2, r).bodies]
    assert len({tuple(body["prompt"]) for body in bodies}) == 8
    assert all(body["ignore_eos"] for body in bodies)


def test_a_failure_ends_the_measurement() -> None:
    with fake_server(Answer((), 503)) as server, pytest.raises(EngineError, match="a: HTTP 503"):
        measure({"a": server.url}, STREAMS, repeats=1)


def test_figures_by_hand() -> None:
    first = Run([Stream(1, 5, 10.0, [10.5, 11.0]), Stream(1, 3, 10.1, [10.4, 12.0])], [], 2.0)
    second = Run([Stream(1, 5, 20.0, [20.1, 20.5]), Stream(1, 3, 20.0, [21.0])], [], 1.0)
    result = figures([first, second])
    assert (result["completed"], result["total_output_tokens"]) == (4, 16)
    assert result["output_throughputs"] == pytest.approx([4.0, 8.0])
    assert result["output_throughput"] == pytest.approx(6.0)
    assert result["request_throughput"] == pytest.approx(2 / 1.5)
    assert result["median_ttft_ms"] == pytest.approx(400)


def test_busy_processes_end_with_their_context() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    with busy(2):
        assert len(children() - before) == 2
    assert children() == before
