"""GPU benchmark of the engine: every figure with a target.

    python benchmarks/gpu/run.py --output results
    python benchmarks/gpu/run.py --output results --models families --parts latency
    python benchmarks/gpu/run.py --output results --models llama-3-8b --tensor-parallel-size 2

The models have random weights. Each engine runs in a separate process and serves as many parts as
possible; a process that fails does not affect the others. Every measurement is a JSON file in the
folder of `--output`, and the final table is made from these files. The parts:

- start: from a new process to the first token, twice;
- latency: decode steps at batch 1 to 256, 512 prompt tokens, 128 output tokens; of the
  models that stand for a family, at batch 1, 32 and 128, of large ones at 1 and 32;
- throughput: 256 requests, 100 to 1024 tokens in and out, temperature 0.6;
- prefill: 64 prompts of 2048 tokens;
- growing: decode steps of 256 growing sequences, compared with all KV mapped beforehand;
- paged: latency again, with the paged cache.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from aquifer.bench import offline
from aquifer.bench.floor import Cost, Rates
from aquifer.bench.latency import compare_growth, measure_steps
from aquifer.bench.result import save
from aquifer.bench.start import measure_start
from aquifer.bench.workload import LengthRange, Workload
from aquifer.llm import LLM

DEVICE = "cuda:0"
MODELS_FOLDER = Path(__file__).resolve().parent / "models"
MODELS = ("qwen3-0.6b", "llama-3-8b")
HYBRIDS = ("falcon-h1-7b", "jamba-26b", "qwen3-next-40b")
"""Models with recurrent state: attention beside Mamba-2 in each layer; Mamba with few layers of
attention, and experts; the gated delta rule, and many experts."""

LARGE = ("llama-3-70b",)
"""Models for several devices: `--tensor-parallel-size 2`."""

FAMILIES = (
    "gemma-2-2b",
    "gemma-3-12b",
    "phi-3-mini",
    "opt-13b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "deepseek-v2-lite",
    "minitron-4b",
)
"""Models that stand for their families, of which decode steps have targets; the last one for those
that the Transformers backend serves."""

PARTS = ("start", "latency", "throughput", "prefill", "growing", "paged")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 128, 256)
TARGET_BATCH_SIZES = (1, 32, 128, 256)
FAMILY_BATCH_SIZES = TARGET_BATCH_SIZES[:3]
LARGE_BATCH_SIZES = TARGET_BATCH_SIZES[:2]
PROMPT, OUTPUT = LengthRange(512, 512), LengthRange(128, 128)
MIXED = LengthRange(100, 1024)
SEED = 0

FIGURES = (*(f"step {size}" for size in TARGET_BATCH_SIZES), "throughput", "prefill", "start")
"""Figures with a target: milliseconds per step, tokens per second, seconds."""

TARGETS: dict[str, dict[str, float]] = {
    model: dict(zip(FIGURES, values, strict=False))
    for model, values in {
        "qwen3-0.6b": (0.75, 1.6, 3.3, 5.6, 30_000, 430_000, 3),
        "llama-3-8b": (4.2, 5.1, 7.5, 12.1, 11_000, 43_000, 5),
        "gemma-2-2b": (1.8, 2.8, 5.5),
        "falcon-h1-7b": (4.2, 6.0, 10.0, 16.0, 9000, 43_000, 8),
        "minitron-4b": (6.0,),  # 2.5 times the floor, which is 1.6 ms on an H200, and 2 ms
    }.items()
}

TARGETS["llama-3-8b-tp2"] = {"step 1": 2.6, "step 32": 3.4, "step 256": 7.6}
TARGETS["llama-3-70b-tp2"] = {"step 1": 19.5, "step 32": 21.5, "start": 15}
"""Targets on two H200s."""

TIMES_FLOOR = {
    "gemma-3-12b": 1.3,
    "phi-3-mini": 1.3,
    "opt-13b": 1.3,
    "qwen3-30b-a3b": 1.6,
    "gpt-oss-20b": 1.6,
    "deepseek-v2-lite": 1.6,
}
"""Targets for decode steps, as multiples of their floors."""

VLLM: dict[str, dict[str, float]] = {
    model: dict(zip(FIGURES, values, strict=False))
    for model, values in {
        "qwen3-0.6b": (1.60, 2.17, 4.21, 6.96, 23_800, 413_000, 44),
        "llama-3-8b": (4.99, 5.86, 8.69, 13.71, 9_800, 42_900, 44),
        "gemma-2-2b": (2.48, 2.93, 6.34),
        "falcon-h1-7b": (4.84, 12.0, 20.1, 34.8, 5240, 38_500, 188),
    }.items()
}
"""vLLM 0.24.0 with random weights, bf16, no prefix caching: measured on the same chip (an H200),
but not in the same run. Its start is the engine's, after 15 s of imports and without a token;
44 to 117 s were seen for the smaller model. Targets are for the `virtual` cache."""

MOST_GROWTH = 1.03
"""Target: ratio of the 99th percentile of step times, growing batch / everything mapped before."""

LIMIT_S = 300
"""Timeout of a process: its stack traces are printed, and it is killed."""


class Bench:
    """One engine and its measurements.

    Args:
        model: one of `MODELS`, `HYBRIDS`, `LARGE` or `FAMILIES`.
        kv_cache: "virtual" or "paged".
        output: folder of the results.
        repeats: timed runs of each measurement.
        size: number of devices that the model is split over.
    """

    def __init__(self, model: str, kv_cache: str, output: Path, repeats: int, size: int) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._output = output
        self._size = size
        self._repeats = repeats
        # Measured before the engine allocates the memory.
        self._rates = Rates.measure(torch.device(DEVICE), torch.bfloat16)
        self._llm = LLM(
            MODELS_FOLDER / model,
            device=DEVICE,
            tensor_parallel_size=size,
            load_format="dummy",
            kv_cache=kv_cache,
            enable_prefix_caching=False,  # repeats have the same prompts
            seed=SEED,
        )
        self._cost = Cost.of(self._llm)

    def run(self, part: str) -> None:
        """Measure one part, or print why that failed."""
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "latency": self._latency,
            "throughput": self._throughput,
            "prefill": self._prefill,
            "growing": self._growing,
        }
        start = time.perf_counter()
        # After a failure the next part may still work, and time on the machine is limited.
        try:
            figures = parts[part]()
        except Exception:
            traceback.print_exc()
            print(f"FAILED: {self._model} {self._kv_cache} {part}", flush=True)
            return
        (info,) = self._llm.engine.models.values()
        save(
            result_file(self._output, name_of(self._model, self._size), part, self._kv_cache),
            {
                "benchmark": part,
                "model": self._model,
                "tensor_parallel_size": self._size,
                "device": torch.cuda.get_device_name(DEVICE),
                "num_parameters": info.num_parameters,
                "dtype": info.dtype,
                "kv_cache": self._kv_cache,
                "max_num_batched_tokens": self._llm.engine.config.max_num_batched_tokens,
                "pool_bytes": self._llm.engine.pool.budget_bytes,
                "seed": SEED,
                "read_bandwidth": self._rates.bytes_per_s,
                "matmul_rate": self._rates.operations_per_s,
                **figures,
            },
        )
        seconds = time.perf_counter() - start
        print(f"{self._model} {self._kv_cache} {part}: done in {seconds:.1f} s", flush=True)

    def close(self) -> None:
        """Close the engine."""
        self._llm.close()

    def _latency(self) -> dict[str, Any]:
        batches = []
        sizes = dict.fromkeys(FAMILIES, FAMILY_BATCH_SIZES) | dict.fromkeys(
            LARGE, LARGE_BATCH_SIZES
        )
        for size in sizes.get(self._model, BATCH_SIZES):
            times = measure_steps(self._llm, self._workload(size, PROMPT, OUTPUT), self._repeats)
            batches.append(times.figures(self._cost, self._rates))
            print(f"  batch {size}: {_round(times.step_ms)} ms a step", flush=True)
        return {"batches": batches}

    def _throughput(self) -> dict[str, Any]:
        workload = self._workload(256, MIXED, MIXED)
        ours, _ = offline.compare(self._llm, workload, self._repeats, temperature=0.6)
        stats = self._llm.engine.stats()
        return {
            **offline.figures(workload, ours, None, self._cost, self._rates),
            "temperature": 0.6,
            "num_preemptions": sum(stats.num_preemptions.values()),  # since the start
        }

    def _prefill(self) -> dict[str, Any]:
        workload = self._workload(64, LengthRange(2048, 2048), LengthRange(1, 1))
        ours, _ = offline.compare(self._llm, workload, self._repeats)
        return offline.prefill_figures(workload, ours, self._cost, self._rates)

    def _growing(self) -> dict[str, Any]:
        workload = self._workload(256, PROMPT, OUTPUT)
        # A 99th percentile needs more steps.
        growing, mapped = compare_growth(self._llm, workload, self._repeats + 1)
        return {
            "growing": growing.figures(self._cost, self._rates),
            "mapped": mapped.figures(self._cost, self._rates),
            "p99_ratio": growing.step_ms["p99"] / mapped.step_ms["p99"],
            "median_ratio": growing.step_ms["median"] / mapped.step_ms["median"],
        }

    def _workload(self, count: int, inputs: LengthRange, outputs: LengthRange) -> Workload:
        (info,) = self._llm.engine.models.values()
        return Workload.random(count, inputs, outputs, info.vocab_size, SEED)


def measure_engine(
    model: str, kv_cache: str, parts: list[str], output: Path, repeats: int, size: int
) -> None:
    """Run all parts of one engine; the main function of its process."""
    faulthandler.dump_traceback_later(LIMIT_S - 5)
    bench = Bench(model, kv_cache, output, repeats, size)
    for part in parts:
        bench.run(part)
    bench.close()


def run_process(*arguments: Any) -> None:
    """Run `measure_engine` in a separate process; print a failure."""
    process = multiprocessing.get_context("spawn").Process(target=measure_engine, args=arguments)
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    if process.exitcode:
        print(f"FAILED: {arguments[:3]} ended with {process.exitcode}", flush=True)


def run_start(model: str, output: Path, size: int) -> None:
    """Measure the start of one model twice; the second reuses the first one's kernels."""
    options = {"device": DEVICE, "load_format": "dummy", "tensor_parallel_size": size}
    try:
        starts = [measure_start(str(MODELS_FOLDER / model), options) for _ in range(2)]
    except Exception:  # as with the other parts
        traceback.print_exc()
        print(f"FAILED: {model} start", flush=True)
        return
    figures = {
        "benchmark": "start",
        "model": model,
        **options,
        "starts": [asdict(times) for times in starts],
    }
    save(result_file(output, name_of(model, size), "start"), figures)


