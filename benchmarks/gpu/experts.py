"""Time of a layer's mixture of experts, for each candidate tile, compared with its floor.

    python benchmarks/gpu/experts.py --output benchmarks/gpu/experts.json

The layer runs several times in one CUDA graph, each time with other choices of experts, drawn
uniformly, so that weights come from memory as in a model; the figure is the median over replays of
the time of one run. The floor is the larger of two times: to read the weights of the experts that
are chosen, each once, at the bandwidth of a copy; and to do the operations at the rate of a large
matrix product. A floor below two microseconds means little: a kernel launch takes as long.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from aquifer.bench.floor import Rates
from aquifer.bench.result import save
from aquifer.bench.timing import replay_seconds
from aquifer.kernels.experts import (
    Activation,
    ExpertTile,
    Routing,
    best_expert_tile,
    expert_tiles,
    experts,
    route,
)

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
TOKENS = (1, 32, 128, 8192)
REPLAYS = 5
MIN_CHOICES, MAX_CHOICES = 2, 8


@dataclass(frozen=True)
class LayerShape:
    """Shape of a layer of experts."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int
    routing: Routing
    activation: Activation = "silu"
    interleaved: bool = False
    has_bias: bool = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's matrices."""
        return 3 * self.hidden * self.width * DTYPE.itemsize

    def operations(self, tokens: int) -> int:
        """Floating-point operations of the products."""
        return 2 * 3 * self.hidden * self.width * tokens * self.top_k


LAYERS = (
    LayerShape("Qwen3-30B-A3B", 2048, 768, 128, 8, Routing(normalise=True, rounds_weights=True)),
    LayerShape(
        "GPT-OSS-20B", 2880, 2880, 32, 4, Routing("softmax_of_chosen"),
        "clamped_swiglu", interleaved=True, has_bias=True,
    ),
    LayerShape("DeepSeek-V2-Lite", 2048, 1408, 64, 6, Routing()),
    LayerShape("Mixtral-8x7B", 4096, 14336, 8, 2, Routing(normalise=True)),
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A layer with random weights."""

    shape: LayerShape
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @classmethod
    def random(cls, shape: LayerShape) -> Layer:
        """Return a layer with random weights."""
        gate_up = random(shape.experts, 2 * shape.width, shape.hidden).mul_(shape.hidden**-0.5)
        down = random(shape.experts, shape.hidden, shape.width).mul_(shape.width**-0.5)
        if not shape.has_bias:
            return cls(shape, gate_up, down, None, None)
        biases = random(shape.experts, 2 * shape.width), random(shape.experts, shape.hidden)
        return cls(shape, gate_up, down, *biases)

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, tile: ExpertTile
    ) -> torch.Tensor:
        """Run the experts."""
        return experts(
            x, self.gate_up, self.down, ids, weights, self.shape.activation, self.gate_up_bias,
            self.down_bias, interleaved=self.shape.interleaved, tile=tile,
        )  # fmt: skip


def random(*shape: int) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def seconds_of(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Measure the mean seconds of the runs in one CUDA graph, for each replay."""
    for run in runs:
        run()  # the first compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    return [seconds / len(runs) for seconds in replay_seconds(graph, REPLAYS)]


def measure(
    layer: Layer, tokens: int, rates: Rates, candidates: Sequence[ExpertTile]
) -> dict[str, Any]:
    """Time a layer with each candidate, and its router, and print the times."""
    shape = layer.shape
    x = random(tokens, shape.hidden)
    cache_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    step_bytes = min(tokens * shape.top_k, shape.experts) * shape.expert_bytes
    num_choices = min(max(3 * cache_bytes // step_bytes, MIN_CHOICES), MAX_CHOICES)
    logits = [random(tokens, shape.experts) for _ in range(num_choices)]
    choices = [route(each, shape.top_k, shape.routing) for each in logits]
    num_chosen = statistics.mean(len(ids.unique()) for ids, _ in choices)
    read_s = num_chosen * shape.expert_bytes / rates.bytes_per_s
    compute_s = shape.operations(tokens) / rates.operations_per_s
    floor_s = max(read_s, compute_s)
    routing_s = seconds_of(
        [functools.partial(route, each, shape.top_k, shape.routing) for each in logits]
    )
    print(
        f"{shape.name}, {tokens} tokens, {num_chosen:.1f} experts chosen: floor"
        f" {floor_s * 1e6:.1f} us (read {read_s * 1e6:.1f}, compute {compute_s * 1e6:.1f}), router"
        f" {statistics.median(routing_s) * 1e6:.1f} us"
    )
    best = best_expert_tile(tokens, shape.top_k, shape.experts)
    times: list[dict[str, Any]] = []
    for tile in candidates:
        runs = [functools.partial(layer.run, x, *choice, tile) for choice in choices]
        try:
            seconds = seconds_of(runs)
        except OutOfResources:
            continue  # more shared memory than this device has
        times.append({"tile": asdict(tile), "is_best_tile": tile == best, "seconds": seconds})
    for time in sorted(times, key=lambda time: statistics.median(time["seconds"])):
        median = statistics.median(time["seconds"])
        mark = "  <- best_expert_tile" if time["is_best_tile"] else ""
        name = " ".join(f"{field} {value}" for field, value in time["tile"].items())
        print(
            f"  {median * 1e6:10.1f} us  {median / floor_s:6.2f} x floor  {name}{mark}", flush=True
        )
    return {
        "model": shape.name,
        "tokens": tokens,
        "chosen_experts": num_chosen,
        "read_floor_s": read_s,
        "compute_floor_s": compute_s,
        "router_seconds": routing_s,
        "tiles": times,
    }


def main() -> None:
    """Print the tables, and write the results with every repeat."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--models", nargs="*", default=[shape.name for shape in LAYERS])
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--best", action="store_true", help="measure `best_expert_tile` only")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rates = Rates.measure(DEVICE, DTYPE)
    gpu = torch.cuda.get_device_name(DEVICE)
    print(
        f"{gpu}, copy {rates.bytes_per_s / 1e12:.2f} TB/s read plus written,"
        f" products {rates.operations_per_s / 1e12:.0f} TFLOP/s\n"
    )
    rows: list[dict[str, Any]] = []
    for shape in LAYERS:
        if shape.name not in arguments.models:
            continue
        layer = Layer.random(shape)
        for tokens in arguments.tokens:
            sizes = tokens, shape.top_k, shape.experts
            candidates = (best_expert_tile(*sizes),) if arguments.best else expert_tiles(*sizes)
            rows.append(measure(layer, tokens, rates, candidates))
        del layer
        torch.cuda.empty_cache()
    if arguments.output is not None:
        figures = {"gpu": gpu, "cuda": torch.version.cuda, "seed": 0, **asdict(rates)}
        save(arguments.output, {**figures, "layers": rows})


if __name__ == "__main__":
    main()
