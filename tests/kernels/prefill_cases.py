"""Cases of prefill attention, and their comparison with the reference in float64.

KV is NaN wherever it is unwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.kernels.attention_kv import place_kv

from aquifer.kernels.prefill_attention import (
    Config,
    PrefillSpans,
    prefill_attention,
    prefill_attention_reference,
    prefill_attention_triton,
)

SMALL = Config(block_rows=16, block_keys=16, num_warps=4, num_stages=2)
MAX_TOKENS = 64
# The largest relative error of thousands of rows. In float32, a score of 4 is right to 5e-7, and so
# is its exponential.
MAX_ERROR = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass
class Case:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor | None
    spans: PrefillSpans

    def run(
        self, config: Config | None = None, *, num_splits: int | None = None, **options
    ) -> torch.Tensor:
        """Run `prefill_attention`, or the Triton kernel with tiles of `config`."""
        out = self.query.new_full((*self.query.shape[:2], self.values.shape[-1]), torch.nan)
        arguments = self.query, self.keys, self.values, self.tables, self.spans, out
        if config is None:
            prefill_attention(*arguments, **options)
        else:
            prefill_attention_triton(*arguments, config=config, num_splits=num_splits, **options)
        return out

    def reference(self, **options) -> torch.Tensor:
        query = self.query.double()
        out = query.new_full((*query.shape[:2], self.values.shape[-1]), torch.nan)
        kv = self.keys, self.values, self.tables
        prefill_attention_reference(query, *kv, self.spans, out, **options)
        return out


def make_case(
    device: torch.device,
    chunks: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    max_tokens: int = MAX_TOKENS,
    slots: list[int] | None = None,
    first_row: int = 3,
    seed: int = 0,
) -> Case:
    """A case in the second of three layers, token-major; contiguous, or in shuffled blocks.

    `chunks` are (start, count). Rows before `first_row`, and two at the end, are of no span.
    """
    random = torch.Generator().manual_seed(seed)
    num_slots = len(chunks) + 2
    if slots is None:
        slots = torch.randperm(num_slots, generator=random)[: len(chunks)].tolist()
    layer = num_kv_heads * (key_dim + value_dim)
    kv = torch.full((num_slots, max_tokens, 3, layer), torch.nan)
    offsets = [first_row]
    for slot, (start, count) in zip(slots, chunks, strict=True):
        kv[slot, : start + count, 1] = torch.randn(start + count, layer, generator=random)
        offsets.append(offsets[-1] + count)
    # A view, as a fused projection of queries, keys and values gives it.
    num_rows = offsets[-1] + 2
    query = torch.full((num_rows, 2 * num_heads, key_dim), torch.nan)
    span_rows = slice(offsets[0], offsets[-1])
    query[span_rows, :num_heads] = 2 * torch.randn(
        offsets[-1] - offsets[0], num_heads, key_dim, generator=random
    )
    placed = place_kv(kv, num_kv_heads, key_dim, block_size, random, device, dtype, index_dtype)
    return Case(
        query.to(device, dtype)[:, :num_heads],
        *placed,
        PrefillSpans.of(slots, [start for start, _ in chunks], offsets, device),
    )


def check(
    case: Case, config: Config | None = None, *, num_splits: int | None = None, **options
) -> None:
    options = {"scale": 0.2, **options}
    out, expected = case.run(config, num_splits=num_splits, **options), case.reference(**options)
    begin, end = case.spans.offsets[0], case.spans.offsets[-1]
    assert out[:begin].isnan().all()
    assert out[end:].isnan().all()
    out, expected = out[begin:end].double(), expected[begin:end]
    assert torch.isfinite(out).all()
    errors = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert (errors < MAX_ERROR[case.query.dtype]).all(), f"largest error {errors.max():.2e}"