def name_of(model: str, size: int) -> str:
    """Return the name of a model in files and in `TARGETS`, with the number of its devices."""
    return model if size == 1 else f"{model}-tp{size}"


def result_file(output: Path, model: str, part: str, kv_cache: str = "virtual") -> Path:
    """Return the file of a measurement."""
    return output / f"{model}-{part}{'' if part == 'start' else f'-{kv_cache}'}.json"


def _round(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def read(file: Path) -> dict[str, Any]:
    """Read a result; empty if there is no file."""
    figures: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return figures


def rows(model: str, output: Path) -> Iterator[tuple[str, str, float, float | None, str]]:
    """Yield (description, key in `TARGETS`, ours, floor, remark) of all results of a model."""
    for kv_cache in ("virtual", "paged"):
        for batch in read(result_file(output, model, "latency", kv_cache)).get("batches", ()):
            size, step_ms = batch["num_prompts"], batch["aquifer"]["step_ms"]
            yield (
                f"decode step, batch {size}, {kv_cache}, ms",
                f"step {size}",
                step_ms["median"],
                batch["floor_ms_per_token"],
                f"mean {step_ms['mean']:.3f}, p99 {step_ms['p99']:.3f}, floor is "
                f"{1 / batch['times_floor']:.0%} of it",
            )
    for part, unit in (("throughput", "output_throughput"), ("prefill", "prompt_throughput")):
        figures = read(result_file(output, model, part))
        if figures:
            ours, floor = figures["aquifer"][unit], figures[f"floor_{unit}"]
            yield f"{part}, tokens/s", part, ours, floor, f"{ours / floor:.0%} of the floor's rate"
    for number, times in enumerate(read(result_file(output, model, "start")).get("starts", ()), 1):
        seconds = times["construct_s"] + times["first_token_s"]
        remark = (
            f"engine {times['construct_s']:.1f}, first token {times['first_token_s']:.1f}, after "
            f"{times['import_s']:.1f} for imports; {times['num_compiled']} kernels compiled"
        )
        yield f"start {number}, after imports, s", "start", seconds, None, remark


def verdict(key: str, ours: float, target: float | None) -> str:
    """Whether a figure meets its target, if it has one."""
    if target is None:
        return ""
    is_met = ours >= target if key in ("throughput", "prefill") else ours <= target
    return "ok" if is_met else "MISSED"


def summary(models: list[str], output: Path) -> Table:
    """Return the table of all results beside targets and vLLM."""
    table = Table(title="results", title_justify="left")
    for column in ("", "ours", "target", "vLLM 0.24.0", "floor", "", ""):
        table.add_column(column, justify="right" if column else "left")
    for model in models:
        table.add_row(f"[bold]{model}[/bold]")
        for what, key, ours, floor, remark in rows(model, output):
            target = TARGETS.get(model, {}).get(key)
            if target is None and floor is not None and model in TIMES_FLOOR:
                target = TIMES_FLOOR[model] * floor
            table.add_row(
                what,
                *(
                    "" if value is None else f"{round(value, 3):,.6g}"
                    for value in (ours, target, VLLM.get(model, {}).get(key))
                ),
                "" if floor is None else f"{floor:,.0f}" if floor > 1000 else f"{floor:.3f}",
                verdict(key, ours, None if "paged" in what else target),
                remark,
            )
        growth = read(result_file(output, model, "growing"))
        if growth:
            table.add_row(
                "growing batch of 256, p99 / p99 with all mapped",
                f"{growth['p99_ratio']:.3f}",
                f"{MOST_GROWTH}",
                *("", ""),
                "ok" if growth["p99_ratio"] <= MOST_GROWTH else "MISSED",
                f"median {growth['median_ratio']:.3f}",
            )
    return table


def main() -> None:
    """Measure the requested parts, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument(
        "--models", default=",".join(MODELS), help="names, or `families` for those of all families"
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices of a model")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each measurement")
    arguments = parser.parse_args()
    models, parts = arguments.models.split(","), arguments.parts.split(",")
    if models == ["families"]:
        models = [*FAMILIES]
    known = MODELS + HYBRIDS + LARGE + FAMILIES
    if not {*models} <= {*known} or not {*parts} <= {*PARTS}:
        parser.error(f"models are {', '.join(known)}; parts are {', '.join(PARTS)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    size = arguments.tensor_parallel_size
    begun = time.perf_counter()
    for model in models:
        virtual = [part for part in parts if part not in ("start", "paged")]
        # Remove results of earlier runs, so that none appears in place of a failed part.
        for part in parts:
            as_stored = ("latency", "paged") if part == "paged" else (part,)
            result_file(arguments.output, name_of(model, size), *as_stored).unlink(missing_ok=True)
        if "start" in parts:
            run_start(model, arguments.output, size)
        rest = arguments.output, arguments.repeats, size
        if virtual:
            run_process(model, "virtual", virtual, *rest)
        if "paged" in parts:
            run_process(model, "paged", ["latency"], *rest)
    names = [name_of(model, size) for model in models]
    Console(width=170).print(summary(names, arguments.output))
    print(f"total time {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
