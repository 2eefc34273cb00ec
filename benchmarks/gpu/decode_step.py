"""Time of all kernels of a decode step in one CUDA graph, compared with its memory-bound floor.

    python benchmarks/gpu/decode_step.py --output benchmarks/gpu/decode_step.json

Random weights of two models; every sequence has 576 tokens of KV, in one token-major cache for all
layers. The step is that of `aquifer.models.decoder`: embedding, angles, and for each layer norm
with QKV, rotation and cache write, attention, output, norm with gate-up and activation, down;
then norm, head and greedy sampling. The floor is weights and KV read once at the rate of a device
copy.

First the hidden states after two layers are compared with the plain torch references, for each
variant. Those after all layers are compared with the variant without overlapping kernels, over
many replays, with other tokens each time, and with all memory of the graph poisoned before.
Variants are timed for few batch sizes only. A profile of one replay gives the time of each kernel,
which includes its wait where kernels overlap.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from aquifer.bench.result import save
from aquifer.bench.timing import replay_seconds
from aquifer.kernels import _triton, hopper_linear, skinny_linear
from aquifer.kernels import linear as linear_module
from aquifer.kernels.activation import silu_mul_reference
from aquifer.kernels.decode_attention import (
    Config,
    DecodeWorkspaces,
    Workspace,
    decode_attention,
    decode_attention_reference,
)
from aquifer.kernels.linear import Shape as ProductShape
from aquifer.kernels.linear import Tile, best_tile, linear, norm_linear
from aquifer.kernels.norm import add_rms_norm, rms_norm_reference
from aquifer.kernels.rotary import (
    qk_norm_rope_write,
    qk_norm_rope_write_reference,
    rotary_angles,
)
from aquifer.kernels.sampling.columns import SamplingColumns
from aquifer.kernels.sampling.sample import sample

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
COPY_BYTES_PER_S = 4.26e12  # an H200's, read plus written
TOKENS = 576  # length of each sequence, the step's own token included
BLOCK_SIZE = 16
CAPACITY_TOKENS = 592  # a multiple of the block size; KV beyond TOKENS is NaN
BATCHES = (1, 8, 32, 128, 256)
VARIANT_BATCHES = (1, 32, 128)
CHECKED_BATCHES = (1, 5, 32)
CHECKED_REPLAYS = 20
COMPARED_REPLAYS = 100
PROFILED_BATCHES = (1, 32, 256)
EPS = 1e-6
REPLAYS = 20
MAX_ERROR = 2e-2


@dataclass(frozen=True)
class Shape:
    """Shape of a model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    qk_norm: bool
    tied: bool
    head_dim: int = 128

    @property
    def kv_elements(self) -> int:
        """Elements of K of one token in one layer; V has as many."""
        return self.kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Weight bytes that a step reads: all except the embedding, of which it reads few rows."""
        q = self.heads * self.head_dim
        layer = self.hidden * (2 * q + 2 * self.kv_elements + 3 * self.intermediate)
        return (self.layers * layer + self.vocab * self.hidden) * DTYPE.itemsize

    def floor_s(self, batch: int) -> float:
        """Time to read weights and KV once."""
        kv_bytes = batch * TOKENS * self.layers * 2 * self.kv_elements * DTYPE.itemsize
        return (self.weight_bytes + kv_bytes) / COPY_BYTES_PER_S


TARGETS_MS = {
    "Qwen3-0.6B": {1: 0.75, 32: 1.6, 128: 3.3, 256: 5.6},
    "Llama-3-8B": {1: 4.2, 32: 5.1, 128: 7.5, 256: 12.1},
}
SHAPES = (
    Shape("Qwen3-0.6B", 28, 1024, 16, 8, 3072, 151936, qk_norm=True, tied=True),
    Shape("Llama-3-8B", 32, 4096, 32, 8, 14336, 128256, qk_norm=False, tied=False),
)


_FITS: dict[Any, Any] = {module: module.fits for module in (hopper_linear, skinny_linear)}


@dataclass(frozen=True)
class Variant:
    """Options with which a step runs."""

    name: str
    overlaps: bool = True
    merges_itself: bool = True
    cublas: bool = False  # for several rows

    def apply(self) -> None:
        """Set the options that are module attributes."""
        _triton.overlap = self.overlaps
        linear_module.best_tile = _one_row_tile if self.cublas else best_tile
        for module, fits in _FITS.items():
            module.fits = _never if self.cublas else fits


def _one_row_tile(shape: ProductShape, *, gated: bool = False) -> Tile | None:
    return best_tile(shape, gated=gated) if shape.tokens == 1 else None


def _never(*_: object, **_options: object) -> bool:
    return False


DEFAULT = Variant("default")
SERIAL = Variant("no overlap", overlaps=False)
VARIANTS = (
    DEFAULT,
    SERIAL,
    Variant("merge in a second kernel", merges_itself=False),
    Variant("cuBLAS for several rows", cublas=True),
)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer."""

    norm1: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    norm2: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """Random weights, and KV for the largest batch."""

    def __init__(self, shape: Shape, max_batch: int) -> None:
        self.shape = s = shape
        self.layers = [self._layer() for _ in range(s.layers)]
        self.norm = _norm_weight(s.hidden)
        self.embed = _matrix(s.vocab, s.hidden)
        self.head = self.embed if s.tied else _matrix(s.vocab, s.hidden)
        half = s.head_dim // 2
        self.frequencies = 10000.0 ** (-torch.arange(half, device=DEVICE) / half)
        # [slots, tokens, layers, K and V]
        self.kv = torch.empty(
            max_batch, CAPACITY_TOKENS, s.layers, 2 * s.kv_elements, dtype=DTYPE, device=DEVICE
        )
        for slot in self.kv:
            slot.normal_()
            slot[TOKENS - 1 :] = torch.nan  # the step itself writes the first of them
        self.workspaces = DecodeWorkspaces()

    def _layer(self) -> Layer:
        s = self.shape
        q = s.heads * s.head_dim
        return Layer(
            norm1=_norm_weight(s.hidden),
            qkv=_matrix(q + 2 * s.kv_elements, s.hidden),
            q_norm=_norm_weight(s.head_dim) if s.qk_norm else None,
            k_norm=_norm_weight(s.head_dim) if s.qk_norm else None,
            out=_matrix(s.hidden, q),
            norm2=_norm_weight(s.hidden),
            gate_up=_matrix(2 * s.intermediate, s.hidden),
            down=_matrix(s.hidden, s.intermediate),
        )


