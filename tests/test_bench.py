"""`aquifer bench`: workloads, floors, and that every command measures what it says."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures import HYBRIDS, save_tiny
from tests.checkpoints import tiny_llama

from aquifer.bench import latency, offline
from aquifer.bench.floor import Cost, Rates
from aquifer.bench.load import made_checkpoint
from aquifer.bench.switch import Place
from aquifer.bench.workload import LengthRange, Workload
from aquifer.cache import KV_CACHES
from aquifer.cli import app
from aquifer.errors import ConfigError
from aquifer.llm import LLM
from aquifer.memory.driver.host import HostDriver
from aquifer.models import plan_model
from aquifer.models.transformers import TransformersPlan
from aquifer.weights.checkpoint import Checkpoint

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "benchmarks" / "gpu" / "models"
MEMORY = "64MiB"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("bench") / "tiny")


# --- workloads -------------------------------------------------------------------------------


def test_the_workload_is_the_one_that_others_measure_with() -> None:
    random.seed(0)
    prompts = []
    for _ in range(256):
        num_tokens = random.randint(100, 1024)
        prompts.append([random.randint(0, 10000) for _ in range(num_tokens)])
    lengths = [random.randint(100, 1024) for _ in range(256)]
    mixed = LengthRange.parse("100-1024")
    workload = Workload.random(256, mixed, mixed, vocab_size=151_936, seed=0)
    assert workload == Workload(prompts, lengths)
    assert workload.num_input_tokens == sum(map(len, prompts))
    assert workload.num_output_tokens == sum(lengths)


def test_a_small_vocabulary_bounds_the_tokens() -> None:
    workload = Workload.random(20, LengthRange(5, 9), LengthRange(3, 3), vocab_size=7, seed=1)
    assert {token for prompt in workload.prompts for token in prompt} == set(range(7))
    assert {len(prompt) for prompt in workload.prompts} == {5, 6, 7, 8, 9}
    assert workload.output_lengths == [3] * 20


@pytest.mark.parametrize("text", ["", "x", "-5", "0", "9-8", "1-2-3"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no"):
        LengthRange.parse(text)


# --- floors ----------------------------------------------------------------------------------

RATES = Rates(bytes_per_s=1e6, operations_per_s=1e9)
COST = Cost(
    body_parameters=1000,
    head_parameters=300,
    expert_parameters=800,
    expert_share=0.25,
    parameter_bytes=2,
    kv_bytes_per_token=10,
    state_traffic_bytes=0,
    attention_operations=40.0,
)


def test_attended_tokens_are_counted_step_by_step() -> None:
    workload = Workload([[0] * 5, [0] * 9], [4, 1])
    # The first token needs no decode step; the others attend to 6, 7 and 8.
    assert workload.num_attended_tokens == 6 + 7 + 8


def test_floors_by_hand() -> None:
    workload = Workload([[0] * 5, [0] * 9], [4, 4])
    attended = 6 + 7 + 8 + 10 + 11 + 12
    # Two tokens of which each chooses a quarter of the experts miss 9/16 of them.
    weights = (1300 + 800 * 7 / 16) * 2
    assert COST.step_s(workload, RATES) == pytest.approx((weights + attended / 3 * 10) / 1e6)
    operations = 2 * (1000 + 200) * 14 + 2 * 300 * 2 + 40 * (25 + 81) / 2
    assert COST.prefill_s([5, 9], RATES) == pytest.approx(operations / 1e9)
    assert COST.total_s(workload, RATES) == pytest.approx(
        operations / 1e9 + (4 * weights + attended * 10) / 1e6
    )


def test_each_step_reads_and_writes_the_state_of_each_request() -> None:
    workload = Workload([[0] * 5, [0] * 9], [4, 2])
    cost = replace(COST, state_traffic_bytes=2000)
    assert cost.step_s(workload, RATES) == pytest.approx(
        COST.step_s(workload, RATES) + 2 * (2 * 1000) / 1e6
    )
    assert cost.total_s(workload, RATES) == pytest.approx(
        COST.total_s(workload, RATES) + (4 + 2) * (2 * 1000) / 1e6
    )
    # Prompts are bound by their products.
    assert cost.prefill_s([5, 9], RATES) == COST.prefill_s([5, 9], RATES)


@pytest.mark.parametrize(("state_dtype", "element_bytes"), [("auto", 4), ("bfloat16", 2)])
def test_the_cost_of_a_hybrid(state_dtype: Any, element_bytes: int, tmp_path: Path) -> None:
    config = HYBRIDS["bamba"]()
    save_tiny(config, tmp_path)
    with LLM(tmp_path, memory=MEMORY, state_dtype=state_dtype) as llm:
        cost = Cost.of(llm)
    inner, state = config.mamba_n_heads * config.mamba_d_head, config.mamba_d_state
    # Of each of two layers: what the convolution needs of earlier tokens, in the precision of the
    # weights, is read and written; the heads' states are read, and written by one of four tokens.
    # The inputs of three of four tokens are kept: each token writes its own, and reads half of the
    # three in the mean.
    columns = inner + 2 * config.mamba_n_groups * state
    conv_bytes = columns * (config.mamba_d_conv - 1) * 4
    inputs_bytes = (inner + config.mamba_n_groups * state + config.mamba_n_heads) * 4
    layer_bytes = 2 * conv_bytes + 1.25 * inner * state * element_bytes + 2.5 * inputs_bytes
    assert cost.state_traffic_bytes == 2 * layer_bytes
    assert cost.kv_bytes_per_token == 2 * 2 * 16 * 4


@pytest.mark.parametrize("tied", [True, False])
def test_the_cost_of_a_model(tied: bool, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m", tie_word_embeddings=tied)
    with LLM(folder, memory=MEMORY) as llm:
        cost = Cost.of(llm)
    head = 320 * 64  # vocabulary times hidden
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128
    assert (cost.body_parameters, cost.head_parameters) == (2 * layer, head)
    assert cost.weight_bytes(1) == 4 * (2 * layer + head)
    assert cost.kv_bytes_per_token == 2 * 2 * 32 * 4
    # Two layers of 4 heads of 16: one product with K, one with V, each an addition too.
    assert cost.attention_operations == 2 * (2 * 2 * 4 * 16)


@pytest.mark.parametrize(
    ("model", "num_parameters", "token_bytes"),
    [("qwen3-0.6b", 596_049_920, 28 * 2 * 8 * 128 * 2), ("llama-3-8b", 8_030_261_248, 131_072)],
)
def test_the_models_that_are_measured_have_their_public_shapes(
    model: str, num_parameters: int, token_bytes: int
) -> None:
    plan = plan_model(Checkpoint.without_tensors(MODELS / model))
    assert sum(p.num_bytes for p in plan.parameters) == 2 * num_parameters
    with torch.device("meta"):
        tensors = {p.name: torch.empty(p.shape, dtype=p.dtype) for p in plan.parameters}
        assert plan.build(tensors).kv_layout.token_bytes == token_bytes


def test_the_model_of_transformers_that_is_measured_has_its_public_shape() -> None:
    plan = plan_model(Checkpoint.without_tensors(MODELS / "minitron-4b"))
    assert isinstance(plan, TransformersPlan)
    assert plan.num_parameters == 4_190_509_056
    assert sum(p.num_bytes for p in plan.parameters) == 2 * plan.num_parameters
    assert plan.kv_layout.token_bytes == 32 * 2 * 8 * 128 * 2


# --- measuring -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_only_steps_of_the_whole_batch_are_timed(checkpoint: Path, kv_cache: str) -> None:
    """Prompts come in chunks; the first sequence to start ends first."""
    workload = Workload.random(5, LengthRange(20, 20), LengthRange(12, 12), 320, seed=0)
    options: dict[str, Any] = {"kv_cache": kv_cache, "enable_prefix_caching": False}
    with LLM(checkpoint, memory=MEMORY, max_num_batched_tokens=30, **options) as llm:
        times = latency.measure_steps(llm, workload, repeats=2)
        assert len(times.first_tokens_s) == len(times.steps_s) == 2
        for steps_s, first_s, total_s in zip(
            times.steps_s, times.first_tokens_s, times.ours.seconds, strict=True
        ):
            # Four more steps pass until the last prompt is read, by which the first one is ahead.
            assert 6 <= len(steps_s) < 11
            assert first_s + sum(steps_s) < total_s
        growing, mapped = latency.compare_growth(llm, workload, repeats=1)
        assert growing.ours.completed == mapped.ours.completed == times.ours.completed
        assert len(mapped.steps_s[0]) < len(growing.steps_s[0])
        ours, _ = offline.compare(llm, workload, repeats=1)
        assert ours.completed == times.ours.completed
        llm.engine.pool.check()


def test_what_never_runs_at_once_is_refused(checkpoint: Path) -> None:
    workload = Workload.random(3, LengthRange(8, 8), LengthRange(2, 2), 320, seed=0)
    with LLM(checkpoint, memory=MEMORY, max_num_seqs=2) as llm:
        with pytest.raises(ConfigError, match="never decoded all at once"):
            latency.measure_steps(llm, workload, repeats=1)
        too_long = Workload([[1] * 4000], [4])
        with pytest.raises(Exception, match="context length"):
            latency.measure_steps(llm, too_long, repeats=1)
        assert not llm.engine.has_work


def bench(output: Path, *arguments: str) -> dict[str, Any]:
    app(["bench", *arguments, "--output", str(output)], standalone_mode=False)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


@pytest.fixture(autouse=True)
def _quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine does at best takes seconds to measure."""
    monkeypatch.setattr(Rates, "measure", classmethod(lambda *_: RATES))


