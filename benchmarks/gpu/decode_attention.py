"""Read bandwidth of the decode attention kernel, compared with a device copy.

Each figure is from a CUDA graph of one call per layer over token-major KV of all layers, so that
nothing remains in the L2 cache from one replay to the next. GB/s are the bytes of K and V that are
read, over the time of the kernel, or of both kernels if a second one merges partial results; the
copy counts bytes read and written.

    python benchmarks/gpu/decode_attention.py --output result.json

Layouts: "contiguous" and "paged" with the Triton kernel, and "clusters", contiguous KV with the one
of few rows, where it can run.

    python benchmarks/gpu/decode_attention.py --sweep --shapes 64x2048 1x8192 --output sweep.json

`--sweep` varies one field of the config after another, from the default, and keeps the best.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from aquifer.bench.floor import device_copy_bandwidth
from aquifer.bench.result import save
from aquifer.kernels import cluster_attention
from aquifer.kernels.decode_attention import (
    Config,
    Workspace,
    decode_attention,
    decode_attention_reference,
    default_config,
)

BLOCK_SIZE = 16
DTYPE = torch.bfloat16

Change = Callable[[Config], Config]


@dataclass(frozen=True)
class Shape:
    """A batch of equal lengths."""

    batch: int
    tokens: int
    num_kv_heads: int = 8
    num_layers: int = 32
    head_dim: int = 128
    group: int = 4  # query heads of a KV head

    @property
    def name(self) -> str:
        """The shape's name for `--shapes`; of a model with as many KV heads as heads, with both."""
        heads = f"x{self.num_kv_heads}x{self.head_dim}" if self.group == 1 else ""
        return f"{self.batch}x{self.tokens}{heads}"

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer."""
        return self.batch * self.tokens * self.num_kv_heads * 2 * self.head_dim * DTYPE.itemsize


# At most 35 GB each.
SHAPES = (
    Shape(1, 8192),
    Shape(8, 4096),
    Shape(1, 512),
    Shape(1, 2048),
    Shape(2, 576),
    Shape(4, 576),
    Shape(8, 576),
    Shape(16, 576),
    Shape(4, 4096),
    Shape(16, 4096),
    Shape(32, 4096),
    Shape(1, 32768),
    Shape(1, 131072, num_layers=16),
    Shape(32, 1024),
    Shape(64, 2048),
    Shape(128, 2048, num_kv_heads=4),
    Shape(256, 640),
    Shape(16, 16384),
    Shape(1, 576),
    Shape(32, 576),
    Shape(128, 576),
    Shape(256, 576),
    *(Shape(batch, 576, 32, 16, 96, 1) for batch in (1, 32, 128)),  # Phi-3-mini
    *(Shape(batch, 576, 40, 16, 128, 1) for batch in (1, 32, 128)),  # OPT-13B
)


class Batch:
    """Tensors of one shape, with random KV of all layers; both layouts use the same KV."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_heads = shape.num_kv_heads * shape.group
        self.scale = shape.head_dim**-0.5
        layer_elements = shape.num_kv_heads * 2 * shape.head_dim
        self.kv = torch.empty(
            shape.batch,
            shape.tokens,
            shape.num_layers,
            layer_elements,
            dtype=DTYPE,
            device="cuda",
        )
        for row in self.kv:
            row.normal_()
        size = (shape.batch, self.num_heads, shape.head_dim)
        self.query = torch.randn(size, dtype=DTYPE, device="cuda")
        self.out = torch.empty_like(self.query)
        self.slots = torch.randperm(shape.batch, device="cuda")
        self.lengths = torch.full((shape.batch,), shape.tokens, device="cuda")
        num_blocks = shape.batch * shape.tokens // BLOCK_SIZE
        self.tables = torch.randperm(num_blocks, device="cuda").view(shape.batch, -1)

    def layer_kv(self, layer: int, *, paged: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's K and V, [slots, tokens, kv_heads, dim] or [blocks, 16, ...]."""
        kv = self.kv[:, :, layer]
        if paged:
            kv = kv.unflatten(1, (-1, BLOCK_SIZE)).flatten(0, 1)
        keys, values = kv.unflatten(-1, (2, self.shape.num_kv_heads, self.shape.head_dim)).unbind(
            -3
        )
        return keys, values

    def attend(
        self,
        kv: tuple[torch.Tensor, torch.Tensor],
        config: Config,
        workspace: Workspace,
        *,
        paged: bool,
    ) -> None:
        """Run decode attention; overwrites `out`."""
        decode_attention(
            self.query,
            *kv,
            self.tables if paged else None,
            self.slots,
            self.lengths,
            self.out,
            workspace,
            config,
            scale=self.scale,
        )

    def check(self, *, paged: bool) -> None:
        """Compare two rows of the last layer's `out` with the reference."""
        query = self.query[:2].float()
        expected = torch.empty_like(query)
        decode_attention_reference(
            query,
            *self.layer_kv(self.shape.num_layers - 1, paged=paged),
            self.tables if paged else None,
            self.slots[:2],
            self.lengths[:2],
            expected,
            scale=self.scale,
        )
        error = (self.out[:2].float() - expected).norm() / expected.norm()
        assert error < 1e-2, f"relative error {error:.2e}"


def measure(run: Callable[[], object], repeats: int) -> list[float]:
    """Measure the seconds of each replay of `run`, captured in a CUDA graph."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def measure_config(batch: Batch, config: Config, repeats: int, *, paged: bool) -> list[float]:
    """Measure the seconds of one layer, for each repeat."""
    workspace = Workspace.empty(
        [config],
        batch.num_heads,
        batch.shape.num_kv_heads,
        batch.shape.head_dim,
        torch.device("cuda"),
    )
    layers = [batch.layer_kv(layer, paged=paged) for layer in range(batch.shape.num_layers)]

    def all_layers() -> None:
        for kv in layers:
            batch.attend(kv, config, workspace, paged=paged)

    batch.out.fill_(torch.nan)
    times = measure(all_layers, repeats)
    batch.check(paged=paged)
    return [seconds / batch.shape.num_layers for seconds in times]


def variations(num_kv_heads: int, num_multiprocessors: int) -> Iterator[list[Change]]:
    """Yield, for each field in turn, functions that change the best config so far."""

    def heads(kv_heads: int) -> Change:
        def change(best: Config) -> Config:
            """Change the heads per program, with equal tile size and number of programs."""
            old = best.kv_heads_per_program
            return replace(
                best,
                kv_heads_per_program=kv_heads,
                block_tokens=max(best.block_tokens * old // kv_heads, 1),
                num_shares=max(best.num_shares * kv_heads // old, 1),
            )

        return change

    def programs(per_multiprocessor: float) -> Change:
        def change(best: Config) -> Config:
            groups = num_kv_heads // best.kv_heads_per_program
            shares = round(per_multiprocessor * num_multiprocessors / groups)
            return replace(best, num_shares=shares)

        return change

    def shares(value: int) -> Change:
        return lambda best: replace(best, num_shares=value)

    def merges_itself(value: bool) -> Change:
        return lambda best: replace(best, merges_itself=value)

    def field(name: str, value: int) -> Change:
        changes: dict[str, Any] = {name: value}
        return lambda best: replace(best, **changes)

    yield [heads(n) for n in (1, 2, 4, 8, 16) if num_kv_heads % n == 0]
    yield [field("block_tokens", n) for n in (4, 8, 16, 32, 64, 128)]
    yield [field("num_stages", n) for n in (2, 3, 4, 5, 6, 7)]
    yield [field("num_warps", n) for n in (2, 4, 8)]
    yield [programs(n) for n in (0.5, 1, 2, 3, 4, 6, 8, 12)]
    yield [shares(n) for n in (16, 32, 64, 128, 256)]
    yield [merges_itself(value) for value in (True, False)]


def main() -> None:
    """Measure the default configs, or sweep around them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="search for better configs")
    parser.add_argument("--shapes", nargs="*", default=[s.name for s in SHAPES])
    parser.add_argument("--layouts", nargs="*", default=["contiguous", "clusters", "paged"])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch.cuda.get_device_properties(0)
    num_multiprocessors = device.multi_processor_count
    copy_rate = device_copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"{device.name}: copy {copy_rate / 1e9:.0f} GB/s", flush=True)
    results: list[dict[str, Any]] = []

    def run(batch: Batch, config: Config, layout: str) -> float:
        """Measure, record and print; return a layer's median seconds, infinite if too large."""
        label = f"{batch.shape.name:9} {batch.shape.num_kv_heads} {layout:10}"
        cut = (
            "by clusters"
            if config.by_clusters
            else (
                f"heads {config.kv_heads_per_program} tokens {config.block_tokens:3} "
                f"shares {config.num_shares:4} warps {config.num_warps} stages {config.num_stages} "
                f"kernels {1 if config.merges_itself else 2}"
            )
        )
        try:
            times = measure_config(batch, config, arguments.repeats, paged=layout == "paged")
        except OutOfResources as error:
            print(f"{label} {cut}: {error}", flush=True)
            return float("inf")
        seconds = statistics.median(times)
        rate = batch.shape.layer_bytes / seconds
        print(
            f"{label} {cut}: {seconds * 1e6:7.1f} us, {rate / 1e9:5.0f} GB/s, "
            f"{rate / copy_rate:6.1%} of copy",
            flush=True,
        )
        results.append(
            {
                "shape": asdict(batch.shape),
                "layout": layout,
                "config": asdict(config),
                "layer_bytes": batch.shape.layer_bytes,
                "layer_s": times,
                "gb_per_s": rate / 1e9,
                "of_copy": rate / copy_rate,
            }
        )
        return seconds

    for shape in SHAPES:
        if shape.name not in arguments.shapes:
            continue
        batch = Batch(shape)
        for layout in arguments.layouts:
            by_clusters = layout == "clusters"
            if by_clusters and not cluster_attention.fits(batch.query, batch.layer_kv(0)[1]):
                continue
            best = default_config(
                shape.batch,
                batch.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                DTYPE,
                num_multiprocessors,
                paged=layout == "paged",
            )
            best = replace(best, by_clusters=by_clusters)
            seen = {best: run(batch, best, layout)}
            if by_clusters or not arguments.sweep:
                continue
            for changes in variations(shape.num_kv_heads, num_multiprocessors):
                for change in changes:
                    config = change(best)
                    is_tile = 16 <= config.block_tokens * config.kv_heads_per_program <= 256
                    if is_tile and config not in seen:
                        seen[config] = run(batch, config, layout)
                best = min(seen, key=lambda config: seen[config])
            print(f"best of {shape.name} {layout}: {best}", flush=True)
        del batch
        torch.cuda.empty_cache()

    figures = {
        "gpu": {"name": device.name, "multiprocessors": num_multiprocessors},
        "triton": triton.__version__,
        "seed": 0,
        "copy_gb_per_s": copy_rate / 1e9,
        "results": results,
    }
    save(arguments.output, figures)


if __name__ == "__main__":
    main()
