"""Time of products of 48 to 256 tokens with large weights: Hopper's own kernel, and without it.

    python benchmarks/gpu/products.py --output benchmarks/gpu/products.json

Each product comes after the norm of its tokens, as in a model, and both are timed together: what a
kernel loads before it waits counts. Weights alternate, so that they come from memory. "Before" is
what `linear` does where the kernel is not used: Triton's or cuBLAS, with `silu_mul` after it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from aquifer.bench.floor import device_copy_bandwidth
from aquifer.bench.result import save
from aquifer.bench.timing import captured_seconds
from aquifer.kernels import hopper_linear
from aquifer.kernels._triton import count_multiprocessors
from aquifer.kernels.hopper_linear import fits, tiling
from aquifer.kernels.linear import linear
from aquifer.kernels.norm import rms_norm

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
TOKENS = (48, 64, 96, 128, 160, 192, 224, 240, 256)
# Rows and columns of the weight, and whether the gated activation is wanted: Llama-3-8B's.
PRODUCTS = {
    "qkv": (6144, 4096, False),
    "out": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}
EPS = 1e-5
WEIGHTS_BYTES = 600 << 20  # of all that alternate, about; twelve times the L2 cache
MOST_WEIGHTS = 16
REPLAYS = 7

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def seconds_of(product: Product, weights: Sequence[torch.Tensor], num_tokens: int) -> float:
    """Seconds of a norm and a product after it; the median of replays of all weights."""
    num_in = weights[0].shape[1]
    x = torch.randn(num_tokens, num_in, dtype=DTYPE, device=DEVICE)
    norm = torch.ones(num_in, dtype=DTYPE, device=DEVICE)

    def run() -> None:
        for weight in weights:
            product(rms_norm(x, norm, EPS), weight)

    return statistics.median(captured_seconds(run, REPLAYS)) / len(weights)


def _never(*_: object, **_options: object) -> bool:
    return False


def measure(name: str, num_tokens: int, weights: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Time one product in both ways, whichever is the default."""
    num_rows, num_in, gated = PRODUCTS[name]
    hopper_linear.fits = _never
    before_s = seconds_of(lambda x, w: linear(x, w, None, gated=gated), weights, num_tokens)
    hopper_linear.fits = fits
    x = torch.empty(num_tokens, num_in, dtype=DTYPE, device=DEVICE)
    return {
        "product": name,
        "tokens": num_tokens,
        "before_s": before_s,
        "own_s": seconds_of(
            lambda x, w: hopper_linear.hopper_linear(x, w, None, gated=gated), weights, num_tokens
        ),
        "is_default": fits(x, weights[0], None, gated=gated),
        "tiling": asdict(
            tiling(num_tokens, num_rows, num_in, count_multiprocessors(DEVICE), gated=gated)
        ),
    }


def main() -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = device_copy_bandwidth()
    console = Console()
    rows: list[dict[str, Any]] = []
    table = Table(
        "product", "tokens", "before, us", "own, us", "floor of the weight, us", "default"
    )
    for name, (num_rows, num_in, _) in PRODUCTS.items():
        weight_bytes = num_rows * num_in * DTYPE.itemsize
        count = min(max(WEIGHTS_BYTES // weight_bytes, 2), MOST_WEIGHTS)
        scale = num_in**-0.5
        weights = [
            torch.randn(num_rows, num_in, dtype=DTYPE, device=DEVICE) * scale for _ in range(count)
        ]
        for num_tokens in TOKENS:
            row = {**measure(name, num_tokens, weights), "floor_s": weight_bytes / bandwidth}
            rows.append(row)
            times = (f"{1e6 * row[key]:.1f}" for key in ("before_s", "own_s", "floor_s"))
            table.add_row(name, str(num_tokens), *times, "own" if row["is_default"] else "")
            console.print(f"{name}, {num_tokens} tokens: done")
    console.print(table)
    if arguments.output is not None:
        gpu = torch.cuda.get_device_name(DEVICE)
        save(
            arguments.output,
            {"gpu": gpu, "copy_bytes_per_s": bandwidth, "seed": 0, "products": rows},
        )


if __name__ == "__main__":
    main()
