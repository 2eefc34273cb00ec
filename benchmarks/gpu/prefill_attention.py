"""Rate of prefill attention: our kernels and others over token-major KV of all layers.

TFLOP/s count the operations of causal attention: 4 per visible pair of a query and a key, head and
dimension. Calls alternate over the layers, and are queued on the GPU behind a pause, so that the
figures contain no host time, which is given beside them. PyTorch's FlashAttention-2 and cuDNN are
for comparison only. cuDNN has no causal mask that ends at the last key: of chunks after a prefix,
its two calls are measured, over the prefix and over the chunk, without the merge of their results.

    python benchmarks/gpu/prefill_attention.py --output result.json
    python benchmarks/gpu/prefill_attention.py --sweep --output sweep.json

Also: a ragged batch in one launch and in one cuDNN call per sequence; and the time of cuDNN's first
call for a new shape. `--sweep` also tries some configs of the Triton kernel.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from aquifer.bench.result import save
from aquifer.kernels.prefill_attention import (
    Config,
    PrefillSpans,
    default_config,
    prefill_attention,
    prefill_attention_reference,
    prefill_attention_triton,
)

HEAD_DIM = 128
BLOCK_SIZE = 16
NUM_LAYERS = 32
DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5
PAUSE_CYCLES = 40_000_000  # about 20 ms
MAX_CALLS = 16
CALLS_S = 0.02  # duration of one measurement, of at most MAX_CALLS calls
ASSUMED_FLOPS = 4e14
HEADS = ((32, 8), (16, 8))

CONFIGS = (
    Config(128, 64, 8, 2),
    Config(128, 64, 8, 3),
    Config(128, 64, 8, 4),
    Config(128, 128, 8, 2),
    Config(128, 128, 8, 3),
    Config(128, 32, 8, 3),
    Config(64, 64, 4, 2),
    Config(64, 64, 4, 3),
    Config(64, 32, 4, 3),
)

CONTIGUOUS, PAGED = (
    default_config(HEAD_DIM, HEAD_DIM, DTYPE, paged=paged) for paged in (False, True)
)


@dataclass(frozen=True)
class Shape:
    """Chunks of (start, count) tokens, each of a different sequence."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int

    @property
    def flops(self) -> float:
        """Operations of one layer."""
        pairs = sum(count * start + count * (count + 1) / 2 for start, count in self.chunks)
        return 4 * pairs * self.num_heads * HEAD_DIM


def make_shapes(num_heads: int, num_kv_heads: int) -> list[Shape]:
    """Return all shapes with round lengths."""
    chunks = {
        "1x2048": ((0, 2048),),
        "4x2048": ((0, 2048),) * 4,
        "1x8192": ((0, 8192),),
        "1x32768": ((0, 32768),),
        "8192 after 57344": ((57344, 8192),),
        "2048 after 6144": ((6144, 2048),),
        "512 after 15872": ((15872, 512),),
        "500 after 6000": ((6000, 500),),
        "7x500 after 6000": ((6000, 500),) * 7,
    }
    return [Shape(name, some, num_heads, num_kv_heads) for name, some in chunks.items()]


def ragged_shape(num_heads: int, num_kv_heads: int) -> Shape:
    """Return a shape of 16 prompts of 100 to 1024 tokens."""
    lengths = random.Random(0)
    chunks = tuple((0, lengths.randint(100, 1024)) for _ in range(16))
    return Shape("16 ragged", chunks, num_heads, num_kv_heads)


