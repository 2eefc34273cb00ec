"""Attention of long sequences: chunks of prompts after a prefix, and decode steps of few rows.

Shapes are those of Llama-3-8B: 32 query heads over 8 KV heads of 128, bfloat16, token-major KV of
32 layers. Calls alternate over the layers.

    python benchmarks/gpu/long_context.py --output FOLDER [--parts check,chunks,decode]

Each part runs in a process of its own and writes FOLDER/PART.json. A part that fails prints its
traceback, and the others go on.

- check: all paths against the reference in float32 (with `--device cpu`, in float64).
- chunks: TFLOP/s of chunks after prefixes as the engine computes them, and in our kernel in Triton;
  from these, the attention of one prompt of 131 000 tokens.
- decode: configs of decode attention for one to four rows, in percent of the copy rate; the best
  for each shape, and the best of those that are not slower than the default for few tokens.

`--device cpu` runs `check`, `chunks` and `decode` with small sizes, to show that they run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aquifer.bench.floor import device_copy_bandwidth, read_bandwidth
from aquifer.bench.result import save
from aquifer.bench.timing import replay_seconds
from aquifer.kernels import compiled_together
from aquifer.kernels.decode_attention import (
    Config,
    Workspace,
    decode_attention,
    decode_attention_reference,
    default_config,
)
from aquifer.kernels.prefill_attention import (
    PrefillSpans,
    prefill_attention,
    prefill_attention_reference,
    prefill_attention_triton,
)
from aquifer.kernels.prefill_attention import default_config as default_prefill_config

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
MAX_ERROR = 1e-2  # relative, of a row
PAUSE_CYCLES = 40_000_000  # about 20 ms, in which the host queues what is measured
PROMPT_TOKENS = 131_000
CHUNK_TOKENS = 8192
ON_CPU = ("check", "chunks", "decode")
LIMIT_S = 180  # of a part

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a device.

    Args:
        num_layers: layers that the token-major KV has.
        max_tokens: tokens of the longest sequence.
        chunks: (start, count) to measure.
        checks: (start, count) to compare with the reference.
        rows: (rows, tokens of each) that decode.
        repeats: measurements of each.
    """

    num_layers: int
    max_tokens: int
    chunks: tuple[tuple[int, int], ...]
    checks: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int, int], ...]
    repeats: int


GPU = Sizes(
    num_layers=32,
    max_tokens=131_072,
    chunks=(
        (6144, 2048),
        (8192, 8192),
        (32_768, 8192),
        (65_536, 8192),
        (114_688, 8192),
        (122_880, 8120),
        (5000, 2048),
        (15_872, 512),
        (10_000, 1000),
        (0, 8192),
    ),
    checks=(
        (6144, 2048),
        (5000, 2048),
        (10_000, 1000),
        (15_872, 512),
        (57_344, 8192),
        (122_880, 8120),
    ),
    rows=((1, 512), (4, 576), (1, 8192), (4, 8192), (1, 32_768), (1, 131_000)),
    repeats=5,
)
CPU = Sizes(
    num_layers=2,
    max_tokens=4096,
    chunks=((256, 64), (2048, 16)),
    checks=((2048, 2000), (100, 30)),
    rows=((1, 64), (4, 72), (1, 1000)),
    repeats=2,
)


class KV:
    """Random token-major KV of all layers, [tokens, layers, K and V, kv_heads, dim], in one piece.

    Args:
        sizes: layers and tokens.
        device: where it is.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        self.dtype = DTYPE if device.type == "cuda" else torch.float32
        shape = (sizes.max_tokens, sizes.num_layers, 2, NUM_KV_HEADS, HEAD_DIM)
        self.flat = torch.empty(shape, dtype=self.dtype, device=device)
        for part in self.flat.split(8192):
            part.normal_()

    def layer(self, call: int, num_slots: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [slots, tokens, kv_heads, dim]."""
        kv = self.flat.unflatten(0, (num_slots, -1))[:, :, call % self.sizes.num_layers]
        keys, values = kv.unbind(2)
        return keys, values

    def queries(self, count: int) -> torch.Tensor:
        """Random queries, [count, heads, dim]."""
        return torch.randn(count, NUM_HEADS, HEAD_DIM, dtype=self.dtype, device=self.device)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def flops(start: int, count: int) -> float:
    """Operations of one layer's causal attention of a chunk."""
    return 4.0 * NUM_HEADS * HEAD_DIM * count * (start + (count + 1) / 2)


