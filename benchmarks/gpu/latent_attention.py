"""Attention over latent KV, compared with its floors.

KV is token-major, 27 layers of 512 + 64 elements in bf16 as in DeepSeek-V2-Lite, and each figure is
from a CUDA graph of one call per layer, so that nothing remains in the L2 cache from one replay to
the next. The floor of rows that decode is the larger of two times: to read the KV once at the
bandwidth of a device copy, and to compute 2 * (576 + 512) operations for each head and token at the
rate of a large product. Chunks of prompts have the second floor only.

    python benchmarks/gpu/latent_attention.py --output latent_attention.json
    python benchmarks/gpu/latent_attention.py --sweep --shapes 64x2048 --heads 16 --output x.json

`--sweep` varies one field of the config after another, from the default, and keeps the best.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from aquifer.bench.floor import Rates
from aquifer.bench.result import save
from aquifer.bench.timing import replay_seconds
from aquifer.kernels.latent_attention import (
    DecodeConfig,
    PrefillConfig,
    default_decode_config,
    default_prefill_config,
    empty_workspace,
    latent_decode_attention,
    latent_decode_attention_reference,
    latent_prefill_attention,
)
from aquifer.kernels.prefill_attention import PrefillSpans

VALUE_DIM, ROPE_DIM, NUM_LAYERS = 512, 64, 27
KEY_DIM = VALUE_DIM + ROPE_DIM
DTYPE = torch.bfloat16
SCALE = 192**-0.5
SHAPES = ("1x8192", "8x4096", "32x1024", "64x2048", "128x1024", "256x576", "16x16384")
CHUNKS = ("1x2048+0", "1x8192+0", "8x512+0", "1x256+8192", "1x2048+8192")


@dataclass(frozen=True)
class Times:
    """Seconds of one layer for each repeat, and the floor."""

    layer_s: list[float]
    floor_s: float

    @property
    def median_s(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.layer_s)


class KV:
    """Random KV of all layers, of sequences of equal length, and the queries of some tokens."""

    def __init__(self, batch: int, tokens: int, num_queries: int, num_heads: int) -> None:
        shape = (batch, tokens, NUM_LAYERS, KEY_DIM)
        self.kv = torch.empty(shape, dtype=DTYPE, device="cuda")
        for row in self.kv:
            row.normal_()
        self.query = torch.randn(num_queries, num_heads, KEY_DIM, dtype=DTYPE, device="cuda")
        self.out = torch.empty(num_queries, num_heads, VALUE_DIM, dtype=DTYPE, device="cuda")
        self.slots = torch.randperm(batch, device="cuda")
        self.lengths = torch.full((batch,), tokens, device="cuda")

    def layers(self, block_size: int | None) -> list[torch.Tensor]:
        """Keys of each layer, contiguous or in blocks."""
        kv = self.kv
        if block_size is not None:
            kv = kv.unflatten(1, (-1, block_size)).flatten(0, 1)
        return [kv[:, :, layer, None] for layer in range(NUM_LAYERS)]

    def tables(self, block_size: int | None) -> torch.Tensor | None:
        """Shuffled block tables; None for contiguous KV."""
        if block_size is None:
            return None
        batch, tokens = self.kv.shape[:2]
        num_blocks = batch * tokens // block_size
        return torch.randperm(num_blocks, device="cuda").int().view(batch, -1)


class Measurement:
    """Measures both kernels on this device."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.rates = Rates.measure(torch.device("cuda"), DTYPE)
        torch.cuda.empty_cache()

    def decode(self, kv: KV, config: DecodeConfig, block_size: int | None) -> Times:
        """Measure rows that decode, and compare two of them with the reference."""
        batch, num_heads, _ = kv.query.shape
        workspace = empty_workspace([config], num_heads, VALUE_DIM, kv.query.device)
        tables, layers = kv.tables(block_size), kv.layers(block_size)

        def run() -> None:
            for keys in layers:
                latent_decode_attention(
                    kv.query, keys, tables, kv.slots, kv.lengths, kv.out, workspace, config,
                    scale=SCALE,
                )  # fmt: skip

        kv.out.fill_(torch.nan)
        seconds = self._seconds(run)
        expected = kv.out[:2].float()
        latent_decode_attention_reference(
            kv.query[:2].float(), layers[-1], tables, kv.slots[:2], kv.lengths[:2], expected,
            scale=SCALE,
        )  # fmt: skip
        error = (kv.out[:2].float() - expected).norm() / expected.norm()
        assert error < 1e-2, f"relative error {error:.2e}"
        pairs = batch * kv.kv.shape[1]
        read_s = pairs * KEY_DIM * DTYPE.itemsize / self.rates.bytes_per_s
        return Times(seconds, max(read_s, self._compute_s(pairs * num_heads)))

    def prefill(
        self, kv: KV, start: int, count: int, config: PrefillConfig, block_size: int | None
    ) -> Times:
        """Measure a chunk of each sequence."""
        batch, num_heads = len(kv.slots), kv.query.shape[1]
        offsets = [count * row for row in range(batch + 1)]
        spans = PrefillSpans.of(kv.slots.tolist(), [start] * batch, offsets, kv.query.device)
        tables, layers = kv.tables(block_size), kv.layers(block_size)

        def run() -> None:
            for keys in layers:
                latent_prefill_attention(
                    kv.query, keys, tables, spans, kv.out, scale=SCALE, config=config
                )

        pairs = batch * count * (start + (count + 1) / 2)
        return Times(self._seconds(run), self._compute_s(pairs * num_heads))

    def _compute_s(self, pairs: float) -> float:
        return 2 * pairs * (KEY_DIM + VALUE_DIM) / self.rates.operations_per_s

    def _seconds(self, run: Callable[[], None]) -> list[float]:
        """Seconds of one layer in each replay of a CUDA graph."""
        run()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return [seconds / NUM_LAYERS for seconds in replay_seconds(graph, self.repeats)]