def _matrix(num_out: int, num_in: int) -> torch.Tensor:
    """Random matrix, scaled so that products have about the magnitude of their input."""
    return torch.empty(num_out, num_in, dtype=DTYPE, device=DEVICE).normal_(std=num_in**-0.5)


def _norm_weight(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=DTYPE, device=DEVICE).normal_(mean=1.0, std=0.1)


class Step:
    """One decode step of a batch, in either layout."""

    def __init__(self, model: Model, batch: int, *, paged: bool) -> None:
        self.model, self.batch, self.paged = model, batch, paged
        s = model.shape
        self.slots = torch.randperm(len(model.kv), device=DEVICE)[:batch]
        self.token_ids = torch.randint(s.vocab, (batch,), device=DEVICE)
        self.positions = torch.full((batch,), TOKENS - 1, device=DEVICE)
        self.lengths = self.positions + 1
        self.columns = SamplingColumns.empty(len(model.kv), 0, s.vocab, DEVICE)
        self.next_ids = torch.empty_like(self.token_ids)
        self.tables: torch.Tensor | None = None
        kv = model.kv
        self.first, self.second = self.slots, self.positions
        if paged:
            # Blocks of one position are permuted among slots, so that NaN stays at the ends.
            per_slot = CAPACITY_TOKENS // BLOCK_SIZE
            order = torch.rand(len(kv), per_slot, device=DEVICE).argsort(0)
            self.tables = order * per_slot + torch.arange(per_slot, device=DEVICE)
            kv = kv.unflatten(1, (-1, BLOCK_SIZE)).flatten(0, 1)
            self.first = self.tables[self.slots, self.positions // BLOCK_SIZE]
            self.second = self.positions % BLOCK_SIZE
        heads = kv.unflatten(-1, (2, s.kv_heads, s.head_dim))  # [.., .., layers, 2, heads, dim]
        self.layer_kv = [(heads[:, :, i, 0], heads[:, :, i, 1]) for i in range(model.shape.layers)]

    def workspace(self, variant: Variant) -> tuple[Workspace, Config]:
        """Return workspace and config of decode attention."""
        s = self.model.shape
        query = torch.empty(self.batch, s.heads, s.head_dim, dtype=DTYPE, device="meta")
        workspace, config = self.model.workspaces.get(query, self.layer_kv[0][1], paged=self.paged)
        return workspace, replace(config, merges_itself=variant.merges_itself)

    def run(self, variant: Variant) -> torch.Tensor:
        """Run the kernels; return the normalised hidden states. Overwrites `next_ids`."""
        m, s = self.model, self.model.shape
        workspace, config = self.workspace(variant)
        residual = F.embedding(self.token_ids, m.embed)
        cos, sin = rotary_angles(self.positions, m.frequencies, 1.0)
        delta: torch.Tensor | None = None
        for layer, kv in zip(m.layers, self.layer_kv, strict=True):
            qkv, residual = norm_linear(delta, residual, layer.norm1, EPS, layer.qkv, None)
            query = qkv.new_empty(self.batch, s.heads, s.head_dim)
            qk_norm_rope_write(
                qkv, layer.q_norm, layer.k_norm, cos, sin, query, *kv, self.first, self.second,
                eps=EPS,
            )  # fmt: skip
            attended = torch.empty_like(query)
            decode_attention(
                query, *kv, self.tables, self.slots, self.lengths, attended, workspace, config,
                scale=s.head_dim**-0.5,
            )  # fmt: skip
            delta = linear(attended.flatten(1), layer.out, None)
            activated, residual = norm_linear(
                delta, residual, layer.norm2, EPS, layer.gate_up, None, gated=True
            )
            delta = linear(activated, layer.down, None)
        assert delta is not None
        hidden = add_rms_norm(delta, residual, m.norm, EPS)
        logits = linear(hidden, m.head, None)
        sample(logits, self.slots, self.lengths, self.columns, self.next_ids, variant="greedy")
        return hidden

    def reference(self) -> torch.Tensor:
        """Compute the same with the plain torch references; attention in float32."""
        m, s = self.model, self.model.shape
        stream = F.embedding(self.token_ids, m.embed)
        angles = self.positions.float()[:, None] * m.frequencies
        for layer, (keys, values) in zip(m.layers, self.layer_kv, strict=True):
            qkv = F.linear(rms_norm_reference(stream, layer.norm1, EPS), layer.qkv)
            query = qkv.new_empty(self.batch, s.heads, s.head_dim)
            qk_norm_rope_write_reference(
                qkv, layer.q_norm, layer.k_norm, angles.cos(), angles.sin(), query, keys, values,
                self.first, self.second, eps=EPS,
            )  # fmt: skip
            attended = torch.empty_like(query, dtype=torch.float32)
            decode_attention_reference(
                query.float(), keys, values, self.tables, self.slots, self.lengths, attended,
                scale=s.head_dim**-0.5,
            )  # fmt: skip
            stream = stream + F.linear(attended.to(DTYPE).flatten(1), layer.out)
            gate_up = F.linear(rms_norm_reference(stream, layer.norm2, EPS), layer.gate_up)
            stream = stream + F.linear(silu_mul_reference(gate_up), layer.down)
        return rms_norm_reference(stream, m.norm, EPS)

    def written(self) -> torch.Tensor:
        """Copy K and V of the step's own tokens in all layers."""
        return torch.stack(
            [torch.stack([k[self.first, self.second], v[self.first, self.second]])
             for k, v in self.layer_kv]
        )  # fmt: skip

    def change(self, graph: torch.cuda.CUDAGraph) -> None:
        """Draw other tokens; overwrite all outputs of the step with NaN or an invalid token id."""
        self.token_ids.random_(self.model.shape.vocab)
        for kv in self.layer_kv:
            for part in kv:
                part[self.first, self.second] = torch.nan
        self.next_ids.fill_(-1)
        poison(graph)


class Memory:
    """A range of device memory, for `torch.as_tensor`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def poison(graph: torch.cuda.CUDAGraph) -> None:
    """Fill all memory that a CUDA graph allocates with NaN, or -1 for integers."""
    pool = tuple(graph.pool())
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool]
    assert segments, "the graph's pool has no memory"
    for segment in segments:
        memory = torch.as_tensor(Memory(segment["address"], segment["total_size"]), device=DEVICE)
        assert memory.data_ptr() == segment["address"], "the tensor is a copy"
        memory.fill_(0xFF)


def capture(step: Step, variant: Variant) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture a step; return the CUDA graph and the hidden states that it writes."""
    variant.apply()
    step.run(variant)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = step.run(variant)
    return graph, hidden


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the Euclidean norm; NaN if any element is."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def check(shape: Shape) -> None:
    """Compare two layers with the references, for each variant."""
    model = Model(replace(shape, layers=2), max(CHECKED_BATCHES))
    for batch in CHECKED_BATCHES:
        for variant in VARIANTS:
            # The other variants do not depend on the layout.
            for paged in (False, True) if variant in (DEFAULT, SERIAL) else (False,):
                step = Step(model, batch, paged=paged)
                graph, hidden = capture(step, variant)
                for _ in range(CHECKED_REPLAYS):
                    step.change(graph)
                    assert hidden.isnan().all()
                    graph.replay()
                    result, written = hidden.clone(), step.written()
                    expected = step.reference()
                    errors = error(result, expected), error(written, step.written())
                    where = f"{shape.name}, batch {batch}, paged {paged}, {variant.name}"
                    assert all(e < MAX_ERROR for e in errors), f"{where}: errors {errors}"
                    logits = F.linear(result, model.head)
                    best = logits.gather(1, step.next_ids[:, None])[:, 0]
                    # Products round differently: the token is the best up to rounding.
                    gap = (logits.amax(1) - best).abs().amax()
                    assert gap <= 0.02 * logits.abs().amax(), f"{where}: wrong token"
    print(f"{shape.name}: two layers agree with the references", flush=True)


def compare(model: Model, batches: list[int]) -> None:
    """Compare all layers with and without overlapping kernels; results must agree."""
    for batch in batches:
        step = Step(model, batch, paged=False)
        graphs = [capture(step, variant) for variant in (SERIAL, DEFAULT)]
        num_equal = 0
        for _ in range(COMPARED_REPLAYS):
            results: list[torch.Tensor] = []
            step.token_ids.random_(model.shape.vocab)
            token_ids = step.token_ids.clone()
            for graph, hidden in graphs:
                step.change(graph)
                step.token_ids.copy_(token_ids)
                graph.replay()
                results.append(torch.cat((hidden.flatten(), step.written().flatten())))
            # Compiled separately, a kernel may round differently; reading data that is not yet
            # written would give a large difference.
            difference = error(results[1], results[0])
            assert difference < MAX_ERROR, f"{model.shape.name}, batch {batch}: {difference}"
            num_equal += torch.equal(*results)
        print(
            f"{model.shape.name}, batch {batch}: overlapping and serial launches agree, "
            f"{num_equal} of {COMPARED_REPLAYS} to the last bit",
            flush=True,
        )


def kernels_of(graph: torch.cuda.CUDAGraph) -> dict[str, dict[str, float]]:
    """Profile one replay: count and total microseconds of each kernel, the longest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events: list[Any] = [
        event for event in profiler.key_averages() if str(event.device_type).endswith("CUDA")
    ]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {e.key: {"count": e.count, "total_us": e.self_device_time_total} for e in events}


def cases(batches: list[int]) -> Iterator[tuple[int, bool, Variant]]:
    """Yield (batch, paged, variant) of all timed cases."""
    for batch in batches:
        for variant in VARIANTS:
            if variant == DEFAULT:
                yield batch, False, variant
                yield batch, True, variant
            elif batch in VARIANT_BATCHES and not (variant.cublas and batch != 32):
                yield batch, False, variant


def measure(shape: Shape, batches: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a result for each case."""
    model = Model(shape, max(batches))
    compare(model, batches)
    for batch, paged, variant in cases(batches):
        step = Step(model, batch, paged=paged)  # kept, because the graph refers to its tensors
        graph, hidden = capture(step, variant)
        for _ in range(3):
            graph.replay()
        seconds = replay_seconds(graph, REPLAYS)
        assert torch.isfinite(hidden).all()
        result: dict[str, Any] = {
            "model": shape.name,
            "batch": batch,
            "layout": "paged" if paged else "contiguous",
            "variant": variant.name,
            "floor_s": shape.floor_s(batch),
            "target_ms": TARGETS_MS[shape.name].get(batch),
            "seconds": seconds,
        }
        if batch in PROFILED_BATCHES and not paged:
            result["kernels"] = kernels_of(graph)
        yield result


def main() -> None:
    """Check, measure, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--models", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shapes = [shape for shape in SHAPES if shape.name in arguments.models]
    results: list[dict[str, Any]] = []
    for shape in shapes:
        check(shape)
        results += measure(shape, arguments.batches)
        torch.cuda.empty_cache()
    for result in results:
        if "kernels" in result and result["variant"] == DEFAULT.name:
            print(f"\n{result['model']}, batch {result['batch']}: us in all, count, kernel")
            for name, kernel in list(result["kernels"].items())[:10]:
                print(f"{kernel['total_us']:10.1f} {kernel['count']:5} {name[:70]}")
    print()
    for result in results:
        median_ms, floor_ms = statistics.median(result["seconds"]) * 1e3, result["floor_s"] * 1e3
        target = "" if result["target_ms"] is None else f"target {result['target_ms']:5.2f}"
        print(
            f"{result['model']:11} {result['batch']:4} {result['layout']:10} "
            f"{median_ms:7.3f} ms  floor {floor_ms:6.3f}  {target:12}  {result['variant']}"
        )
    gpu = torch.cuda.get_device_name(DEVICE)
    figures = {"gpu": gpu, "copy_bytes_per_s": COPY_BYTES_PER_S, "tokens": TOKENS, "seed": 0}
    save(arguments.output, {**figures, "results": results})


if __name__ == "__main__":
    main()
