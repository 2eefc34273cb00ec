"""FlashInfer's kernels over a paged KV cache, the other side of `prefill` and `decode`.

They are measured alone, on the KV of one layer in a random order of blocks, and only where the
package `flashinfer` is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from benchmarks.vattention.kernels import BLOCK_SIZE, kernel_figures, layer_seconds
from benchmarks.vattention.settings import Settings, Shape

NAME = "FlashInfer paged"

_WORKSPACE_BYTES = 512 << 20


def missing(settings: Settings) -> str | None:
    """Why FlashInfer cannot be measured; None if it can."""
    if not settings.on_gpu:
        return "it needs a GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer is not installed"
    return None


def measure(settings: Settings, shape: Shape) -> dict[str, Any]:
    """Measure one shape: a whole prompt, or rows that decode."""
    flashinfer = importlib.import_module("flashinfer")
    num_heads, num_kv_heads, head_dim = settings.heads
    options: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device}
    integers: dict[str, Any] = {"dtype": torch.int32, "device": settings.device}
    row_blocks = shape.tokens // BLOCK_SIZE
    num_blocks = shape.batch * row_blocks
    # [blocks, K and V, 16, kv_heads, dim]
    kv = torch.empty(num_blocks, 2, BLOCK_SIZE, num_kv_heads, head_dim, **options).normal_()
    query = torch.randn(shape.batch * shape.chunk_tokens, num_heads, head_dim, **options)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=settings.device)
    indptr = torch.arange(shape.batch + 1, **integers) * row_blocks
    indices = torch.randperm(num_blocks, device=settings.device).int()
    last_page = torch.full((shape.batch,), BLOCK_SIZE, **integers)
    sizes = (num_heads, num_kv_heads, head_dim, BLOCK_SIZE)
    if shape.chunk_tokens > 1:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        rows = torch.arange(shape.batch + 1, **integers) * shape.chunk_tokens
        wrapper.plan(
            rows, indptr, indices, last_page, *sizes, causal=True, q_data_type=settings.dtype
        )
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=num_heads > num_kv_heads
        )
        wrapper.plan(
            indptr,
            indices,
            last_page,
            *sizes,
            q_data_type=settings.dtype,
            kv_data_type=settings.dtype,
        )

    def run(_: int) -> None:
        wrapper.run(query, kv)

    with torch.inference_mode():
        layer_s = layer_seconds(settings, shape, run)
    return kernel_figures(settings, shape, layer_s)
