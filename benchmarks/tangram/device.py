"""Eight models in one pool on a GPU: loading and time to first token, against whole models.

    python benchmarks/tangram/device.py --data FOLDER [--requests 60] [--output FOLDER]

The models have random weights, and host memory has a copy of all of them. Requests come one after
the other, in the order of Tangram's levels of locality; FOLDER has their lengths. The modes:

- tensor: as the engine serves them;
- whole: only one model is on the device, and all of it; it is evicted when another one is wanted;
- whole, not kept: likewise, and it is evicted when its request has ended.

It writes `device-locality.json`, `device-decode.json` (each model by itself), `device-process.json`
(a fresh process for each model, whose weights are in files that the system has in memory: the
paper's SLLM) and `device.png`; README.md compares them with the paper's figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib as mpl
import numpy as np
from benchmarks.tangram.checkpoints import CONFIGS, write_folders
from benchmarks.tangram.mixes import lengths

from aquifer.bench.latency import compare_growth
from aquifer.bench.load import made_checkpoint
from aquifer.bench.result import save, summarize
from aquifer.bench.start import measure_start
from aquifer.bench.switch import copy_rate
from aquifer.bench.workload import LengthRange, Workload
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import InvariantError
from aquifer.garbage import old_objects_left_out
from aquifer.llm import LLM
from aquifer.memory.owners import Kind, Owner
from aquifer.models import plan_model
from aquifer.sim.locality import LOCALITIES, LocalityWorkload
from aquifer.sim.trace import TraceRequest
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.parameters import Placement

mpl.use("Agg")

from matplotlib import pyplot as plt

_HERE = Path(__file__).resolve().parent

POOL_FACTOR = 1.3
"""Bytes of all models by those of the pool."""

BATCHES = (1, 16)
MODES = ("tensor", "whole", "whole, not kept")

_HOST_SLACK_BYTES = 4 << 30
_MOST_OUTPUT_TOKENS = 16
_MOST_PROMPT_TOKENS = 1024
_DECODE_BATCH = 8
_DECODE_TOKENS = 192
_REPEATS = 8  # of a request for a resident model; the first one does not count
_PAGE_BYTES = 2 << 20
_PAUSE_S = 0.01
_SEED = 0


@dataclass(frozen=True, slots=True)
class Served:
    """A batch of requests for one model that arrive together.

    Args:
        model: its name.
        resident_bytes: of its weights when they arrived.
        loading_s: time of the load; 0 if all weights were there.
        first_token_s: from their arrival to the first token of the last one.
        seconds: from their arrival to the last token.
        kv_bytes: of the pool that KV had in the end.
    """

    model: str
    resident_bytes: int
    loading_s: float
    first_token_s: float
    seconds: float
    kv_bytes: int


class Player:
    """Plays requests, one batch after the other.

    Args:
        engine: with all models.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = np.random.default_rng(_SEED)
        self._numbers = count()

    def wait_until_saved(self) -> None:
        """Until host memory has the weights of all models.

        Raises:
            InvariantError: it does not get them.
        """
        for name in self._engine.models:
            self._engine.load_model(name)
            while self._engine.statuses[name].is_saving:
                time.sleep(_PAUSE_S)
            status = self._engine.statuses[name]
            if status.host_bytes < status.weight_bytes:
                raise InvariantError(f"host memory lacks weights of {name}")

    def play(self, batches: Sequence[Sequence[TraceRequest]], mode: str) -> list[Served]:
        """Play batches of requests, each for one model."""
        served = []
        for batch in batches:
            model = batch[0].model
            assert model is not None
            served.append(self._serve(model, batch, mode))
            if mode == "whole, not kept":
                self._engine.unload_model(model)
        return served

    def first_token_s(self, model: str) -> float:
        """Time to the first token of a request for a model that is resident."""
        request = TraceRequest(0.0, _MOST_PROMPT_TOKENS // 2, 1, model=model)
        return self._serve(model, [request], "tensor").first_token_s

    def _serve(self, model: str, batch: Sequence[TraceRequest], mode: str) -> Served:
        engine = self._engine
        vocab_size = engine.models[model].vocab_size
        requests = [
            Request(
                str(next(self._numbers)),
                model,
                self._random.integers(vocab_size, size=each.prompt_tokens).tolist(),
                SamplingParams(temperature=0, max_tokens=each.output_tokens, ignore_eos=True),
                time.monotonic(),
            )
            for each in batch
        ]
        resident_bytes = engine.statuses[model].resident_bytes
        start_s = time.perf_counter()
        if mode != "tensor":
            for name, status in engine.statuses.items():
                if name != model and status.resident_bytes:
                    engine.unload_model(name)
        loaded_s = engine.statuses[model].loading_s
        for request in requests:
            engine.add(request)
        waiting = {request.request_id for request in requests}
        first_token_s, kv_bytes = 0.0, 0
        while engine.has_work:
            outputs: list[TokenOutput] = engine.step()
            now_s = time.perf_counter() - start_s
            for output in outputs:
                if output.error is not None:
                    raise InvariantError(f"a request failed: {output.error}")
                if output.request_id in waiting:
                    waiting.remove(output.request_id)
                    first_token_s = now_s
            kv_bytes = max(kv_bytes, _kv_bytes(engine, model))
        loading_s = engine.statuses[model].loading_s - loaded_s
        return Served(model, resident_bytes, loading_s, first_token_s, now_s, kv_bytes)


def _kv_bytes(engine: Engine, model: str) -> int:
    return engine.pool.usage().in_use_bytes.get(Owner(model, Kind.KV), 0)


def trace(
    of: Sequence[TraceRequest], models: Sequence[str], level: str, num_batches: int, size: int
) -> list[list[TraceRequest]]:
    """Batches of requests at a level of locality, with their lengths cut."""
    short = [
        TraceRequest(
            0.0,
            min(each.prompt_tokens, _MOST_PROMPT_TOKENS),
            min(each.output_tokens, _MOST_OUTPUT_TOKENS),
        )
        for each in of
    ]
    workload = LocalityWorkload(tuple(models), short, 1.0, num_batches, batch_size=size)
    requests = workload.requests(LOCALITIES[level])
    return [requests[index : index + size] for index in range(0, len(requests), size)]


def figures(served: Sequence[Served], weight_bytes: Mapping[str, int]) -> dict[str, Any]:
    """All figures of a run. Loading is divided by all batches, loaded for or not."""
    loads = [each for each in served if each.loading_s]
    moved = [weight_bytes[each.model] - each.resident_bytes for each in loads]
    loading_s = sum(each.loading_s for each in loads)
    return {
        "loads": len(loads),
        "loading_ms": 1e3 * loading_s / len(served),
        "moved_gb": sum(moved) / 1e9,
        "moved_gb_per_s": sum(moved) / 1e9 / loading_s if loads else None,
        "resident_share": float(
            np.mean([each.resident_bytes / weight_bytes[each.model] for each in served])
        ),
        "ttft_ms": {
            name: 1e3 * value
            for name, value in summarize([each.first_token_s for each in served]).items()
        },
        "ttft_ms_by_model": {
            model: 1e3
            * float(np.mean([each.first_token_s for each in served if each.model == model]))
            for model in weight_bytes
            if any(each.model == model for each in served)
        },
        "kv_mb": max(each.kv_bytes for each in served) / 1e6,
        "served": [asdict(each) for each in served],
    }


def by_locality(
    engine: Engine, of: Sequence[TraceRequest], num_batches: int, content: dict[str, Any]
) -> None:
    """Loading and TTFT by batch size, level and mode; in `content`, as far as it gets."""
    player = Player(engine)
    start_s = time.perf_counter()
    player.wait_until_saved()
    print(f"saved: {time.perf_counter() - start_s:.1f} s", flush=True)
    weight_bytes = {name: info.weight_bytes for name, info in engine.models.items()}
    content["weight_bytes"] = weight_bytes
    for size in BATCHES:
        found = content.setdefault("locality", {}).setdefault(str(size), {})
        for level in LOCALITIES:
            batches = trace(of, list(weight_bytes), level, num_batches, size)
            row = found[level] = {}
            for mode in MODES if size == BATCHES[0] else MODES[:2]:
                player.play(batches[-len(weight_bytes) :], mode)  # what an earlier mode left goes
                row[mode] = figures(player.play(batches, mode), weight_bytes)
            shown = {mode: round(each["loading_ms"], 1) for mode, each in row.items()}
            print(f"batch {size} {level}: loading, ms: {shown}", flush=True)
    content["resident_ms"] = {}
    for name in weight_bytes:
        engine.load_model(name)
        seconds = [player.first_token_s(name) for _ in range(_REPEATS)][1:]
        content["resident_ms"][name] = 1e3 * float(np.median(seconds))


def alone(folder: Path, device: str) -> dict[str, Any]:
    """A model in an engine of its own: TTFT, and decoding with KV on demand or reserved."""
    with LLM(
        folder,
        device=device,
        load_format="dummy",
        max_num_seqs=_DECODE_BATCH,
        enable_prefix_caching=False,
        seed=_SEED,
    ) as llm:
        (name,) = llm.engine.models
        player = Player(llm.engine)
        seconds = [player.first_token_s(name) for _ in range(_REPEATS)][1:]
        sizes = (LengthRange(512, 512), LengthRange(_DECODE_TOKENS, _DECODE_TOKENS))
        vocab_size = llm.engine.models[name].vocab_size
        workload = Workload.random(_DECODE_BATCH, *sizes, vocab_size, _SEED)
        growing, reserved = compare_growth(llm, workload, 3)
        return {
            "resident_ms": 1e3 * float(np.median(seconds)),
            "on_demand_ms": growing.step_ms,
            "reserved_ms": reserved.step_ms,
            "on_demand_tokens_per_s": 1e3 * _DECODE_BATCH / growing.step_ms["mean"],
            "reserved_tokens_per_s": 1e3 * _DECODE_BATCH / reserved.step_ms["mean"],
        }


def weight_bytes_of(folder: Path) -> int:
    """Bytes of the pages of a model's weights."""
    parameters = plan_model(Checkpoint.without_tensors(folder), None).parameters
    return Placement.plan(parameters, _PAGE_BYTES).num_bytes


def measure_locality(
    folders: Mapping[str, Path],
    of: Sequence[TraceRequest],
    num_batches: int,
    device: str,
    content: dict[str, Any],
) -> None:
    """All models in one pool; in `content`, as far as it gets."""
    specs = tuple(ModelSpec(name, folder) for name, folder in folders.items())
    sizes = {spec.name: weight_bytes_of(spec.path) for spec in specs}
    memory_bytes = int(sum(sizes.values()) / POOL_FACTOR)
    config = EngineConfig(
        specs,
        device=device,
        load_format="dummy",
        memory_bytes=memory_bytes,
        host_cache_bytes=sum(sizes.values()) + _HOST_SLACK_BYTES,
        max_num_seqs=BATCHES[-1],
        enable_prefix_caching=False,
        seed=_SEED,
    )
    start_s = time.perf_counter()
    engine = Engine.open(config)
    content |= {"memory_bytes": memory_bytes, "start_s": time.perf_counter() - start_s}
    print(f"start: {content['start_s']:.1f} s", flush=True)
    try:
        content["overhead_bytes"] = engine.pool.usage().overhead_bytes
        content["copy_bytes_per_s"] = copy_rate(engine.pool.driver.device)
        with old_objects_left_out():  # as in a server
            by_locality(engine, of, num_batches, content)
    finally:
        engine.close()


def measure_alone(folders: Mapping[str, Path], device: str, content: dict[str, Any]) -> None:
    """Each model by itself; in `content`, as far as it gets."""
    content["alone"] = {}
    for name, folder in folders.items():
        content["alone"][name] = alone(folder, device)
        print(f"{name}: {content['alone'][name]}", flush=True)


def measure_processes(folders: Mapping[str, Path], device: str, content: dict[str, Any]) -> None:
    """A fresh process for each model, until its first token; in `content`, as far as it gets.

    Each is started twice: the second time its kernels are compiled.
    """
    content["process"] = {}
    options = {"device": device, "max_num_seqs": BATCHES[-1], "enable_prefix_caching": False}
    for name, folder in folders.items():
        num_bytes = weight_bytes_of(folder)
        with made_checkpoint(folder, num_bytes) as made:
            starts = [asdict(measure_start(str(made), options)) for _ in range(2)]
        content["process"][name] = {"weight_bytes": num_bytes, "starts": starts}
        print(f"{name}: {starts[-1]}", flush=True)


def draw(content: Mapping[str, Any], file: Path) -> None:
    """Draw loading by locality, TTFT by model, and decoding by model."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    runs = [(size, mode) for size in content["locality"] for mode in MODES]
    runs = [(size, mode) for size, mode in runs if mode in content["locality"][size]["L1"]]
    for index, (size, mode) in enumerate(runs):
        heights = [content["locality"][size][level][mode]["loading_ms"] for level in LOCALITIES]
        place = np.arange(len(LOCALITIES)) + 0.16 * (index - len(runs) / 2)
        axes[0].bar(place, heights, 0.16, label=f"{mode}, batch {size}")
    axes[0].set_xticks(range(len(LOCALITIES)), list(LOCALITIES))
    axes[0].set_title("loading, ms a batch", fontsize=10)
    models = list(content["weight_bytes"])
    row = content["locality"]["1"]["L3"]
    for index, mode in enumerate(MODES):
        heights = [row[mode]["ttft_ms_by_model"].get(model, 0.0) for model in models]
        axes[1].bar(np.arange(len(models)) + 0.25 * (index - 1), heights, 0.25, label=mode)
    axes[1].set_title("mean TTFT at L3, ms", fontsize=10)
    for index, name in enumerate(("on_demand", "reserved")):
        heights = [content["alone"][model][f"{name}_tokens_per_s"] for model in models]
        label = f"KV {name.replace('_', ' ')}"
        axes[2].bar(np.arange(len(models)) + 0.4 * (index - 0.5), heights, 0.4, label=label)
    axes[2].set_title(f"decoding, tokens/s, {_DECODE_BATCH} sequences", fontsize=10)
    for axis in axes[1:]:
        axis.set_xticks(range(len(models)), models, rotation=40, ha="right", fontsize=8)
    for axis in axes:
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    plt.close(figure)


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the lengths")
    parser.add_argument("--requests", type=int, default=60, help="batches of each run")
    parser.add_argument("--parts", default="locality,decode,process")
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=_HERE, help="folder of the results")
    arguments = parser.parse_args()
    parts, names = arguments.parts.split(","), arguments.models.split(",")
    of = lengths(arguments.data)
    locality: dict[str, Any] = {"requests": arguments.requests, "pool_factor": POOL_FACTOR}
    decode: dict[str, Any] = {}
    process: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        folders = write_folders(Path(folder), {name: CONFIGS[name] for name in names})
        try:
            if "locality" in parts:
                measure_locality(folders, of, arguments.requests, arguments.device, locality)
            if "decode" in parts:
                measure_alone(folders, arguments.device, decode)
            if "process" in parts:
                measure_processes(folders, arguments.device, process)
        finally:  # what was measured before a failure is kept
            found = {"locality": locality, "decode": decode, "process": process}
            for part in parts:
                save(arguments.output / f"device-{part}.json", found[part])
    if {"locality", "decode"} <= {*parts}:
        draw(locality | decode, arguments.output / "device.png")


if __name__ == "__main__":
    main()
