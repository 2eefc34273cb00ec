"""Recurrences, compared with their floors and with the references.

    python benchmarks/gpu/scan_kernels.py --output benchmarks/gpu/scan_kernels.json

Shapes are those of FalconMamba-7B (8192 channels of 16 numbers), Qwen3-Next-80B-A3B (16 key heads
and 32 value heads of 128), both with state in float32, and Falcon-H1-7B (24 heads of 128 by 256
numbers, state in bf16, with convolution and gate); inputs in bf16. A figure is the time of one
layer, the median over replays of a CUDA graph of several layers, whose states together overflow the
L2 cache. It takes about half a minute.

Floors: of rows that decode, to read and write the states once at the bandwidth of a device copy;
of Mamba-2 (`kernels/ssd_update.py`), to read them, to write a seventh of them, and to read and
write what is pending. Of chunks, the larger of two times: to read the inputs and write the results
once; and to compute. For the selective scan that is one exponential for each number of the state
and token, 16 for each SM and cycle; for the delta rule the products of the chunked form but its
triangular inverse, at the rate of a large product.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from aquifer.bench.floor import Rates
from aquifer.bench.result import save
from aquifer.bench.timing import replay_seconds
from aquifer.kernels import causal_conv, gated_delta, gated_norm, selective_scan, ssd, ssd_update
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.kernels.ssd_update import Pending

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
CHANNELS, STATE_SIZE = 8192, 16
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
CHUNK_TOKENS = 64  # of the delta rule
SSD_HEADS, SSD_DIM, SSD_SIZE, TAPS = 24, 128, 256, 4
SSD_CHUNK_TOKENS = 128
PLACES = 7  # of pending tokens
SCALE = DIM**-0.5
BATCHES = (1, 32, 256)
CHUNKS = ((1, 8192), (1, 1024), (8, 1024), (64, 20))  # spans, tokens of each
LEAST_STATE_BYTES = 256 << 20  # of all layers: several times the L2 cache
REPLAYS = 15
MAX_ERROR = 1e-2
# Those of the delta rule and of Mamba-2 have 16-bit products.
MAX_STATE_ERROR = {"selective": 1e-4, "delta": 1e-2, "ssd": 1e-2}
EXPONENTIALS_PER_CYCLE = 16  # of an SM
CLOCK_HZ = 1.98e9  # the highest of an H200

_Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Seven = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]


@dataclass(frozen=True)
class Result:
    """Seconds of one layer for each replay, its floor, and errors relative to the reference."""

    case: str
    layer_s: list[float]
    floor_s: float
    out_error: float
    state_error: float

    @property
    def median_s(self) -> float:
        """The median of the replays."""
        return statistics.median(self.layer_s)


@dataclass
class Kernel:
    """A kernel on random inputs, and what it is compared with.

    Args:
        case: its name.
        states: [slots, layers, *shape] float32.
        out: its results.
        run: runs it on one layer's states [slots, *shape].
        refer: runs the reference on states, and writes the results into the tensor given.
        floor_s: floor of a layer.
        max_state_error: largest relative error of the states.
        num_compared: numbers of a state, from the first, that are compared; None for all.
    """

    case: str
    states: torch.Tensor
    out: torch.Tensor
    run: Callable[[torch.Tensor], None]
    refer: Callable[[torch.Tensor, torch.Tensor], None]
    floor_s: float
    max_state_error: float
    num_compared: int | None = None

    def measure(self) -> Result:
        """Compare the results of one layer, then measure all of them."""
        own, expected_state = self.states[:, 0].clone(), self.states[:, 0].clone()
        self.out.fill_(torch.nan)
        expected = torch.empty_like(self.out)
        self.run(own)  # compiles
        self.refer(expected_state, expected)
        out_error = _error(self.out, expected)
        compared = slice(self.num_compared)
        state_error = _error(own[:, compared], expected_state[:, compared])
        assert out_error < MAX_ERROR, f"{self.case}: results differ by {out_error:.2e}"
        assert state_error < self.max_state_error, f"{self.case}: states by {state_error:.2e}"
        del own, expected_state, expected
        num_layers = self.states.shape[1]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for layer in range(num_layers):
                self.run(self.states[:, layer])
        graph.replay()
        seconds = [replay / num_layers for replay in replay_seconds(graph, REPLAYS)]
        return Result(self.case, seconds, self.floor_s, out_error, state_error)


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def _states(num_slots: int, *shape: int) -> torch.Tensor:
    """States of enough layers, [slots, layers, *shape]."""
    layer_bytes = num_slots * torch.Size(shape).numel() * 4
    num_layers = max(LEAST_STATE_BYTES // layer_bytes, 2)
    return torch.randn(num_slots, num_layers, *shape, device=DEVICE)


def _spans(num_spans: int, count: int) -> PrefillSpans:
    """Chunks of sequences that have state already."""
    offsets = [count * index for index in range(num_spans + 1)]
    return PrefillSpans.of(list(range(num_spans)), [1] * num_spans, offsets, DEVICE)


NO_LIMIT = (0.0, float("inf"))


class _Mamba2:
    """A layer's inputs and weights: z, x, b, c and dt as columns of one tensor."""

    def __init__(self, num_rows: int) -> None:
        width, both = SSD_HEADS * SSD_DIM, 2 * SSD_SIZE
        wide = _random(num_rows, 2 * width + both + SSD_HEADS)
        self.gate, self.inputs, self.dt = wide.split((width, width + both, SSD_HEADS), dim=1)
        self.taps = (_random(width + both, TAPS) / TAPS, _random(width + both))
        self.xbc = torch.empty_like(self.inputs.contiguous())
        self.y = _random(num_rows, SSD_HEADS, SSD_DIM)
        self.weights = [torch.randn(SSD_HEADS, device=DEVICE) for _ in range(3)]

    def states(self, num_slots: int) -> torch.Tensor:
        """States of enough layers, [slots, layers, numbers], those of `split` in turn."""
        numbers = sum(math.prod(shape) for shape in self._shapes())
        num_layers = max(LEAST_STATE_BYTES // (num_slots * numbers * 2), 2)
        states = _random(num_slots, num_layers, numbers)
        states[..., self.num_compared + self._num_inputs() :].view(torch.float32).uniform_(
            0.01, 0.1
        )
        return states

    @property
    def num_compared(self) -> int:
        """Numbers of convolution and state."""
        return sum(math.prod(shape) for shape in self._shapes()[:2])

    def _num_inputs(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes()[2:4])

    def split(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Pending]:
        """What the convolution keeps, the state, and what is pending."""
        conv, own, x, b, steps = (
            part.unflatten(1, shape)
            for part, shape in zip(
                state.split([math.prod(shape) for shape in self._shapes()], dim=1),
                self._shapes(),
                strict=True,
            )
        )
        # Each step is two of the numbers.
        wide = steps.flatten(1).view(torch.float32).unflatten(1, (PLACES, SSD_HEADS))
        return conv, own, Pending(x, b, wide)

    def _shapes(self) -> list[tuple[int, ...]]:
        channels = self.inputs.shape[1]
        return [
            (channels, TAPS - 1),
            (SSD_HEADS, SSD_DIM, SSD_SIZE),
            (PLACES, SSD_HEADS, SSD_DIM),
            (PLACES, 1, SSD_SIZE),
            (2 * PLACES, SSD_HEADS),
        ]

    def arguments(self) -> _Seven:
        """x, dt, a_log, b, c, d, dt_bias."""
        x, b, c = self.xbc.split((SSD_HEADS * SSD_DIM, SSD_SIZE, SSD_SIZE), dim=1)
        a_log, d, dt_bias = self.weights
        x = x.unflatten(1, (SSD_HEADS, SSD_DIM))
        return x, self.dt, a_log, b.unsqueeze(1), c.unsqueeze(1), d, dt_bias

    def gated(self, norm: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The results with their gate."""
        return norm(
            self.y.flatten(1), self.gate, None, eps=0.0, group_size=SSD_DIM, norm_before_gate=False
        )


class Cases:
    """The kernels to measure.

    Args:
        rates: peak rates of the device.
        exponentials_per_s: the rate of exponentials.
    """

    def __init__(self, rates: Rates, exponentials_per_s: float) -> None:
        self.rates = rates
        self.exponentials_per_s = exponentials_per_s

    def __iter__(self) -> Iterator[Kernel]:
        for batch in BATCHES:
            yield self.selective_update(batch)
            yield self.delta_update(batch)
            yield self.ssd_update(batch)
        for num_spans, count in CHUNKS:
            yield self.selective_chunks(num_spans, count)
            yield self.delta_chunks(num_spans, count)
            yield self.ssd_chunks(num_spans, count)

    def selective_update(self, batch: int) -> Kernel:
        """One token of each of `batch` sequences."""
        states = _states(batch, CHANNELS, STATE_SIZE)
        inputs = self._selective_inputs(batch)
        slots = torch.randperm(batch, device=DEVICE)
        positions = torch.ones_like(slots)
        out = _random(batch, CHANNELS)

        def run(state: torch.Tensor) -> None:
            selective_scan.selective_update(state, *inputs, slots, positions, out)

        def refer(state: torch.Tensor, into: torch.Tensor) -> None:
            selective_scan.selective_update_reference(state, *inputs, slots, positions, into)

        floor_s = 2 * states[:, 0].numel() * 4 / self.rates.bytes_per_s
        name = f"selective update {batch}"
        return Kernel(name, states, out, run, refer, floor_s, MAX_STATE_ERROR["selective"])

    def selective_chunks(self, num_spans: int, count: int) -> Kernel:
        """`count` tokens of each of `num_spans` sequences."""
        states = _states(num_spans, CHANNELS, STATE_SIZE)
        num_tokens = num_spans * count
        inputs = self._selective_inputs(num_tokens)
        spans = _spans(num_spans, count)
        out = _random(num_tokens, CHANNELS)

        def run(state: torch.Tensor) -> None:
            selective_scan.selective_chunks(state, *inputs, spans, out)

        def refer(state: torch.Tensor, into: torch.Tensor) -> None:
            selective_scan.selective_chunks_reference(state, *inputs, spans, into)

        read_s = 3 * out.numel() * DTYPE.itemsize / self.rates.bytes_per_s
        compute_s = num_tokens * CHANNELS * STATE_SIZE / self.exponentials_per_s
        name, floor_s = f"selective chunks {num_spans} x {count}", max(read_s, compute_s)
        return Kernel(name, states, out, run, refer, floor_s, MAX_STATE_ERROR["selective"])

    def _selective_inputs(self, num_rows: int) -> _Seven:
        """x, dt, a_log, b, c, d and dt_bias."""
        both = _random(num_rows, 2 * STATE_SIZE)
        rates = torch.arange(1, STATE_SIZE + 1, device=DEVICE).log().expand(CHANNELS, -1)
        return (
            _random(num_rows, CHANNELS),
            _random(num_rows, CHANNELS),
            rates.contiguous(),
            both[:, :STATE_SIZE],
            both[:, STATE_SIZE:],
            torch.randn(CHANNELS, device=DEVICE),
            torch.randn(CHANNELS, device=DEVICE) - 3,
        )

    def delta_update(self, batch: int) -> Kernel:
        """One token of each of `batch` sequences."""
        states = _states(batch, VALUE_HEADS, DIM, DIM)
        inputs = self._delta_inputs(batch)
        slots = torch.randperm(batch, device=DEVICE)
        positions = torch.ones_like(slots)
        out = _random(batch, VALUE_HEADS, DIM)

        def run(state: torch.Tensor) -> None:
            gated_delta.delta_update(state, *inputs, slots, positions, out, scale=SCALE)

        def refer(state: torch.Tensor, into: torch.Tensor) -> None:
            gated_delta.delta_update_reference(state, *inputs, slots, positions, into, scale=SCALE)

        floor_s = 2 * states[:, 0].numel() * 4 / self.rates.bytes_per_s
        name = f"delta update {batch}"
        return Kernel(name, states, out, run, refer, floor_s, MAX_STATE_ERROR["selective"])

    def delta_chunks(self, num_spans: int, count: int) -> Kernel:
        """`count` tokens of each of `num_spans` sequences."""
        states = _states(num_spans, VALUE_HEADS, DIM, DIM)
        num_tokens = num_spans * count
        inputs = self._delta_inputs(num_tokens)
        spans = _spans(num_spans, count)
        out = _random(num_tokens, VALUE_HEADS, DIM)

        def run(state: torch.Tensor) -> None:
            gated_delta.delta_chunks(state, *inputs, spans, out, scale=SCALE)

        def refer(state: torch.Tensor, into: torch.Tensor) -> None:
            gated_delta.delta_chunks_reference(state, *inputs, spans, into, scale=SCALE)

        elements = num_tokens * DIM * 2 * (KEY_HEADS + VALUE_HEADS)
        read_s = elements * DTYPE.itemsize / self.rates.bytes_per_s
        # With the state: K S, Q S, K^T U. Within a chunk: K K^T, Q K^T, and two products with U.
        operations = num_tokens * VALUE_HEADS * (6 * DIM * DIM + 8 * CHUNK_TOKENS * DIM)
        name = f"delta chunks {num_spans} x {count}"
        floor_s = max(read_s, operations / self.rates.operations_per_s)
        return Kernel(name, states, out, run, refer, floor_s, MAX_STATE_ERROR["delta"])

    def ssd_update(self, batch: int) -> Kernel:
        """One token of each of `batch` sequences: convolution, update, and gate."""
        slots = torch.randperm(batch, device=DEVICE)
        positions = torch.arange(PLACES - 1, PLACES - 1 + batch, device=DEVICE)
        layer = _Mamba2(batch)
        states, out = layer.states(batch), _random(batch, SSD_HEADS * SSD_DIM)

        def run(state: torch.Tensor) -> None:
            conv, own, pending = layer.split(state)
            causal_conv.conv_update(
                layer.inputs, *layer.taps, conv, slots, positions, layer.xbc, activation="silu"
            )
            ssd_update.state_update(
                own, pending, *layer.arguments(), slots, positions, layer.y, dt_limit=NO_LIMIT
            )
            out.copy_(layer.gated(gated_norm.gated_norm))

        def refer(state: torch.Tensor, into: torch.Tensor) -> None:
            conv, own, pending = layer.split(state)
            causal_conv.conv_update_reference(
                layer.inputs, *layer.taps, conv, slots, positions, layer.xbc, activation="silu"
            )
            ssd_update.state_update_reference(
                own, pending, *layer.arguments(), slots, positions, layer.y, dt_limit=NO_LIMIT
            )
            into.copy_(layer.gated(gated_norm.gated_norm_reference))

        conv_numbers = 2 * layer.xbc.shape[1] * (TAPS - 1)
        state_numbers = (1 + 1 / PLACES) * SSD_HEADS * SSD_DIM * SSD_SIZE
        pending_share = 1 / PLACES + (PLACES - 1) / (2 * PLACES)
        pending_numbers = pending_share * (states.shape[2] - layer.num_compared)
        moved = batch * (conv_numbers + state_numbers + pending_numbers)
        floor_s = moved * DTYPE.itemsize / self.rates.bytes_per_s
        name = f"ssd update {batch}"
        error = MAX_STATE_ERROR["ssd"]
        return Kernel(name, states, out, run, refer, floor_s, error, layer.num_compared)

    def ssd_chunks(self, num_spans: int, count: int) -> Kernel:
        """`count` tokens of each of `num_spans` sequences: convolution, scan, and gate."""
        num_tokens = num_spans * count
        spans, layer = _spans(num_spans, count), _Mamba2(num_tokens)
        states, out = layer.states(num_spans), _random(num_tokens, SSD_HEADS * SSD_DIM)

        def run(state: torch.Tensor) -> None:
            conv, own, pending = layer.split(state)
            causal_conv.conv_chunks(
                layer.inputs, *layer.taps, conv, spans, layer.xbc, activation="silu"
            )
            ssd.scan_chunks(own, pending, *layer.arguments(), spans, layer.y, dt_limit=NO_LIMIT)
            out.copy_(layer.gated(gated_norm.gated_norm))

        def refer(state: torch.Tensor, into: torch.Tensor) -> None:
            conv, own, pending = layer.split(state)
            causal_conv.conv_chunks_reference(
                layer.inputs, *layer.taps, conv, spans, layer.xbc, activation="silu"
            )
            ssd.scan_chunks_reference(
                own, pending, *layer.arguments(), spans, layer.y, dt_limit=NO_LIMIT
            )
            into.copy_(layer.gated(gated_norm.gated_norm_reference))

        columns = 2 * SSD_HEADS * SSD_DIM + 2 * SSD_SIZE
        read_s = num_tokens * (columns + SSD_HEADS * SSD_DIM) * 2 / self.rates.bytes_per_s
        # c b^T and its product with x within a chunk; into the state, and out of it.
        products = SSD_CHUNK_TOKENS * (SSD_SIZE + SSD_DIM) + 2 * SSD_DIM * SSD_SIZE
        operations = 2 * num_tokens * SSD_HEADS * products
        floor_s = max(read_s, operations / self.rates.operations_per_s)
        name = f"ssd chunks {num_spans} x {count}"
        error = MAX_STATE_ERROR["ssd"]
        return Kernel(name, states, out, run, refer, floor_s, error, layer.num_compared)

    def _delta_inputs(self, num_rows: int) -> _Five:
        """q, k, v, g and beta; the first three are columns of one tensor, as in the model."""
        wide = _random(num_rows, (2 * KEY_HEADS + VALUE_HEADS) * DIM)
        q, k, v = wide.split((KEY_HEADS * DIM, KEY_HEADS * DIM, VALUE_HEADS * DIM), dim=1)
        gates = _random(num_rows, 2 * VALUE_HEADS)
        g, beta = gated_delta.delta_gates(
            gates[:, :VALUE_HEADS],
            gates[:, VALUE_HEADS:],
            torch.randn(VALUE_HEADS, device=DEVICE),
            torch.randn(VALUE_HEADS, device=DEVICE) - 2,
        )
        q, k, v = (each.unflatten(1, (-1, DIM)) for each in (q, k, v))
        return q, k, v, g, beta


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(DEVICE)
    per_cycle = EXPONENTIALS_PER_CYCLE * properties.multi_processor_count
    rates = Rates.measure(DEVICE, DTYPE)
    results: list[dict[str, Any]] = []
    for kernel in Cases(rates, per_cycle * CLOCK_HZ):
        result = kernel.measure()
        print(
            f"{result.case:30} {result.median_s * 1e6:8.1f} us, floor {result.floor_s * 1e6:8.1f},"
            f" ratio {result.median_s / result.floor_s:5.2f}, errors {result.out_error:.1e} of"
            f" results, {result.state_error:.1e} of states",
            flush=True,
        )
        results.append({**asdict(result), "median_s": result.median_s})
        del kernel
        torch.cuda.empty_cache()
    if arguments.output is not None:
        figures = {
            "gpu": {"name": properties.name, "multiprocessors": properties.multi_processor_count},
            "triton": triton.__version__,
            "clock_hz": CLOCK_HZ,
            "copy_gb_per_s": rates.bytes_per_s / 1e9,
            "product_tflop_per_s": rates.operations_per_s / 1e12,
            "results": results,
        }
        save(arguments.output, figures)


if __name__ == "__main__":
    main()
