"""FlashInfer's kernels over a paged KV cache, the other side of `prefill` and `decode`.

They are measured alone, on the KV of some layers in a random order of blocks, and only where the
package `flashinfer` is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import torch
from benchmarks.vattention.kernels import BLOCK_SIZE, kernel_figures, layer_seconds
from benchmarks.vattention.settings import Settings, Shape

NAME = "FlashInfer paged"

_WORKSPACE_BYTES = 512 << 20
_KV_BYTES = 1 << 30  # of several layers, so that none is found in the L2 cache
_MAX_ERROR = 1e-2  # relative, of the last token's attention


def missing(settings: Settings) -> str | None:
    """Why FlashInfer cannot be measured; None if it can."""
    if not settings.on_gpu:
        return "it needs a GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer is not installed"
    return None


def measure(settings: Settings, shape: Shape) -> dict[str, Any]:
    """Measure one shape: a whole prompt, or rows that decode.

    Raises:
        RuntimeError: the results are not those of plain attention.
    """
    flashinfer = importlib.import_module("flashinfer")
    num_heads, num_kv_heads, head_dim = settings.heads
    options: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device}
    integers: dict[str, Any] = {"dtype": torch.int32, "device": settings.device}
    row_blocks = shape.tokens // BLOCK_SIZE
    num_blocks = shape.batch * row_blocks
    kv_shape = (num_blocks, 2, BLOCK_SIZE, num_kv_heads, head_dim)
    layer_bytes = math.prod(kv_shape) * settings.dtype.itemsize
    num_layers = min(settings.num_layers, -(-_KV_BYTES // layer_bytes))
    layers = [torch.empty(kv_shape, **options).normal_() for _ in range(num_layers)]
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
            # Its own choice would be FlashAttention 3, which neither splits KV nor reads it once
            # for all heads of a group, and takes four times as long.
            workspace,
            "NHD",
            use_tensor_cores=num_heads > num_kv_heads,
            backend="fa2",
        )
        wrapper.plan(
            indptr,
            indices,
            last_page,
            *sizes,
            q_data_type=settings.dtype,
            kv_data_type=settings.dtype,
        )

    def run(layer: int) -> None:
        wrapper.run(query, layers[layer % num_layers])

    with torch.inference_mode():
        _check(wrapper.run(query, layers[0])[-1], query[-1], layers[0][indices[-row_blocks:]])
        layer_s = layer_seconds(settings, shape, run)
    return kernel_figures(settings, shape, layer_s)


def _check(found: torch.Tensor, query: torch.Tensor, blocks: torch.Tensor) -> None:
    """Compare one token's attention, [heads, dim], over blocks [blocks, 2, 16, kv_heads, dim]."""
    keys, values = blocks.float().unbind(1)  # likewise without the 2
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # [tokens, kv_heads, dim]
    group = len(query) // keys.shape[1]
    grouped = query.float().unflatten(0, (-1, group))
    scores = torch.einsum("hgd,thd->hgt", grouped, keys) * keys.shape[-1] ** -0.5
    expected = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).flatten(0, 1)
    error = float((found.float() - expected).norm() / expected.norm())
    if error > _MAX_ERROR:
        raise RuntimeError(f"FlashInfer's attention is off by {error:.2g} of its norm")
