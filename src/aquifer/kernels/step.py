"""Kernels that read a decode step's inputs from per-slot columns, and write its outcome back.

Columns are int64, indexed by slot, with one entry more than there are slots: the last entry is for
slot -1, which marks padding of the batch. One kernel reads them all and one writes them all, since
the step time of a small model is mostly launch overhead. The latter also writes the new tokens to
the host's memory: a copy of the device's engine would delay the next step by 10 us.
"""

from __future__ import annotations

import torch

from aquifer.kernels._triton import (
    await_predecessor,
    constexpr,
    jit_once,
    launch_options,
    pow2,
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
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`decode_inputs` in plain torch."""
    positions = num_computed[slots]
    lengths.copy_(torch.where(slots < 0, 0, positions + 1))
    return last_token[slots], positions, torch.maximum(least_context[slots], lengths)


def decode_inputs(
    slots: torch.Tensor,
    least_context: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather the inputs of decoding sequences, which run one token each: their last one.

    Args:
        slots: [n] int64, -1 for padding.
        least_context: [slots + 1], the least context length of each sequence, see `ModelInput`.
        num_computed: [slots + 1], tokens in the KV cache.
        last_token: [slots + 1], id of the last token.
        lengths: [n] int64, overwritten: tokens of each sequence with this one, 0 for padding.

    Returns: token ids, positions, and the contexts of `ModelInput`; each [n] int64.
    """
    if not runs_triton(slots):
        return decode_inputs_reference(slots, least_context, num_computed, last_token, lengths)
    n = len(slots)
    token_ids, positions, contexts = torch.empty(3, n, dtype=torch.int64, device=slots.device)
    _decode_inputs_kernel[(-(-n // _BLOCK),)](
        slots, least_context, num_computed, last_token, token_ids, positions, lengths, contexts,
        n, len(least_context) - 1, block=_BLOCK, num_warps=4, **launch_options(slots.device),
    )  # fmt: skip
    return token_ids, positions, contexts


@jit_once(counts=("n",), indices=("slots", "lengths"))
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
    reports: torch.Tensor,
    next_report: torch.Tensor,
) -> None:
    """`advance` in plain torch."""
    real = slots >= 0
    num_computed[slots[real]] = lengths[real]
    last_token[slots[real]] = token_ids[real]
    which = int(next_report)
    report = reports[which, : len(slots)]
    report.copy_(torch.where(real, token_ids, report.to(slots.device)))
    next_report.fill_((which + 1) % len(reports))


def advance(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
    reports: torch.Tensor,
    next_report: torch.Tensor,
) -> None:
    """Write a step's outcome into the columns and for the host, for all rows except padding.

    Args:
        slots: [n] int64, no slot twice.
        lengths: [n] int64, tokens in the KV cache after the step.
        token_ids: [n] int64, the sampled tokens.
        num_computed: [slots + 1], overwritten at `slots`.
        last_token: [slots + 1], likewise.
        reports: [r, rows] int64, in page-locked memory of the host for steps on a device: the
            tokens of the latest r steps. One row is overwritten; complete when the step is.
        next_report: [1] int64, which row that is; then the one after it.
    """
    n = len(slots)
    assert reports.shape[1] >= n
    if not runs_triton(slots):
        advance_reference(slots, lengths, token_ids, num_computed, last_token, reports, next_report)
        return
    _advance_kernel[(1,)](
        slots, lengths, token_ids, num_computed, last_token, reports, next_report, n,
        num_reports=len(reports), report_rows=reports.shape[1], block=pow2(n, _BLOCK),
        num_warps=4, **launch_options(slots.device),
    )  # fmt: skip


@jit_once(counts=("n",), indices=("slots", "lengths", "token_ids"))
def _advance_kernel(
    slots: tensor,
    lengths: tensor,
    token_ids: tensor,
    num_computed: tensor,
    last_token: tensor,
    reports: tensor,
    next_report: tensor,
    n: tensor,
    num_reports: constexpr,
    report_rows: constexpr,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    await_predecessor(overlaps)
    release_successor(overlaps)
    row = tl.arange(0, block)
    which = tl.load(next_report)
    slot = tl.load(slots + row, mask=row < n, other=-1)
    real = slot >= 0
    token = tl.load(token_ids + row, mask=real, other=0)
    tl.store(reports + which * report_rows + row, token, mask=real)
    tl.store(num_computed + slot, tl.load(lengths + row, mask=real, other=0), mask=real)
    tl.store(last_token + slot, token, mask=real)
    tl.debug_barrier()  # all threads have read which report it is
    tl.store(next_report, (which + 1) % num_reports)