class Batch:
    """Random tensors of one shape. Both layouts use the same KV."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        max_tokens = max(start + count for start, count in shape.chunks)
        max_tokens = -(-max_tokens // BLOCK_SIZE) * BLOCK_SIZE
        num_slots = len(shape.chunks)
        # [slots, tokens, layers, K and V, kv_heads, dim]
        self.kv = torch.empty(
            num_slots,
            max_tokens,
            NUM_LAYERS,
            2,
            shape.num_kv_heads,
            HEAD_DIM,
            dtype=DTYPE,
            device="cuda",
        )
        for slot in self.kv:
            slot.normal_()
        offsets = [0]
        for _, count in shape.chunks:
            offsets.append(offsets[-1] + count)
        self.query = torch.randn(offsets[-1], shape.num_heads, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.out = torch.empty_like(self.query)
        self.device = self.query.device
        starts = [start for start, _ in shape.chunks]
        self.spans = PrefillSpans.of([*range(num_slots)], starts, offsets, self.device)
        num_blocks = num_slots * max_tokens // BLOCK_SIZE
        self.tables = torch.arange(num_blocks, device="cuda").view(num_slots, -1)

    def layer_kv(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, [slots, tokens, kv_heads, dim] each."""
        keys, values = self.kv[:, :, call % NUM_LAYERS].unbind(2)
        return keys, values

    def ours(self, call: int) -> None:
        """Run as the engine does: on Hopper, the kernel for it."""
        prefill_attention(self.query, *self.layer_kv(call), None, self.spans, self.out, scale=SCALE)

    def triton(self, config: Config, call: int) -> None:
        """Run everything in our Triton kernel."""
        prefill_attention_triton(
            self.query,
            *self.layer_kv(call),
            None,
            self.spans,
            self.out,
            config=config,
            scale=SCALE,
        )

    def triton_paged(self, config: Config, call: int) -> None:
        """Run likewise, through block tables."""
        keys, values = (
            kv.unflatten(1, (-1, BLOCK_SIZE)).flatten(0, 1) for kv in self.layer_kv(call)
        )
        prefill_attention_triton(
            self.query,
            keys,
            values,
            self.tables,
            self.spans,
            self.out,
            config=config,
            scale=SCALE,
        )

    def flash(self, call: int) -> None:
        """Run FlashAttention-2 (its causal mask is aligned to the last key); equal lengths only."""
        start, count = self.shape.chunks[0]
        keys, values = (kv[:, : start + count].transpose(1, 2) for kv in self.layer_kv(call))
        query = self.query.unflatten(0, (-1, count)).transpose(1, 2)
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, True, False, scale=SCALE
        )
        self.out.unflatten(0, (-1, count)).copy_(result[0].transpose(1, 2))

    def cudnn_one_by_one(self, call: int) -> None:
        """Run one cuDNN call per sequence, from its first token."""
        keys, values = self.layer_kv(call)
        for slot, (_, count) in enumerate(self.shape.chunks):
            rows = slice(self.spans.offsets[slot], self.spans.offsets[slot + 1])
            self.out[rows] = cudnn(self.query[rows], keys[slot, :count], values[slot, :count])

    def cudnn_after_prefixes(self, call: int) -> None:
        """Run two cuDNN calls per sequence, without the merge: the results are of no use."""
        keys, values = self.layer_kv(call)
        for slot, (start, count) in enumerate(self.shape.chunks):
            rows = self.query[self.spans.offsets[slot] : self.spans.offsets[slot + 1]]
            for part, is_causal in ((slice(start), False), (slice(start, start + count), True)):
                cudnn(rows, keys[slot, part], values[slot, part], is_causal=is_causal)

    def check(self, run: Callable[[int], None]) -> float:
        """Compare some rows with the reference in float32; return the largest relative error."""
        call = NUM_LAYERS - 1
        self.out.fill_(torch.nan)
        run(call)
        assert self.out.isfinite().all(), "rows were left out"
        generator = random.Random(0)
        rows, slots, positions = [], [], []
        for slot, (start, count) in enumerate(self.shape.chunks):
            for token in {0, count - 1, *(generator.randrange(count) for _ in range(4))}:
                rows.append(self.spans.offsets[slot] + token)
                slots.append(slot)
                positions.append(start + token)
        spans = PrefillSpans.of(slots, positions, [*range(len(rows) + 1)], self.device)
        query = self.query[rows].float()
        expected = torch.full_like(query, torch.nan)
        prefill_attention_reference(query, *self.layer_kv(call), None, spans, expected, scale=SCALE)
        errors = (self.out[rows].float() - expected).flatten(1).norm(dim=1)
        error = float((errors / expected.flatten(1).norm(dim=1)).max())
        assert error < 1e-2, f"relative error {error:.2e}"
        return error


def cudnn(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool = True
) -> torch.Tensor:
    """Run cuDNN for one sequence; all tensors are [tokens, heads, dim]."""
    q, k, v = (t.unsqueeze(0).transpose(1, 2) for t in (query, keys, values))
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, not is_causal, 0.0, is_causal, False, scale=SCALE
    )[0]
    return result[0].transpose(0, 1)


def measure(run: Callable[[int], None], num_calls: int, repeats: int) -> tuple[list[float], float]:
    """Measure the seconds of a call: on the GPU for each repeat, and the median on the host."""
    run(0)
    gpu_s, host_s = [], []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(PAUSE_CYCLES)
        begin.record()
        host_begin = time.perf_counter()
        for call in range(num_calls):
            run(call)
        host_s.append((time.perf_counter() - host_begin) / num_calls)
        end.record()
        torch.cuda.synchronize()
        gpu_s.append(begin.elapsed_time(end) / 1e3 / num_calls)
    return gpu_s, statistics.median(host_s)


def measure_way(batch: Batch, way: str, run: Callable[[int], None], repeats: int) -> dict[str, Any]:
    """Check, measure and print one implementation."""
    shape = batch.shape
    error = None if run == batch.cudnn_after_prefixes else batch.check(run)
    num_calls = max(2, min(MAX_CALLS, int(CALLS_S * ASSUMED_FLOPS / shape.flops)))
    gpu_s, host_s = measure(run, num_calls, repeats)
    seconds = statistics.median(gpu_s)
    figures = {
        "shape": shape.name,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "way": way,
        "layer_s": gpu_s,
        "tflop_per_s": shape.flops / seconds / 1e12,
        "host_s": host_s,
        "relative_error": error,
    }
    print(
        f"{shape.name:16} {shape.num_heads}/{shape.num_kv_heads} {way:24}"
        f"{seconds * 1e6:9.1f} us, {figures['tflop_per_s']:4.0f} TFLOP/s, "
        f"host {host_s * 1e6:4.0f} us, error {error}",
        flush=True,
    )
    return figures


