"""Reference attention: causal attention of one step's tokens over the KV cache, either layout.

Shapes: query [tokens, heads, key_dim], out [tokens, heads, value_dim]; the tokens of sequence i
are rows [offsets[i], offsets[i + 1]), at positions starts[i] and following. Query head h reads
KV head h // (heads / kv_heads) (grouped-query attention).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from aquifer.kernels.alibi import with_alibi
from aquifer.kernels.sinks import softmax_with_sinks


def attention_contiguous(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
    offsets: Sequence[int],
    out: torch.Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    """Attend over contiguous KV: one range of addresses per slot.

    Args:
        query: [tokens, heads, key_dim].
        keys: [slots, max_tokens, kv_heads, key_dim]; last stride 1, others any. Memory may be
            mapped for written tokens only; nothing beyond them is read.
        values: [slots, max_tokens, kv_heads, value_dim], likewise.
        slots: [num_seqs], each sequence's index into `keys`.
        starts: [num_seqs], position of each sequence's first token of this step.
        offsets: [num_seqs + 1], each sequence's rows in `query` and `out`.
        out: [tokens, heads, value_dim], overwritten.
        scale: factor on the dot products.
        window_tokens: see `KVView.attend`.
        softcap: see `KVView.attend`.
        sinks: [heads], see `kernels/sinks.py`; None for none.
        slopes: [heads] float32, see `kernels/alibi.py`; None for none.
    """
    # [slots, kv_heads, max_tokens, dim]
    all_keys, all_values = keys.transpose(1, 2), values.transpose(1, 2)
    results = []
    for i, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        begin, end = offsets[i], offsets[i + 1]
        first = _first_key(start, window_tokens)
        length = start + end - begin
        results.append(
            _attend(
                query[begin:end],
                all_keys[slot : slot + 1, :, first:length],
                all_values[slot : slot + 1, :, first:length],
                start - first,
                scale,
                window_tokens,
                softcap,
                sinks,
                slopes,
            )
        )
    torch.cat(results, out=out[offsets[0] : offsets[-1]])


def attention_paged(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
    offsets: Sequence[int],
    out: torch.Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> None:
    """Attend over paged KV, found through block tables (PagedAttention, section 4.1).

    Args:
        query: [tokens, heads, key_dim].
        keys: [blocks, block_size, kv_heads, key_dim].
        values: [blocks, block_size, kv_heads, value_dim].
        tables: [slots, max_blocks] int64, block tables: each slot's blocks in order.
        slots: [num_seqs]; this and the following as in `attention_contiguous`.
        starts: [num_seqs].
        offsets: [num_seqs + 1].
        out: [tokens, heads, value_dim], overwritten.
        scale: factor on the dot products.
        window_tokens: see `KVView.attend`.
        softcap: see `KVView.attend`.
        sinks: [heads], see `kernels/sinks.py`; None for none.
        slopes: [heads] float32, see `kernels/alibi.py`; None for none.
    """
    block_size = keys.shape[1]
    results = []
    for i, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        begin, end = offsets[i], offsets[i + 1]
        first = _first_key(start, window_tokens)
        length = start + end - begin
        first_block = first // block_size
        blocks = tables[slot, first_block : -(-length // block_size)]
        # Tokens [first, length), relative to the first gathered block.
        tokens = slice(first - first_block * block_size, length - first_block * block_size)
        results.append(
            _attend(
                query[begin:end],
                keys[blocks].flatten(0, 1)[tokens].transpose(0, 1).unsqueeze(0),
                values[blocks].flatten(0, 1)[tokens].transpose(0, 1).unsqueeze(0),
                start - first,
                scale,
                window_tokens,
                softcap,
                sinks,
                slopes,
            )
        )
    torch.cat(results, out=out[offsets[0] : offsets[-1]])


def _first_key(start: int, window_tokens: int | None) -> int:
    """Return the first position that a query at `start` or later attends to."""
    return 0 if window_tokens is None else max(start + 1 - window_tokens, 0)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    scale: float,
    window_tokens: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for one sequence: query [tokens, heads, d] at `start`, keys [1, kv_heads, length, d].

    Returns: [tokens, heads, value_dim].
    """
    num_tokens, num_heads, key_dim = query.shape
    _, num_kv_heads, length, value_dim = values.shape
    group = num_heads // num_kv_heads
    is_usual = softcap is None and sinks is None and slopes is None
    if num_tokens == 1 and is_usual:
        # One token sees all keys, so the heads of a group can take the place of query positions.
        grouped = query.view(1, num_kv_heads, group, key_dim)
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).reshape(
            1, num_heads, value_dim
        )
    # [kv_heads, group, tokens, d] over [kv_heads, 1 -> group, length, d]: no KV head is copied.
    q = query.view(num_tokens, num_kv_heads, group, key_dim).permute(1, 2, 0, 3)
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if not is_usual:
        products = q.flatten(1, 2) @ k[:, 0].transpose(-1, -2)
        scores = products.unflatten(1, (group, num_tokens))
        if softcap is None:
            scores = scores * scale
        else:
            scores = torch.tanh(scores * (scale / softcap)) * softcap
        positions = torch.arange(start, start + num_tokens)
        scores = with_alibi(scores, slopes, positions, torch.arange(length))
        mask = _mask(num_tokens, length, start, window_tokens)
        scores = scores.masked_fill(~mask, -torch.inf)
        weights = softmax_with_sinks(scores.float(), sinks).to(v.dtype)
        result = weights.flatten(1, 2) @ v[:, 0]
    else:
        plain = start == 0 and (window_tokens is None or length <= window_tokens)
        result = F.scaled_dot_product_attention(
            q,
            k.expand(-1, group, -1, -1),
            v.expand(-1, group, -1, -1),
            attn_mask=None if plain else _mask(num_tokens, length, start, window_tokens),
            is_causal=plain,
            scale=scale,
        )
    return result.reshape(num_heads, num_tokens, value_dim).transpose(0, 1)


def _mask(num_tokens: int, length: int, start: int, window_tokens: int | None) -> torch.Tensor:
    """Causal (and window) mask, [tokens, length] bool: True for keys that a query attends to."""
    query_position = torch.arange(start, start + num_tokens).unsqueeze(1)
    distance = query_position - torch.arange(length)
    mask = distance >= 0
    return mask if window_tokens is None else mask & (distance < window_tokens)
