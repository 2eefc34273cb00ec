"""vAttention's benchmarks: each part with small sizes on the CPU, and the tables of README.md."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.vattention import (
    batch,
    driver,
    engines,
    flash_infer,
    kernels,
    paper,
    plots,
    record,
    run,
    settings,
    tables,
    targets,
    waste,
)
from benchmarks.vattention.settings import Shape
from tests.memory.test_cuda_driver import FakeApi

from aquifer.memory.driver.cuda import CudaDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.sim.results import RequestRecord

FOLDER = Path(__file__).parents[2] / "benchmarks" / "vattention"
CONFIG = {**settings.small().config, "head_dim": 16, "vocab_size": 128}
TINY = replace(
    settings.small(),
    config=CONFIG,
    page_sizes=(4 << 10, 64 << 10),
    num_calls=5,
    bandwidth_bytes=1 << 20,
    repeats=1,
    num_steps=20,
    shapes=(Shape(1, 32), Shape(1, 32, 32)),
    contexts=(32, 64),
    batches=(1, 2),
    decode_tokens=32,
    decode_steps=3,
    makespan_contexts=(64,),
    ratios=(10, 5),
    num_requests=2,
    long_tokens=128,
    one_row=Shape(1, 32),
    chunk=Shape(1, 48, 16),
    cached_tokens=64,
    shared=(2, 48, 56),
    found=(2, 64),
    trace_requests=30,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of memory is known, and a replay has fewer page sizes."""
    monkeypatch.setattr(targets, "copy_bandwidth", lambda _: 1e10)
    monkeypatch.setattr(batch, "PAGE_SIZES", (64 << 10, 16384 << 10))


def measured(part: str, folder: Path, tiny: settings.Settings = TINY) -> dict[str, Any]:
    run.run_part(part, tiny, folder)
    content: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    assert content["environment"]["versions"]["torch"] == version("torch")
    assert len(tables.table(content)) > 100
    return content


def test_calls(tmp_path: Path) -> None:
    rows = measured("calls", tmp_path)["rows"]
    assert [(row["page_kib"], row["pages_per_call"]) for row in rows] == [
        (4, 1),
        (64, 1),
        (4, 16),
        (64, 16),
    ]
    for row in rows:
        figures = row["driver_us_per_page"]
        assert set(figures) == {"reserve", "create", "map, set access", "unmap", "release", "free"}
        for each in figures.values():
            assert each["count"] == 5
            assert 0 < each["median"] <= each["p99"]


def test_calls_of_cuda_are_measured_within_those_of_the_driver() -> None:
    ours, api = driver.Times(), driver.Times()
    cuda = CudaDriver(0, api=driver.TimedApi(FakeApi(), api))
    driver.measure_calls(cuda, 2 << 20, 4, 3, None, (ours, api))
    counts = {name: len(seconds) for name, seconds in api.seconds.items()}
    assert set(counts) == set(paper.CALLS_US)
    assert counts == {
        name: 12 if name in ("create", "map", "release") else 3 for name in paper.CALLS_US
    }
    assert sum(ours.seconds["reserve"]) > sum(api.seconds["reserve"])


def test_bandwidth(tmp_path: Path) -> None:
    rows = measured("bandwidth", tmp_path)["rows"]
    assert {row["threads"] for row in rows} == {1, 2}
    assert len(rows) == 8
    assert all(row["create_map_gb_per_s"] > 0 < row["map_gb_per_s"] for row in rows)


def test_waste_of_layer_major_is_that_of_the_paper(tmp_path: Path) -> None:
    rows = measured("waste", tmp_path)["rows"]
    for model, by_tp in paper.WASTE.items():
        for tp, figures in by_tp.items():
            for size, tokens in figures["tokens"].items():
                row = record.find(rows, model=model, tp=tp, layout="layer-major", page_kib=size)
                assert row is not None
                assert row["page_tokens"] == tokens
                assert row["unused_pages_bytes"] == figures["mib"][size] * (1 << 20)
                assert row["most_wasted_bytes"] < row["unused_pages_bytes"]
    ours = record.find(rows, model="Llama-3-8B", tp=1, layout="token-major", page_kib=2048)
    assert ours is not None
    assert ours["page_tokens"] == 16
    assert ours["most_wasted_bytes"] == 15 * 128 * 1024 <= waste.GOAL_BYTES
    assert ours["growth_pages"] == 1