def measure_first_calls() -> list[dict[str, Any]]:
    """Measure the first and later cuDNN calls, for new lengths."""
    batch = Batch(Shape("first calls", ((0, 2048),), *HEADS[0]))
    keys, values = batch.layer_kv(0)
    results = []
    for tokens in range(301, 301 + 8 * 211, 211):
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            cudnn(batch.query[:tokens], keys[0, :tokens], values[0, :tokens])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        results.append({"tokens": tokens, "first_s": seconds[0], "warm_s": min(seconds[1:])})
    return results


def measure_ragged(repeats: int) -> list[dict[str, Any]]:
    """Measure the ragged batch in one launch, and one sequence at a time."""
    results = []
    for heads in HEADS:
        batch = Batch(ragged_shape(*heads))
        ways: dict[str, Callable[[int], None]] = {
            "ours": batch.ours,
            "triton": partial(batch.triton, CONTIGUOUS),
            "triton paged": partial(batch.triton_paged, PAGED),
            "cuDNN": batch.cudnn_one_by_one,
        }
        results += [measure_way(batch, way, run, repeats) for way, run in ways.items()]
    return results


def sweep(repeats: int) -> list[dict[str, Any]]:
    """Measure the Triton kernel with several configs, on two shapes; print the best."""
    results = []
    for shape in make_shapes(*HEADS[0]):
        if shape.name not in ("4x2048", "1x8192"):
            continue
        batch = Batch(shape)
        tried = []
        for config in CONFIGS:
            way = "x".join(str(n) for n in asdict(config).values())
            try:
                figures = measure_way(batch, way, partial(batch.triton, config), repeats)
            except OutOfResources as error:
                print(f"{shape.name:16} {way}: {error}", flush=True)
                continue
            tried.append(figures | {"config": asdict(config)})
        best = max(tried, key=lambda figures: figures["tflop_per_s"])
        print(f"best of {shape.name}: {best['config']}, {best['tflop_per_s']:.0f} TFLOP/s")
        results += tried
    return results


def print_table(results: list[dict[str, Any]], first_calls: list[dict[str, Any]]) -> None:
    """Print TFLOP/s of each implementation, one line per shape; then the times of cuDNN's plans."""
    ways = list(dict.fromkeys(figures["way"] for figures in results))
    rates: dict[tuple[str, str], dict[str, float]] = {}
    for figures in results:
        heads = f"{figures['num_heads']}/{figures['num_kv_heads']}"
        rates.setdefault((figures["shape"], heads), {})[figures["way"]] = figures["tflop_per_s"]
    print("\nTFLOP/s                 " + "".join(f"{way:>20}" for way in ways))
    for (name, heads), row in rates.items():
        cells = (f"{row[way]:20.0f}" if way in row else " " * 20 for way in ways)
        print(f"{name:16} {heads:7}" + "".join(cells))
    first = ", ".join(f"{1e3 * figures['first_s']:.0f}" for figures in first_calls)
    warm = ", ".join(f"{1e3 * figures['warm_s']:.2f}" for figures in first_calls)
    print(f"cuDNN, 8 new lengths: first call {first} ms; later {warm} ms")


def main() -> None:
    """Measure everything; with `--sweep` also several configs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="try other configs first")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch.cuda.get_device_properties(0)
    print(f"{device.name}, cuDNN {torch.backends.cudnn.version()}", flush=True)
    with torch.inference_mode():
        swept = sweep(arguments.repeats) if arguments.sweep else []
        first_calls = measure_first_calls()
        results = []
        for heads in HEADS:
            for shape in make_shapes(*heads):
                batch = Batch(shape)
                ways: dict[str, Callable[[int], None]] = {
                    "ours": batch.ours,
                    "triton": partial(batch.triton, CONTIGUOUS),
                    "triton paged": partial(batch.triton_paged, PAGED),
                    "FlashAttention-2": batch.flash,
                    "cuDNN": batch.cudnn_one_by_one,
                }
                if shape.chunks[0][0]:
                    ways["cuDNN"] = batch.cudnn_after_prefixes
                for way, run in ways.items():
                    results.append(measure_way(batch, way, run, arguments.repeats))
                del batch, ways, run
        results += measure_ragged(arguments.repeats)
    print_table(results, first_calls)
    save(
        arguments.output,
        {
            "gpu": {"name": device.name, "multiprocessors": device.multi_processor_count},
            "triton": triton.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "seed": 0,
            "default_configs": {"contiguous": asdict(CONTIGUOUS), "paged": asdict(PAGED)},
            "results": results,
            "cudnn_first_calls": first_calls,
            "sweep": swept,
        },
    )


if __name__ == "__main__":
    main()
