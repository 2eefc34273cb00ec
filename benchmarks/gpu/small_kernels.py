"""Time of each small kernel of a decode step, compared with its memory-bound floor.

    python benchmarks/gpu/small_kernels.py --output benchmarks/gpu/small_kernels.json

A kernel runs many times in one CUDA graph; the figure is the median over replays of the time of one
run. Activations stay in the L2 cache, as in a model; weights come from memory, because enough
copies alternate to overflow the cache. A floor below two microseconds means little: a kernel launch
takes as long.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from aquifer.bench.floor import device_copy_bandwidth
from aquifer.bench.result import save
from aquifer.bench.timing import replay_seconds
from aquifer.kernels import _triton
from aquifer.kernels.activation import silu_mul
from aquifer.kernels.linear import (
    Shape,
    Tile,
    best_tile,
    linear,
    norm_linear,
    silu_linear,
    tiles,
)
from aquifer.kernels.norm import add_rms_norm, rms_norm
from aquifer.kernels.rotary import qk_norm_rope_write
from aquifer.kernels.sampling.columns import SamplingColumns
from aquifer.kernels.sampling.sample import Variant, sample

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
BATCHES = (1, 32, 128, 256)
LINEAR_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 20  # runs of a kernel in its graph
REPLAYS = 15
PRODUCT_REPLAYS = 5


@dataclass(frozen=True)
class ModelShape:
    """Shape of a model."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    qk_norm: bool

    def products(self, tokens: int) -> dict[str, tuple[Shape, int]]:
        """Return the products of one step, each with its count."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (Shape(tokens, q + 2 * kv, self.hidden), self.layers),
            "out": (Shape(tokens, self.hidden, q), self.layers),
            "gate_up": (Shape(tokens, 2 * self.intermediate, self.hidden), self.layers),
            "down": (Shape(tokens, self.hidden, self.intermediate), self.layers),
            "head": (Shape(tokens, self.vocab, self.hidden), 1),
        }


MODELS = (
    ModelShape("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 28, 151936, True),
    ModelShape("Llama-3-8B", 4096, 14336, 32, 8, 128, 32, 128256, False),
)


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a function, which has run before, in a CUDA graph, and replay it once."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph


def seconds_of(run: Callable[[], object]) -> list[float]:
    """Measure the seconds of one run, for each replay."""

    def runs() -> None:
        for _ in range(REPEATS):
            run()

    run()  # compiles
    return [seconds / REPEATS for seconds in replay_seconds(captured(runs), REPLAYS)]


def seconds_of_products(
    shapes: Sequence[Shape],
) -> Iterator[tuple[Shape, dict[Tile | None, float]]]:
    """Measure the seconds of one product with each candidate, the median; None is cuBLAS.

    Each graph has enough weights to overflow the L2 cache, because in a model too every weight
    comes from memory.
    """
    cache_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    largest = max(shape.out * shape.in_ for shape in shapes)
    num_elements = max(3 * cache_bytes // DTYPE.itemsize, largest)
    pool = torch.empty(num_elements, dtype=DTYPE, device=DEVICE).normal_(std=0.02)
    for shape in shapes:
        num_copies = num_elements // (shape.out * shape.in_)
        weights = pool[: num_copies * shape.out * shape.in_].view(num_copies, shape.out, shape.in_)
        x = random(shape.tokens, shape.in_)
        seconds: dict[Tile | None, float] = {}
        for tile in (None, *tiles(shape)):
            product = F.linear if tile is None else functools.partial(linear, tile=tile)
            try:
                seconds[tile] = _seconds_of_product(product, x, weights)
            except OutOfResources:
                continue  # more shared memory than this device has
        yield shape, seconds


def _seconds_of_product(
    product: Callable[..., object], x: torch.Tensor, weights: torch.Tensor
) -> float:
    def products() -> None:
        for weight in weights:
            product(x, weight, None)

    product(x, weights[0], None)  # compiles
    replays = replay_seconds(captured(products), PRODUCT_REPLAYS)
    return statistics.median(replays) / len(weights)


def random(*shape: int) -> torch.Tensor:
    """Return random activations."""
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def kernels(model: ModelShape, batch: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield (name, function to time, bytes it must move) of all kernels but products."""
    item = DTYPE.itemsize
    x, residual = random(batch, model.hidden), random(batch, model.hidden)
    weight = random(model.hidden)
    yield "rms_norm", lambda: rms_norm(x, weight, 1e-6), 2 * x.numel() * item
    yield "add_rms_norm", lambda: add_rms_norm(x, residual, weight, 1e-6), 4 * x.numel() * item

    gate_up = random(batch, 2 * model.intermediate)
    yield "silu_mul", lambda: silu_mul(gate_up), 3 * gate_up.numel() // 2 * item

    # Token-major KV: all layers of a token are neighbours.
    kv_elements = model.kv_heads * model.head_dim
    cache = torch.empty(batch, 4, model.layers * 2 * kv_elements, dtype=DTYPE, device=DEVICE)
    keys, values = (
        cache[..., i * kv_elements : (i + 1) * kv_elements].unflatten(-1, (-1, model.head_dim))
        for i in (4, 5)
    )
    qkv = random(batch, (model.heads + 2 * model.kv_heads) * model.head_dim)
    q_weight = random(model.head_dim) if model.qk_norm else None
    k_weight = random(model.head_dim) if model.qk_norm else None
    cos, sin = torch.rand(2, batch, model.head_dim // 2, device=DEVICE)
    query = torch.empty(batch, model.heads, model.head_dim, dtype=DTYPE, device=DEVICE)
    slots = torch.arange(batch, device=DEVICE)
    positions = torch.ones_like(slots)

    def write() -> None:
        qk_norm_rope_write(
            qkv, q_weight, k_weight, cos, sin, query, keys, values, slots, positions, eps=1e-6
        )

    yield "qk_norm_rope_write", write, 2 * qkv.numel() * item + 8 * cos.numel()

    logits = random(batch, model.vocab) * 3
    out = torch.empty(batch, dtype=torch.int64, device=DEVICE)
    for name, variant, values_of in _sampling_cases():
        columns = SamplingColumns.empty(batch, 0, model.vocab, DEVICE)
        for column, value in values_of.items():
            getattr(columns, column).fill_(value)
        columns.seed.random_()

        def draw(columns: SamplingColumns = columns, variant: Variant = variant) -> None:
            sample(logits, slots, positions, columns, out, variant=variant)

        yield name, draw, logits.numel() * item


def fused_products(model: ModelShape) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield products of one token fused with the operation before them; as in `kernels`.

    Each with and without overlapping launches; successive calls use other weights.
    """
    x, residual = random(1, model.hidden), random(1, model.hidden)
    gate_up, norm_weight = random(1, 2 * model.intermediate), random(model.hidden)
    for (name, (shape, _)), overlaps in itertools.product(model.products(1).items(), (False, True)):
        num_bytes = shape.out * shape.in_ * DTYPE.itemsize
        weights = itertools.cycle(
            random(min(REPEATS, (4 << 30) // num_bytes), shape.out, shape.in_)
        )

        def normed(weights: Iterator[torch.Tensor] = weights, overlaps: bool = overlaps) -> None:
            _triton.overlap = overlaps
            norm_linear(x, residual, norm_weight, 1e-6, next(weights), None)

        def activated(weights: Iterator[torch.Tensor] = weights, overlaps: bool = overlaps) -> None:
            _triton.overlap = overlaps
            silu_linear(gate_up, next(weights), None)

        suffix = ", overlapping" if overlaps else ""
        if name in ("qkv", "gate_up"):
            yield f"norm_linear {name}{suffix}", normed, num_bytes
        elif name == "down":
            yield f"silu_linear {name}{suffix}", activated, num_bytes
    _triton.overlap = True


def _sampling_cases() -> list[tuple[str, Variant, dict[str, float]]]:
    return [
        ("sample greedy", "greedy", {}),
        ("sample temperature 0.6", "plain", {"temperature": 0.6}),
        ("sample top-k 20, top-p 0.95", "full", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ("sample top-p 0.5", "full", {"temperature": 0.6, "top_p": 0.5}),
        ("sample top-p 0.99, flat", "full", {"temperature": 5.0, "top_p": 0.99}),
        ("sample min-p 0.05", "full", {"temperature": 0.6, "min_p": 0.05}),
        ("sample min-p 0.05, flat", "full", {"temperature": 5.0, "min_p": 0.05}),
        ("sample top-k 5000, flat", "full", {"temperature": 5.0, "top_k": 5000, "top_p": 0.95}),
    ]


def tile_name(tile: Tile | None) -> str:
    """Return the tile's name in the table."""
    if tile is None:
        return "cuBLAS"
    name = f"{tile.rows}x{tile.columns}, {tile.num_warps} warps, {tile.num_stages} stages"
    return name if tile.num_splits == 1 else f"{name}, {tile.num_splits} splits"


def run_small(bandwidth: float) -> list[dict[str, Any]]:
    """Time all kernels but products."""
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        for batch in BATCHES:
            fused = fused_products(model) if batch == 1 else ()
            for name, run, num_bytes in itertools.chain(kernels(model, batch), fused):
                seconds = seconds_of(run)
                floor = num_bytes / bandwidth
                rows.append(
                    {"model": model.name, "batch": batch, "kernel": name, "bytes": num_bytes}
                    | {"floor_s": floor, "seconds": seconds}
                )
                median = statistics.median(seconds)
                print(
                    f"{model.name:11} {batch:4} {name:28} {median * 1e6:8.2f} us"
                    f"   floor {floor * 1e6:7.2f} us",
                    flush=True,
                )
    return rows


def run_products(bandwidth: float) -> list[dict[str, Any]]:
    """Time products with every candidate, and a step by the best, by `best_tile`, by cuBLAS."""
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        for batch in LINEAR_BATCHES:
            products = model.products(batch)
            shapes = [shape for shape, _ in products.values()]
            best_step = chosen_step = cublas_step = floor_step = 0.0
            for (name, (shape, count)), (_, seconds) in zip(
                products.items(), seconds_of_products(shapes), strict=True
            ):
                best = min(seconds, key=lambda tile, seconds=seconds: seconds[tile])  # type: ignore[misc]
                floor = shape.out * shape.in_ * DTYPE.itemsize / bandwidth
                # For one token, `best_tile` may return a tile that is not among the candidates.
                chosen = seconds.get(best_tile(shape), seconds[best])
                best_step += count * seconds[best]
                chosen_step += count * chosen
                cublas_step += count * seconds[None]
                floor_step += count * floor
                rows.append(
                    {"model": model.name, "product": name, **asdict(shape), "floor_s": floor}
                    | {"seconds": {tile_name(tile): value for tile, value in seconds.items()}}
                )
                print(
                    f"{model.name:11} {batch:4} {name:8} cuBLAS {seconds[None] * 1e6:8.2f} us"
                    f"   best {seconds[best] * 1e6:8.2f} us ({tile_name(best)})"
                    f"   chosen {chosen * 1e6:8.2f} us   floor {floor * 1e6:8.2f} us",
                    flush=True,
                )
            print(
                f"{model.name:11} {batch:4} all      cuBLAS {cublas_step * 1e3:8.3f} ms"
                f"   best {best_step * 1e3:8.3f} ms   chosen {chosen_step * 1e3:8.3f} ms"
                f"   floor {floor_step * 1e3:8.3f} ms",
                flush=True,
            )
    return rows


def main() -> None:
    """Print the tables, and write the results with every repeat."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = device_copy_bandwidth()
    gpu = torch.cuda.get_device_name(DEVICE)
    print(f"{gpu}, copy {bandwidth / 1e12:.2f} TB/s read plus written\n")
    small = run_small(bandwidth)
    print()
    products = run_products(bandwidth)
    if arguments.output is not None:
        figures = {"gpu": gpu, "cuda": torch.version.cuda, "copy_bytes_per_s": bandwidth, "seed": 0}
        save(arguments.output, {**figures, "kernels": small, "products": products})


if __name__ == "__main__":
    main()