@pytest.mark.parametrize(
    "arguments",
    [("overhead",), *((name, "demo") for name in ("throughput", "latency", "prefill", "start"))]
    + [(name, "demo") for name in ("load", "switch", "soak")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aquifer.memory.driver.host.HostDriver.__init__", _must_not_be_called)
    monkeypatch.setattr(subprocess, "run", _must_not_be_called)
    with pytest.raises(ConfigError, match=r"--output: cannot write .*: Is a directory"):
        bench(tmp_path, *arguments)


def _must_not_be_called(*_: object, **__: object) -> None:
    raise AssertionError("a measurement has begun")


def test_a_result_that_cannot_be_written_is_an_error_in_a_line() -> None:
    with pytest.raises(ConfigError, match="cannot write the result to /dev/full: No space left"):
        bench(Path("/dev/full"), "overhead", "--num-seqs", "1", "--num-steps", "1")


def test_overhead_refuses_pages_of_a_size_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--page-size is 1000; it must be a multiple of"):
        bench(tmp_path / "x", "overhead", "--page-size", "1000")


def test_throughput(checkpoint: Path, tmp_path: Path) -> None:
    options = ("--num-prompts", "3", "--input-len", "4-9", "--output-len", "3-6")
    figures = bench(
        tmp_path / "new" / "t.json",
        *("throughput", str(checkpoint), *options, "--repeats", "2", "--memory", MEMORY),
        "--transformers",
    )
    assert figures["equal_outputs"] == figures["num_prompts"] == 3
    assert len(figures["aquifer"]["seconds"]) == len(figures["transformers"]["seconds"]) == 2
    rate = figures["total_output_tokens"] / figures["aquifer"]["duration"]
    assert figures["aquifer"]["output_throughput"] == pytest.approx(rate)
    assert figures["floor_seconds"] > 0
    assert figures["environment"]["versions"]["torch"]
    with pytest.raises(ConfigError, match="greedy"):
        bench(
            tmp_path / "x", "throughput", str(checkpoint), "--transformers", "--temperature", "0.6"
        )


def test_latency(checkpoint: Path, tmp_path: Path) -> None:
    options = ("--input-len", "8", "--output-len", "6", "--repeats", "2", "--memory", MEMORY)
    figures = bench(
        tmp_path / "l.json",
        *("latency", str(checkpoint), "--batch-size", "1,3", *options, "--transformers"),
    )
    assert [batch["num_prompts"] for batch in figures["batches"]] == [1, 3]
    for batch in figures["batches"]:
        assert batch["equal_outputs"] == batch["num_prompts"]
        assert [len(steps) for steps in batch["aquifer"]["step_seconds"]] == [5, 5]
        floor = batch["floor_ms_per_token"]
        assert batch["times_floor"] == batch["aquifer"]["step_ms"]["median"] / floor
    mapped = bench(
        tmp_path / "m.json",
        *("latency", str(checkpoint), *options, "--everything-mapped", "--load-format", "dummy"),
        *("--kv-cache", "paged", "--device", "cpu", "--dtype", "bfloat16"),
    )
    assert mapped["everything_mapped"]
    assert (mapped["kv_cache"], mapped["dtype"], mapped["device"]) == ("paged", "bfloat16", "cpu")
    assert len(mapped["batches"][0]["aquifer"]["step_seconds"][0]) == 4
    with pytest.raises(ConfigError, match="--batch-size"):
        bench(tmp_path / "x", "latency", str(checkpoint), "--batch-size", "1,x")


def test_prefill(checkpoint: Path, tmp_path: Path) -> None:
    figures = bench(
        tmp_path / "p.json",
        *("prefill", str(checkpoint), "--num-prompts", "3", "--input-len", "20"),
        *("--memory", MEMORY, "--repeats", "1"),
    )
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (60, 3)
    rate = 60 / figures["aquifer"]["duration"]
    assert figures["aquifer"]["prompt_throughput"] == pytest.approx(rate)


def test_start(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    figures = bench(tmp_path / "s.json", "start", str(checkpoint), "--memory", MEMORY)
    assert len(figures["starts"]) == 2
    for times in figures["starts"]:
        parts = times["import_s"] + times["construct_s"] + times["first_token_s"]
        assert 0 < parts < times["process_s"]
        assert times["num_compiled"] == 0


def test_load(checkpoint: Path, tmp_path: Path) -> None:
    figures = bench(tmp_path / "l.json", "load", str(checkpoint), "--device", "cpu")
    assert figures["num_bytes"] == Checkpoint.open(checkpoint).num_bytes
    assert len(figures["load_s"]) == 2
    with pytest.raises(ConfigError, match="needs a GPU"):
        bench(tmp_path / "x", "load", str(checkpoint), "--device", "cpu", "--from-pinned")


def test_the_speed_of_a_switch_that_took_no_time_is_unknown() -> None:
    """Where little is moved, the median may be below that with resident weights."""
    place = Place("host", 1000, [], [0.3, 0.5, 0.4])
    assert place.figures(0.2, 1e4)["moved_bytes_per_s"] == pytest.approx(5000)
    assert place.figures(0.4, 1e4)["moved_bytes_per_s"] is None
    assert place.figures(0.5, 1e4)["moved_bytes_per_s"] is None


def test_switch(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are where each row says they are."""
    monkeypatch.setattr(HostDriver, "max_mappings", None)  # so pages are mapped ahead
    options = ("--device", "cpu", "--memory", "8MiB", "--input-len", "9", "--repeats", "2")
    figures = bench(tmp_path / "s.json", "switch", str(checkpoint), *options, "--neighbour", "cpu")
    places = {place["name"]: place for place in figures["places"]}
    neighbour = ["neighbour, newly mapped", "neighbour", "neighbour, mapped ahead"]
    assert [*places] == ["resident", "files", "half resident", "host", *neighbour]
    assert {places[name]["moved_bytes"] for name in neighbour} == {places["host"]["moved_bytes"]}
    assert all(len(place["first_token_s"]) == 2 for place in places.values())
    moved = {name: place["moved_bytes"] for name, place in places.items()}
    assert moved["resident"] == 0 < moved["half resident"] < moved["host"] == moved["files"]
    for name in neighbour[1:]:
        assert places[name]["mapped_bytes"] == [moved["host"]] * 2
    assert all(place["floor_s"] > 0 for place in places.values())


@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_a_checkpoint_is_made_of_as_many_layers_as_its_size_asks_for(
    checkpoint: Path, num_layers: int
) -> None:
    layer_bytes = 4 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64)
    rest_bytes = 4 * (2 * 320 * 64 + 64)
    wanted_bytes = rest_bytes + num_layers * layer_bytes
    with made_checkpoint(checkpoint, wanted_bytes + layer_bytes // 3) as folder:
        made = Checkpoint.open(folder)
        assert made.num_bytes == wanted_bytes
        with LLM(folder, memory=MEMORY, device="cpu") as llm:
            assert llm.generate([[1, 2, 3]], use_tqdm=False)[0].finished
    assert not folder.exists()


def test_commands_do_without_the_web_packages() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = sys.modules['uvicorn'] = sys.modules['pydantic'] "
        "= None; import aquifer.cli, aquifer.bench.cli, aquifer.bench.latency, "
        "aquifer.bench.load, aquifer.bench.overhead, aquifer.bench.start, aquifer.llm"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=True)
