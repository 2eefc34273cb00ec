"""Part `waste`: tokens of a page, and what a request wastes at most, by layout (Table 8)."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import torch
from benchmarks.vattention import paper
from benchmarks.vattention.record import Record
from benchmarks.vattention.settings import KIB, MIB, Settings

from aquifer.cache.footprint import Footprint
from aquifer.cache.growth import AHEAD_TOKENS
from aquifer.cache.layout import KVLayout, LayerKV

PAGE_SIZES = tuple(size * KIB for size in (64, 128, 256, 2048, 4096, 16384))
"""The paper's, and those of CUDA that a large pool has."""

GOAL_MODEL, GOAL_BYTES = "Llama-3-8B", 2 * MIB


def kv_layout(model: str, tp: int) -> KVLayout:
    """KV of one token on one of `tp` devices that share the heads."""
    sizes = paper.MODELS[model]
    layer = LayerKV(sizes["num_kv_heads"] // tp, paper.HEAD_DIM, paper.HEAD_DIM)
    return KVLayout((layer,) * sizes["num_layers"], torch.bfloat16)


def num_parts(layout: KVLayout, order: str) -> int:
    """Stretches of addresses of a sequence, each of which has pages of its own.

    Args:
        layout: layout of one token's KV.
        order: "token-major" (all layers of a token are neighbours) or "layer-major" (K and V of
            each layer apart, as in vAttention).
    """
    return {"token-major": 1, "layer-major": layout.num_buffers}[order]


def wasted(layout: KVLayout, page_bytes: int, parts: int, tp: int = 1) -> dict[str, Any]:
    """Waste of a request whose KV is in equal parts, each on pages of its own.

    Args:
        layout: layout of one token's KV on one device.
        page_bytes: size of a page.
        parts: number of parts.
        tp: devices, each of which has such parts.

    Returns:
        The tokens of a page; the pages by which a request grows at once on all devices; bytes
        mapped but not written at most, over all lengths; the same if the tokens to come that the
        engine maps for count as well; and what the paper counts, where each part has a page that
        nothing was written to.
    """
    footprint = Footprint(layout.token_bytes // parts, page_bytes, page_bytes)
    token_bytes = footprint.token_bytes
    # After so many tokens, a page begins with a token again.
    period = page_bytes // gcd(page_bytes, token_bytes)
    tokens = np.arange(1, period + 1)
    written_bytes = tokens * token_bytes
    unwritten_bytes = [
        int((footprint.pages(tokens + ahead) * page_bytes - written_bytes).max())
        for ahead in (0, AHEAD_TOKENS - 1)
    ]
    # A new token may need several small pages.
    growth = int((footprint.pages(tokens) - footprint.pages(tokens - 1)).max())
    return {
        "page_tokens": page_bytes / token_bytes,
        "growth_pages": growth * parts * tp,
        "most_wasted_bytes": unwritten_bytes[0] * parts * tp,
        "most_unwritten_bytes": unwritten_bytes[1] * parts * tp,
        "unused_pages_bytes": page_bytes * parts * tp,
    }


def measure(_: Settings, record: Record) -> None:
    """Compute the waste of all models, layouts and page sizes."""
    record.content |= {
        "paper": paper.WASTE,
        "ahead_tokens": AHEAD_TOKENS - 1,
        "goal": {"model": GOAL_MODEL, "most_wasted_bytes": GOAL_BYTES},
    }
    for model in paper.MODELS:
        for tp in (1, 2):
            layout = kv_layout(model, tp)
            for order in ("token-major", "layer-major"):
                for page_bytes in PAGE_SIZES:
                    row = {
                        "model": model,
                        "tp": tp,
                        "layout": order,
                        "page_kib": page_bytes // KIB,
                        **wasted(layout, page_bytes, num_parts(layout, order), tp),
                    }
                    record.add("rows", row)
    record.save()
