"""Time of the norms and products of a model's layer with 2 to 32 tokens: with the kernel for few
tokens (`skinny_linear.py`), and without.

    python benchmarks/gpu/layers.py --output benchmarks/gpu/layers.json

Some layers are captured as one CUDA graph, without attention: each kernel reads what the last one
wrote, so what a kernel loads before it waits counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from aquifer.bench.floor import device_copy_bandwidth
from aquifer.bench.result import save
from aquifer.bench.timing import captured_seconds
from aquifer.kernels import skinny_linear
from aquifer.kernels.linear import linear, norm_linear
from aquifer.kernels.skinny_linear import fits

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
TOKENS = (2, 4, 8, 16, 32)
EPS = 1e-5
WEIGHTS_BYTES = 1 << 30  # of the layers of a graph, about; twenty times the L2 cache
MOST_LAYERS = 28
REPLAYS = 9


@dataclass(frozen=True)
class Sizes:
    """Elements of a token in a model."""

    hidden: int
    inner: int  # of the MLP
    qkv: int
    attended: int  # all query heads


MODELS = {
    "Qwen2.5-0.5B": Sizes(896, 4864, 1152, 896),
    "Qwen3-0.6B": Sizes(1024, 3072, 4096, 2048),
    "Llama-3.2-1B": Sizes(2048, 8192, 3072, 2048),
    "Qwen2.5-1.5B": Sizes(1536, 8960, 2048, 1536),
    "Qwen3-1.7B": Sizes(2048, 6144, 4096, 2048),
    "Llama-3.2-3B": Sizes(3072, 8192, 5120, 3072),
    "Qwen2.5-3B": Sizes(2048, 11008, 2560, 2048),
    "Qwen3-4B": Sizes(2560, 9728, 6144, 4096),
    "Qwen2.5-7B": Sizes(3584, 18944, 4608, 3584),
    "Llama-3-8B": Sizes(4096, 14336, 6144, 4096),
}


class Layers:
    """Some layers of a model, with random weights."""

    def __init__(self, sizes: Sizes) -> None:
        def weight(num_out: int, num_in: int) -> torch.Tensor:
            return torch.randn(num_out, num_in, dtype=DTYPE, device=DEVICE).mul_(num_in**-0.5)

        shapes = (
            (sizes.qkv, sizes.hidden),
            (sizes.hidden, sizes.attended),
            (2 * sizes.inner, sizes.hidden),
            (sizes.hidden, sizes.inner),
        )
        self.sizes = sizes
        self.layer_bytes = sum(DTYPE.itemsize * rows * columns for rows, columns in shapes)
        count = min(-(-WEIGHTS_BYTES // self.layer_bytes), MOST_LAYERS)
        self.weights = [tuple(weight(*shape) for shape in shapes) for _ in range(count)]
        self.norm = torch.ones(sizes.hidden, dtype=DTYPE, device=DEVICE)

    def seconds(self, num_tokens: int) -> float:
        """Seconds of a layer: the median of replays."""
        x = torch.randn(num_tokens, self.sizes.hidden, dtype=DTYPE, device=DEVICE)
        before = torch.zeros_like(x)
        attended = torch.randn(num_tokens, self.sizes.attended, dtype=DTYPE, device=DEVICE)

        def run() -> None:
            delta, residual = x, before
            for qkv, out, gate_up, down in self.weights:
                _, residual = norm_linear(delta, residual, self.norm, EPS, qkv, None)
                delta = linear(attended, out, None)
                inner, residual = norm_linear(
                    delta, residual, self.norm, EPS, gate_up, None, gated=True
                )
                delta = linear(inner, down, None)

        return statistics.median(captured_seconds(run, REPLAYS)) / len(self.weights)


def _never(*_: object, **_options: object) -> bool:
    return False


def measure(model: str, tokens: Sequence[int], bandwidth: float) -> list[dict[str, Any]]:
    """Time a model's layers, in turns with the kernel and without."""
    layers = Layers(MODELS[model])
    rows: list[dict[str, Any]] = []
    for num_tokens in tokens:
        skinny_linear.fits = _never
        before_s = layers.seconds(num_tokens)
        skinny_linear.fits = fits
        rows.append(
            {
                "model": model,
                "tokens": num_tokens,
                "before_s": before_s,
                "now_s": layers.seconds(num_tokens),
                "floor_s": layers.layer_bytes / bandwidth,
            }
        )
    return rows


def main() -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = device_copy_bandwidth()
    console = Console()
    rows: list[dict[str, Any]] = []
    table = Table("model", "tokens", "before, us", "now, us", "floor of the weights, us")
    for model in MODELS:
        torch.cuda.empty_cache()
        measured = measure(model, TOKENS, bandwidth)
        for row in measured:
            times = (f"{1e6 * row[key]:.1f}" for key in ("before_s", "now_s", "floor_s"))
            table.add_row(model, str(row["tokens"]), *times)
        rows += measured
        console.print(f"{model}: done")
    console.print(table)
    if arguments.output is not None:
        gpu = torch.cuda.get_device_name(DEVICE)
        save(
            arguments.output,
            {"gpu": gpu, "copy_bytes_per_s": bandwidth, "seed": 0, "layers": rows},
        )


if __name__ == "__main__":
    main()
