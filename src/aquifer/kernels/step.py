"""Kernels that read a decode step's inputs from per-slot columns, and write its outcome back.

Columns are int64, indexed by slot, with one entry more than there are slots: the last entry is for
slot -1, which marks padding of the batch. One kernel reads them all and one writes them all, since
the step time of a small model is mostly launch overhead.
"""

from __future__ import annotations

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit_once,
    launch_options,
    release_successor,
    runs_triton,
    tensor,
    tl,
)

_BLOCK = 128  # batch rows of one program


def decode_inputs_reference(
    slots: torch.Tensor,
    least_context: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`decode_inputs` in plain torch."""
    positions = num_computed[slots]
    lengths = torch.where(slots < 0, 0, positions + 1)
    return last_token[slots], positions, lengths, torch.maximum(least_context[slots], lengths)


def decode_inputs(
    slots: torch.Tensor,
    least_context: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather the inputs of decoding sequences, which run one token each: their last one.

    Args:
        slots: [n] int64, -1 for padding.
        least_context: [slots + 1], the least context length of each sequence, see `ModelInput`.
        num_computed: [slots + 1], tokens in the KV cache.
        last_token: [slots + 1], id of the last token.

    Returns:
        Token ids, positions, lengths including this token (0 for padding), and the contexts of
        `ModelInput`; each [n] int64.
    """
    if not runs_triton(slots):
        return decode_inputs_reference(slots, least_context, num_computed, last_token)
    n = len(slots)
    token_ids, positions, lengths, contexts = torch.empty(
        4, n, dtype=torch.int64, device=slots.device
    )
    _decode_inputs_kernel[(-(-n // _BLOCK),)](
        slots, least_context, num_computed, last_token, token_ids, positions, lengths, contexts,
        n, len(least_context) - 1, block=_BLOCK, num_warps=4, **launch_options(slots.device),
    )  # fmt: skip
    return token_ids, positions, lengths, contexts


@jit_once(counts=("n",), indices=("slots",))
def _decode_inputs_kernel(
    slots: tensor,
    least_context: tensor,
    num_computed: tensor,
    last_token: tensor,
    token_ids: tensor,
    positions: tensor,
    lengths: tensor,
    contexts: tensor,
    n: tensor,
    last_row: tensor,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    await_predecessor(overlaps)
    release_successor(overlaps)
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < n
    slot = tl.load(slots + row, mask=inside, other=-1)
    column_row = tl.where(slot < 0, last_row, slot)
    position = tl.load(num_computed + column_row, mask=inside, other=0)
    length = tl.where(slot < 0, 0, position + 1)
    least = tl.load(least_context + column_row, mask=inside, other=0)
    token = tl.load(last_token + column_row, mask=inside, other=0)
    tl.store(token_ids + row, token, mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(lengths + row, length, mask=inside)
    tl.store(contexts + row, tl.maximum(least, length), mask=inside)


def advance_reference(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
) -> None:
    """`advance` in plain torch."""
    real = slots >= 0
    num_computed[slots[real]] = lengths[real]
    last_token[slots[real]] = token_ids[real]


def advance(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
) -> None:
    """Write a step's outcome into the columns, for all rows except padding.

    Args:
        slots: [n] int64, no slot twice.
        lengths: [n] int64, tokens in the KV cache after the step.
        token_ids: [n] int64, the sampled tokens.
        num_computed: [slots + 1], overwritten at `slots`.
        last_token: [slots + 1], likewise.
    """
    if not runs_triton(slots):
        advance_reference(slots, lengths, token_ids, num_computed, last_token)
        return
    n = len(slots)
    _advance_kernel[(-(-n // _BLOCK),)](
        slots, lengths, token_ids, num_computed, last_token, n,
        block=_BLOCK, num_warps=4, **launch_options(slots.device),
    )  # fmt: skip


@jit_once(counts=("n",), indices=("slots", "lengths", "token_ids"))
def _advance_kernel(
    slots: tensor,
    lengths: tensor,
    token_ids: tensor,
    num_computed: tensor,
    last_token: tensor,
    n: tensor,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    await_predecessor(overlaps)
    release_successor(overlaps)
    row = tl.program_id(0) * block + tl.arange(0, block)
    slot = tl.load(slots + row, mask=row < n, other=-1)
    real = slot >= 0
    tl.store(num_computed + slot, tl.load(lengths + row, mask=real, other=0), mask=real)
    tl.store(last_token + slot, tl.load(token_ids + row, mask=real, other=0), mask=real)