def test_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUIFER_GUARD_PAGES", "false")  # they would be counted too
    content = measured("overlap", tmp_path)
    on_demand, before = content["rows"][0], content["rows"][-1]
    assert before["way"] == "mapped before"
    for row in content["rows"]:
        assert row["num_steps"] == len(row["steps_ms"]) == 20
        assert row["step_ms"]["median"] <= row["step_ms"]["p99.9"] <= row["step_ms"]["max"]
    # 4 sequences, each with a call for all of its pages.
    assert before["map_calls"]["in_loop"]["calls"] <= 4
    calls = on_demand["map_calls"]
    assert calls["in_loop"]["pages"] + calls["in_background"]["pages"] >= 4
    content = measured("reclamation", tmp_path)
    mapped = {name: way["mapped_pages"] for name, way in content["ways"].items()}
    # 256 tokens of 256 bytes: 15 pages of 4 KiB that all but the last token fill, and one more.
    # The host does not defer.
    pages = [len([8, 4, 2, 1]) + 1]
    assert mapped == {
        "created and mapped": pages,
        "mapped from stock": pages,
        "deferred": pages,
        "mapped before": [0],
    }


def test_map_calls_of_other_threads_count_apart() -> None:
    host = HostDriver()
    (handle,) = host.create(4096, 1)
    address = host.reserve(4096)
    with engines.MapCalls(host) as calls:
        host.map(address, [handle])
    host.unmap(address, 4096, 1)
    host.map(address, [handle])
    assert calls.figures(0.0)["in_loop"]["calls"] == 1
    assert calls.figures(0.0)["in_background"]["calls"] == 0
    assert calls.figures(1e12)["in_loop"]["calls"] == 0
    host.close()


def test_map_ahead_is_used_where_there_is_such_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    option = SimpleNamespace(name="map_ahead")
    monkeypatch.setattr(engines, "options_of", lambda _: (option,))
    assert engines.ways_of_mapping() == {
        name: {"map_ahead": name} for name in ("background", "step", "off")
    }
    monkeypatch.setattr(engines, "options_of", lambda _: ())
    assert engines.ways_of_mapping() == {"default": {}}


def test_kernels_over_shuffled_pages(tmp_path: Path) -> None:
    rows = measured("page_sizes", tmp_path)["rows"]
    assert [row["page_kib"] for row in rows] == [4, 64] * 2
    shape = Shape(2, 32, 16)
    with kernels.mapped_kv(TINY, 2, 32) as kv, torch.inference_mode():
        assert 0.9 < kv.kv.float().std() < 1.1
        keys = []
        for paged in (False, True):
            kernels.Attention(TINY, shape, kv, paged=paged).run(1)
            keys.append(kv.layer(1, paged=paged)[0])
        assert keys[0].shape == (2, 32, 2, 16)
        assert keys[1].shape == (4, 16, 2, 16)
        assert torch.equal(keys[0].flatten(0, 1), keys[1].flatten(0, 1))
    figures = kernels.kernel_figures(TINY, shape, [1.0])
    # Each of 2 x 16 rows attends to 17 to 32 keys, of 4 heads with 16 elements.
    assert figures["tflop_per_s"] == pytest.approx(4 * 2 * sum(range(17, 33)) * 4 * 16 / 1e12)
    assert figures["gb_per_s"] == pytest.approx(2 * 32 * 2 * 2 * 16 * 2 / 1e9)