def seconds_of(kv: KV, run: Callable[[int], object], num_calls: int) -> tuple[float, float]:
    """Median seconds of a call on the device, and on the host."""
    run(0)
    device_s, host_s = [], []
    for _ in range(kv.sizes.repeats):
        kv.wait()
        if kv.device.type != "cuda":
            begun_s = time.perf_counter()
            run(0)
            device_s.append(time.perf_counter() - begun_s)
            host_s.append(device_s[-1])
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE_CYCLES)
        begin.record()
        begun_s = time.perf_counter()
        for call in range(num_calls):
            run(call)
        host_s.append((time.perf_counter() - begun_s) / num_calls)
        end.record()
        torch.cuda.synchronize()
        device_s.append(begin.elapsed_time(end) / 1e3 / num_calls)
    return statistics.median(device_s), statistics.median(host_s)


# --- check -----------------------------------------------------------------------------------


def check(kv: KV) -> Figures:
    """The largest relative error of some rows of each chunk, and of decode steps."""
    found: Figures = {"chunks": [], "decode": []}
    call = kv.sizes.num_layers - 1
    keys, values = kv.layer(call)
    exact = torch.float32 if kv.device.type == "cuda" else torch.float64
    for start, count in kv.sizes.checks:
        query = kv.queries(count)
        spans = PrefillSpans.of([0], [start], [0, count], kv.device)
        out = torch.full_like(query, torch.nan)
        prefill_attention(query, keys, values, None, spans, out, scale=SCALE)
        assert out.isfinite().all(), "rows were left out"
        rows = sorted({0, 1, count // 3, count // 2, count - 2, count - 1})
        some = PrefillSpans.of(
            [0] * len(rows), [start + row for row in rows], [*range(len(rows) + 1)], kv.device
        )
        expected = query[rows].to(exact)
        prefill_attention_reference(
            query[rows].to(exact), keys, values, None, some, expected, scale=SCALE
        )
        error = largest_error(out[rows], expected)
        print(f"check {count} after {start}: error {error:.1e}")
        found["chunks"].append({"start": start, "count": count, "relative_error": error})
    for rows_of_step, tokens in kv.sizes.rows:
        step = Step(kv, rows_of_step, tokens)
        error = step.check(step.default)
        print(f"check {rows_of_step} x {tokens}: error {error:.1e}")
        found["decode"].append({"rows": rows_of_step, "tokens": tokens, "error": error})
    return found


def largest_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row; too large a one is an error."""
    errors = (out.to(expected.dtype) - expected).flatten(1).norm(dim=1)
    error = float((errors / expected.flatten(1).norm(dim=1)).max())
    assert error < MAX_ERROR, f"relative error {error:.2e}"
    return error


# --- chunks ----------------------------------------------------------------------------------


def chunks(kv: KV) -> Figures:
    """Chunks as the engine computes them, and in our kernel in Triton."""
    found = []
    config = default_prefill_config(HEAD_DIM, HEAD_DIM, kv.dtype, paged=False)
    for start, count in kv.sizes.chunks:
        query = kv.queries(count)
        out = torch.empty_like(query)
        spans = PrefillSpans.of([0], [start], [0, count], kv.device)

        def ours(
            call: int,
            query: torch.Tensor = query,
            out: torch.Tensor = out,
            spans: PrefillSpans = spans,
        ) -> None:
            prefill_attention(query, *kv.layer(call), None, spans, out, scale=SCALE)

        def triton(
            call: int,
            query: torch.Tensor = query,
            out: torch.Tensor = out,
            spans: PrefillSpans = spans,
        ) -> None:
            kv_of = kv.layer(call)
            prefill_attention_triton(query, *kv_of, None, spans, out, config=config, scale=SCALE)

        ways: dict[str, Callable[[int], None]] = {"engine": ours}
        if kv.device.type == "cuda":
            ways["triton"] = triton
        num_calls = max(1, min(16, int(0.02 * 4e14 / flops(start, count))))
        for way, run in ways.items():
            layer_s, host_s = seconds_of(kv, run, num_calls)
            rate = flops(start, count) / layer_s / 1e12
            print(
                f"{count:5} after {start:6}, {way:10}: {layer_s * 1e6:8.1f} us, {rate:4.0f} "
                f"TFLOP/s, host {host_s * 1e6:.0f} us",
                flush=True,
            )
            found.append(
                {
                    "start": start,
                    "count": count,
                    "way": way,
                    "layer_s": layer_s,
                    "host_s": host_s,
                    "tflop_per_s": rate,
                }
            )
    return {"chunks": found, **whole_prompt(found)}


def whole_prompt(found: list[Figures]) -> Figures:
    """Attention of one prompt of 131 000 tokens: chunks between those measured are interpolated."""
    times = sorted(
        (each["start"], each["layer_s"] / flops(each["start"], each["count"]))
        for each in found
        if each["way"] == "engine" and each["count"] > CHUNK_TOKENS // 2
    )
    if not times:
        return {}
    total_s = 0.0
    for start in range(0, PROMPT_TOKENS, CHUNK_TOKENS):
        count = min(CHUNK_TOKENS, PROMPT_TOKENS - start)
        (low, low_s), (high, high_s) = (
            max((each for each in times if each[0] <= start), default=times[0]),
            min((each for each in times if each[0] >= start), default=times[-1]),
        )
        part = (start - low) / (high - low) if high > low else 0.0
        total_s += GPU.num_layers * flops(start, count) * (low_s + part * (high_s - low_s))
    print(f"attention of {PROMPT_TOKENS} tokens in chunks of {CHUNK_TOKENS}: {total_s:.2f} s")
    return {"prompt_tokens": PROMPT_TOKENS, "prompt_attention_s": total_s}


# --- decode ----------------------------------------------------------------------------------


class Step:
    """Rows that decode, of equal length.

    Args:
        kv: KV of all rows.
        num_rows: rows.
        tokens: tokens of each row's sequence.
    """

    def __init__(self, kv: KV, num_rows: int, tokens: int) -> None:
        self.name = f"{num_rows} x {tokens}"
        self.layer_bytes = num_rows * tokens * 2 * NUM_KV_HEADS * HEAD_DIM * kv.dtype.itemsize
        self._kv = kv
        self._query = kv.queries(num_rows)
        self._out = torch.empty_like(self._query)
        self._slots = torch.arange(num_rows, device=kv.device)
        self._lengths = torch.full((num_rows,), tokens, device=kv.device)
        self._layers = [kv.layer(layer, num_rows) for layer in range(kv.sizes.num_layers)]
        multiprocessors = 132
        if kv.device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(kv.device).multi_processor_count
        self.default = default_config(
            num_rows,
            NUM_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            kv.dtype,
            multiprocessors,
            paged=False,
        )

    def run(self, config: Config, workspace: Workspace, layer: int) -> None:
        """Attend in one layer."""
        decode_attention(
            self._query,
            *self._layers[layer],
            None,
            self._slots,
            self._lengths,
            self._out,
            workspace,
            config,
            scale=SCALE,
        )

    def workspace(self, config: Config) -> Workspace:
        """Scratch memory for a config."""
        device = self._kv.device
        return Workspace.empty([config], NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, device)

    def check(self, config: Config) -> float:
        """Relative error in the last layer, against the reference."""
        exact = torch.float32 if self._kv.device.type == "cuda" else torch.float64
        query = self._query.to(exact)
        expected = torch.empty_like(query)
        self._out.fill_(torch.nan)
        self.run(config, self.workspace(config), -1)
        decode_attention_reference(
            query, *self._layers[-1], None, self._slots, self._lengths, expected, scale=SCALE
        )
        return largest_error(self._out, expected)

    def seconds(self, config: Config) -> float:
        """Median seconds of a layer, in a CUDA graph of all."""
        workspace = self.workspace(config)

        def all_layers() -> None:
            for layer in range(len(self._layers)):
                self.run(config, workspace, layer)

        if self._kv.device.type != "cuda":
            begun_s = time.perf_counter()
            all_layers()
            return (time.perf_counter() - begun_s) / len(self._layers)
        all_layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_layers()
        times = replay_seconds(graph, self._kv.sizes.repeats + 3)[3:]
        return statistics.median(times) / len(self._layers)


def geometries(default: Config) -> Iterator[Config]:
    """Configs that differ in tiles, warps and shares."""
    yield default
    for tokens, warps, stages, shares in (
        (32, 2, 3, 64),
        (64, 2, 2, 32),
        (64, 2, 2, 64),
        (64, 4, 3, 32),
        (64, 4, 4, 16),
        (64, 4, 5, 16),
        (64, 4, 3, 16),
        (32, 4, 4, 32),
        (128, 4, 3, 16),
        (128, 8, 3, 16),
        (64, 2, 4, 16),
        (32, 2, 4, 32),
    ):
        yield replace(
            default, block_tokens=tokens, num_warps=warps, num_stages=stages, num_shares=shares
        )


def decode(kv: KV) -> Figures:
    """Sweep the geometries, then the best of them with a late start of the next kernel."""
    on_gpu = kv.device.type == "cuda"
    copy_rate = device_copy_bandwidth() if on_gpu else read_bandwidth()
    steps = [Step(kv, num_rows, tokens) for num_rows, tokens in kv.sizes.rows]
    default = steps[0].default
    assert all(step.default == default for step in steps), "one config for all shapes"
    results: dict[Config, dict[str, float]] = {}

    def sweep(configs: list[Config]) -> None:
        """Measure configs that have not been measured."""
        new = [config for config in dict.fromkeys(configs) if config not in results]
        with compiled_together(kv.device) if on_gpu else nullcontext():
            for config in new:
                for step in (steps[0], steps[1]):  # of one row and of several
                    step.run(config, step.workspace(config), 0)
        for config in new:
            try:
                measured = {}
                for step in steps:
                    step.check(config)
                    measured[step.name] = step.seconds(config)
            except Exception:  # one config too many for the device is no reason to stop
                traceback.print_exc()
                continue
            results[config] = measured
            cells = ", ".join(
                f"{step.name}: {measured[step.name] * 1e6:.1f} us "
                f"({step.layer_bytes / measured[step.name] / copy_rate:.0%})"
                for step in steps
            )
            print(f"{describe(config)}: {cells}", flush=True)

    def worth(config: Config) -> tuple[bool, float]:
        """Whether a config is slower than the default for a short row, and its time for others."""
        ratios = {name: s / results[default][name] for name, s in results[config].items()}
        short = [ratios[step.name] for step in steps[:2]]
        others = [ratios[step.name] for step in steps[2:]]
        return max(short) > 1.01, statistics.geometric_mean(others)

    every = list(geometries(default))
    sweep(every if on_gpu else every[:2])
    sweep([replace(config, releases_early=False) for config in sorted(results, key=worth)[:2]])
    best = {}
    for step in steps:
        times = {config: measured[step.name] for config, measured in results.items()}
        best[step.name] = min(times, key=times.__getitem__)
    for name, config in best.items():
        print(f"best of {name}: {results[config][name] * 1e6:.1f} us, {describe(config)}")
    overall = min(results, key=worth)
    print(f"best of all that are not slower for few tokens: {overall}")
    return {
        "copy_gb_per_s": copy_rate / 1e9,
        "layer_bytes": {step.name: step.layer_bytes for step in steps},
        "best": {name: asdict(config) for name, config in best.items()},
        "best_of_all": asdict(overall),
        "configs": [
            {"config": asdict(config), "layer_s": layer_s} for config, layer_s in results.items()
        ],
    }


def describe(config: Config) -> str:
    """A config in a few words."""
    return (
        f"tokens {config.block_tokens:3} shares {config.num_shares:3} warps {config.num_warps} "
        f"stages {config.num_stages}{' early' if config.releases_early else ' late'}"
    )


MEASURED: dict[str, Callable[[KV], Figures]] = {
    "check": check,
    "chunks": chunks,
    "decode": decode,
}
"""What each part runs."""


def run_part(name: str, device: str, folder: Path) -> None:
    """Run one part, and write its figures."""
    begun_s = time.perf_counter()
    torch.manual_seed(0)
    with torch.inference_mode():
        kv = KV(GPU if device == "cuda" else CPU, torch.device(device, 0))
        save(folder / f"{name}.json", {"seed": 0, **MEASURED[name](kv)})
    print(f"{name}: {time.perf_counter() - begun_s:.0f} s\n", flush=True)


def main() -> None:
    """Run the parts, each in a process of its own: an error on the device ends its process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--parts", help=f"some of {','.join(MEASURED)}; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    names = arguments.parts.split(",") if arguments.parts else list(MEASURED)
    if unknown := set(names) - set(MEASURED):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if arguments.device == "cpu":
        names = [name for name in names if name in ON_CPU]
    arguments.output.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    failed = []
    for name in names:
        process = context.Process(target=run_part, args=(name, arguments.device, arguments.output))
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode != 0:
            failed.append(name)
            print(f"{name}: ended with {process.exitcode}\n", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