def variations(best: DecodeConfig) -> list[list[DecodeConfig]]:
    """Return a list for each field: configurations that differ from `best` in that field only."""
    fields: dict[str, tuple[Any, ...]] = {
        "block_heads": (16, 32, 64),
        "block_tokens": (16, 32, 64, 128),
        "num_stages": (1, 2, 3, 4, 5),
        "num_warps": (4, 8),
        "num_shares": (32, 64, 96, 128, 132, 192, 256),
        "least_tiles": (1, 2, 4, 8),
        "merges_itself": (True, False),
    }
    changes: list[list[DecodeConfig]] = []
    for name, values in fields.items():
        options: list[dict[str, Any]] = [{name: value} for value in values]
        changes.append([replace(best, **option) for option in options])
    return changes


def main() -> None:
    """Measure the default configs, or sweep around those of rows that decode."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="search for better configs")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="rows x tokens")
    parser.add_argument("--chunks", nargs="*", default=CHUNKS, help="chunks x tokens + prefix")
    parser.add_argument("--heads", nargs="*", type=int, default=[16, 128])
    parser.add_argument("--block-sizes", nargs="*", type=int, default=[0, 16], help="0: contiguous")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    measurement = Measurement(arguments.repeats)
    name = torch.cuda.get_device_properties(0).name
    print(
        f"{name}: copy {measurement.rates.bytes_per_s / 1e9:.0f} GB/s, "
        f"product {measurement.rates.operations_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    results: list[dict[str, Any]] = []

    def note(
        label: str, config: DecodeConfig | PrefillConfig, measure: Callable[[], Times]
    ) -> float:
        """Measure, record and print; return a layer's median seconds, infinite if too large."""
        try:
            times = measure()
        except OutOfResources as error:
            print(f"{label} {config}: {error}", flush=True)
            return float("inf")
        print(
            f"{label} {times.median_s * 1e6:8.1f} us, {times.floor_s / times.median_s:6.1%} of "
            f"the floor, {config}",
            flush=True,
        )
        results.append({"case": label, "config": asdict(config), **asdict(times)})
        return times.median_s

    def sweep(
        label: str, kv: KV, best: DecodeConfig, seconds: float, block_size: int | None
    ) -> None:
        """Vary one field after another."""
        seen = {best: seconds}
        for index in range(len(variations(best))):
            for config in variations(best)[index]:
                if config not in seen:
                    measure = partial(measurement.decode, kv, config, block_size)
                    seen[config] = note(label, config, measure)
            best = min(seen, key=lambda config: seen[config])
        print(f"best of {label}: {best}", flush=True)

    for heads in arguments.heads:
        for shape in arguments.shapes:
            batch, tokens = map(int, shape.split("x"))
            kv = KV(batch, tokens, batch, heads)
            for size in arguments.block_sizes:
                block_size = size or None
                label = f"decode {shape:9} heads {heads:3} blocks {size:3}"
                config = default_decode_config(
                    batch, heads, DTYPE, measurement.multiprocessors, paged=size > 0
                )
                measure = partial(measurement.decode, kv, config, block_size)
                seconds = note(label, config, measure)
                if arguments.sweep:
                    sweep(label, kv, config, seconds, block_size)
            del kv
            torch.cuda.empty_cache()
        for shape in arguments.chunks if not arguments.sweep else ():
            batch, count, start = map(int, shape.replace("+", "x").split("x"))
            kv = KV(batch, start + count, batch * count, heads)
            for size in arguments.block_sizes:
                label = f"chunks {shape:11} heads {heads:3} blocks {size:3}"
                tiling = default_prefill_config(DTYPE)
                measure = partial(measurement.prefill, kv, start, count, tiling, size or None)
                note(label, tiling, measure)
            del kv
            torch.cuda.empty_cache()

    figures = {
        "gpu": {"name": name, "multiprocessors": measurement.multiprocessors},
        "triton": triton.__version__,
        "seed": 0,
        "copy_gb_per_s": measurement.rates.bytes_per_s / 1e9,
        "product_tflop_per_s": measurement.rates.operations_per_s / 1e12,
        "results": results,
    }
    save(arguments.output, figures)


if __name__ == "__main__":
    main()