def test_batch(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.jsonl"
    lengths = [{"prompt_tokens": 300 + 40 * i, "output_tokens": 20 + i} for i in range(15)]
    trace.write_text("\n".join(map(json.dumps, lengths)))
    content = measured("batch", tmp_path, replace(TINY, trace=trace))
    rows = content["rows"]
    assert len(rows) == 3 * 2 * 2 * 2
    assert "lengths.jsonl" in content["trace"]

    def largest(layout: str, page_kib: int) -> int:
        row = record.find(rows, load="saturated", model="Yi-34B", layout=layout, page_kib=page_kib)
        assert row is not None
        assert row["unserved"] == 0
        found: int = row["largest_batch"]
        return found

    assert largest("token-major", 64) == largest("token-major", 16384) == 30
    # A page of each of 2 x 60 parts on 2 devices takes 3.75 GiB.
    assert largest("layer-major", 16384) < largest("layer-major", 64) == 30
    left_out = measured_without_trace(tmp_path)
    assert left_out == ["batch: no trace; give --data"]


def measured_without_trace(folder: Path) -> list[str]:
    found: list[str] = run.run_part("batch", TINY, folder).content["left_out"]
    return found


def test_largest_batch() -> None:
    def served(scheduled_s: float, finished_s: float | None) -> RequestRecord:
        return RequestRecord("m", 0.0, 1, 1, scheduled_s=scheduled_s, finished_s=finished_s)

    records = [served(0, 2), served(1, 3), served(2, 4), served(0, None)]
    assert batch.largest_batch(records) == 2
    assert batch.largest_batch([*records, served(1.5, 1.7)]) == 3


def test_engines(tmp_path: Path) -> None:
    content = measured("prefill", tmp_path)
    keys = [(row["kv_cache"], row["context_tokens"]) for row in content["rows"]]
    assert keys == [("virtual", 32), ("virtual", 64), ("paged", 32), ("paged", 64)]
    assert [row["side"] for row in content["attention"]] == ["virtual", "paged"] * 2
    assert content["left_out"] == ["FlashInfer paged: it needs a GPU"]
    content = measured("decode", tmp_path)
    assert [row["batch"] for row in content["rows"]] == [1, 2] * 2
    assert all(row["num_steps"] >= 3 for row in content["rows"])
    content = measured("makespan", tmp_path)
    assert [row["output_tokens"] for row in content["rows"]] == [6, 11] * 2
    content = measured("targets", tmp_path)
    assert len(content["kernels"]) == 4
    for found in content["engines"].values():
        assert set(found) >= {"cached prompt", "shared prefix", "all found", "long prompt"}
    plotted = {"prefill", "decode", "makespan"}
    assert {file.stem for file in tmp_path.glob("*.png")} == plotted


def test_no_time_is_left(tmp_path: Path) -> None:
    content = run.run_part("makespan", replace(TINY, limit_s=-1.0), tmp_path).content
    assert len(content["left_out"]) == 4
    assert tables.table(content).startswith("Not measured yet.")
    assert not plots.draw(content, tmp_path / "makespan.png")


class FakeWrapper:
    """The calls of FlashInfer's wrappers that are used, by attention in plain torch.

    A wrapper for prompts is given the rows first.
    """

    error = 0.0  # of the results

    planned: list[tuple[Any, ...]] = []  # noqa: RUF012

    def __init__(self, workspace: torch.Tensor, layout: str, **_: Any) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8

    def plan(self, *arguments: Any, **_: Any) -> None:
        self.planned.append(arguments)

    def run(self, query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        assert kv.shape[1:] == (2, 16, 2, 16)
        indptr, indices = self.planned[-1][-7:-5]
        results = []
        for number, rows in enumerate(query.chunk(len(indptr) - 1)):
            blocks = kv[indices[indptr[number] : indptr[number + 1]]]
            # [heads, tokens, dim]
            k, v = (each.flatten(0, 1).transpose(0, 1) for each in blocks.unbind(1))
            result = torch.nn.functional.scaled_dot_product_attention(
                rows.transpose(0, 1), k, v, is_causal=len(rows) > 1, enable_gqa=True
            )
            results.append(result.transpose(0, 1))
        return torch.cat(results) + self.error


def test_flash_infer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=FakeWrapper,
        BatchDecodeWithPagedKVCacheWrapper=FakeWrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(flash_infer, "_WORKSPACE_BYTES", 1)
    prefill = flash_infer.measure(TINY, Shape(1, 64, 64))
    decode = flash_infer.measure(TINY, Shape(3, 32))
    assert prefill["layer_us"] > 0 < decode["layer_us"]
    rows, indptr, indices, last_page, *sizes = FakeWrapper.planned[0]
    assert rows.tolist() == [0, 64]
    assert (indptr.tolist(), sorted(indices.tolist())) == ([0, 4], [0, 1, 2, 3])
    assert (last_page.tolist(), sizes) == ([16], [4, 2, 16, 16])
    assert FakeWrapper.planned[1][0].tolist() == [0, 2, 4, 6]
    monkeypatch.setattr(FakeWrapper, "error", 1.0)
    with pytest.raises(RuntimeError, match="FlashInfer's attention is off by"):
        flash_infer.measure(TINY, Shape(1, 64, 64))


def test_arguments(tmp_path: Path) -> None:
    parts, found, output = run.parse(
        ["--output", "out", "--device", "cpu", "--parts", "calls,makespan", "--requests", "7"]
    )
    assert (parts, found.num_requests, output) == (["calls", "makespan"], 7, Path("out"))
    assert found == replace(settings.small(), num_requests=7)
    parts, found, _ = run.parse(["--output", "out", "--contexts", "32768,65536", "--limit", "9"])
    assert (found.makespan_contexts, found.limit_s) == ((32768, 65536), 9)
    assert found.on_gpu
    assert set(run.PARTS) - {*parts} == {"batch"}
    parts, found, _ = run.parse(["--output", "out", "--data", str(tmp_path)])
    assert parts == [*run.PARTS]
    assert found.trace == tmp_path / run.TRACE
    for wrong in (["--parts", "batch"], ["--parts", "nothing"]):
        with pytest.raises(SystemExit):
            run.parse(["--output", "out", *wrong])
    assert run.without_folders(["--data", "/home/me", "--limit", "9"]) == [
        "--data",
        "FOLDER",
        "--limit",
        "9",
    ]


def test_tables_of_the_readme_are_those_of_the_results() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"<!-- {part} -->" in text for part in run.PARTS)
    assert tables.with_tables(text, tables.all_tables()) == text
