"""What a decode step reads of its sequences before the model runs, and writes after it.

Columns are int64, indexed by slot, with one row more than there are slots: the last row is what
slot -1, of a row that only pads the batch, finds. They are read and written by one kernel each,
since a step of a small model is little more than its launches.
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

_BLOCK = 128  # rows of one program


def decode_inputs_reference(
    slots: torch.Tensor,
    num_prompt: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`decode_inputs` in plain torch."""
    positions = num_computed[slots]
    lengths = torch.where(slots < 0, 0, positions + 1)
    return last_token[slots], positions, lengths, torch.maximum(num_prompt[slots], lengths)


def decode_inputs(
    slots: torch.Tensor,
    num_prompt: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of sequences that run one token each: the one that they got last.

    Args:
        slots: [n] int64, -1 for padding.
        num_prompt: [slots + 1], tokens of each prompt.
        num_computed: [slots + 1], tokens in the cache.
        last_token: [slots + 1].

    Returns:
        Token ids, positions, lengths with this token (0 for padding), and the contexts of
        `ModelInput`; each [n] int64.
    """
    if not runs_triton(slots):
        return decode_inputs_reference(slots, num_prompt, num_computed, last_token)
    n = len(slots)
    token_ids, positions, lengths, contexts = torch.empty(
        4, n, dtype=torch.int64, device=slots.device
    )
    _decode_inputs_kernel[(-(-n // _BLOCK),)](
        slots, num_prompt, num_computed, last_token, token_ids, positions, lengths, contexts,
        n, len(num_prompt) - 1, block=_BLOCK, num_warps=4, **launch_options(slots.device),
    )  # fmt: skip
    return token_ids, positions, lengths, contexts


@jit_once(counts=("n",), indices=("slots",))
def _decode_inputs_kernel(
    slots: tensor,
    num_prompt: tensor,
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
    prompt = tl.load(num_prompt + column_row, mask=inside, other=0)
    token = tl.load(last_token + column_row, mask=inside, other=0)
    tl.store(token_ids + row, token, mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(lengths + row, length, mask=inside)
    tl.store(contexts + row, tl.maximum(prompt, length), mask=inside)


def advance_reference(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    token_ids: torch.Tensor | None,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
) -> None:
    """`advance` in plain torch."""
    real = slots >= 0
    num_computed[slots[real]] = lengths[real]
    if token_ids is not None:
        last_token[slots[real]] = token_ids[real]


def advance(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    token_ids: torch.Tensor | None,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
) -> None:
    """Write a step's outcome into the columns, for all rows but padding.

    Args:
        slots: [n] int64, no slot twice.
        lengths: [n] int64, tokens in the cache now.
        token_ids: [n] int64, what was sampled; None if it is not known yet.
        num_computed: [slots + 1], overwritten at `slots`.
        last_token: [slots + 1], likewise.
    """
    if not runs_triton(slots):
        advance_reference(slots, lengths, token_ids, num_computed, last_token)
        return
    n = len(slots)
    _advance_kernel[(-(-n // _BLOCK),)](
        slots, lengths, token_ids, num_computed, last_token, n,
        has_tokens=token_ids is not None, block=_BLOCK, num_warps=4,
        **launch_options(slots.device),
    )  # fmt: skip


@jit_once(counts=("n",), indices=("slots", "lengths", "token_ids"))
def _advance_kernel(
    slots: tensor,
    lengths: tensor,
    token_ids: tensor,
    num_computed: tensor,
    last_token: tensor,
    n: tensor,
    has_tokens: constexpr,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    await_predecessor(overlaps)
    release_successor(overlaps)
    row = tl.program_id(0) * block + tl.arange(0, block)
    slot = tl.load(slots + row, mask=row < n, other=-1)
    real = slot >= 0
    tl.store(num_computed + slot, tl.load(lengths + row, mask=real, other=0), mask=real)
    if has_tokens:
        tl.store(last_token + slot, tl.load(token_ids + row, mask=real, other=0), mask=real)
