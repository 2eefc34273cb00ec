"""Merging of prefill attention: queries of which several programs have attended to some keys each.

The kernels of prefill attention leave the partial results of such programs (`prefill_work.py`),
with their log-sum-exp, and one launch merges those of all (FlashDecoding).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from aquifer.kernels._triton import constexpr, jit_once, launch, pow2, tensor, tl
from aquifer.kernels.prefill_work import PROGRAM_COLUMNS, Tiling, Work
from aquifer.kernels.sinks import load_sinks

_MERGE_ROWS = 8


class DeviceSpans(Protocol):
    """The chunks of one step for a kernel of ours: what it reads of them, on the device."""

    @property
    def device_slots(self) -> torch.Tensor:
        """[n] int64; this and the next two as in `prefill_attention.PrefillSpans`."""

    @property
    def device_starts(self) -> torch.Tensor:
        """[n] int64."""

    @property
    def device_offsets(self) -> torch.Tensor:
        """[n + 1] int64."""

    def work(self, tiling: Tiling) -> Work:
        """The lists of a launch."""


class Partials(NamedTuple):
    """Partial results of a launch; without splits, both are empty."""

    sums: torch.Tensor  # [programs, block_rows, value_dim] float32
    lse: torch.Tensor  # [programs, block_rows] float32, log-sum-exp in powers of two


def make_partials(work: Work, num_groups: int, block_rows: int, out: torch.Tensor) -> Partials:
    """Allocate partial results.

    Args:
        work: of the launch.
        num_groups: programs for each entry of it.
        block_rows: rows of a program.
        out: [tokens, heads, value_dim], the result.
    """
    shape = (work.num_partials * num_groups, block_rows)
    sums = torch.empty((*shape, out.shape[2]), dtype=torch.float32, device=out.device)
    return Partials(sums, torch.empty(shape, dtype=torch.float32, device=out.device))


def merge_partials(
    work: Work,
    partials: Partials,
    spans: DeviceSpans,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    heads_per_program: int,
) -> None:
    """Merge the partial results of splits, if there are any.

    Args:
        work: of the launch that left them.
        partials: what it left.
        spans: the chunks.
        sinks: [heads] or None.
        out: [tokens, heads, value_dim]; the rows that have splits are overwritten.
        heads_per_program: heads that a program's rows are of.
    """
    if not len(work.merges):
        return
    num_heads, value_dim = out.shape[1:]
    block_rows = partials.sums.shape[1]
    merge_rows = min(_MERGE_ROWS, block_rows)
    launch(
        _merge_kernel,
        (num_heads // heads_per_program * (block_rows // merge_rows), len(work.merges)),
        partials.sums,
        partials.lse,
        work.programs,
        work.merges,
        spans.device_offsets,
        sinks,
        out,
        out.stride(0),
        out.stride(1),
        heads_per_program=heads_per_program,
        block_rows=block_rows,
        value_dim=value_dim,
        value_dim_pow2=pow2(value_dim),
        merge_rows=merge_rows,
        has_sinks=sinks is not None,
        num_columns=PROGRAM_COLUMNS,
        num_warps=4,
    )


@jit_once(indices=("programs", "merges", "offsets"))
def _merge_kernel(
    partials: tensor,
    lse: tensor,
    programs: tensor,
    merges: tensor,
    offsets: tensor,
    sinks: tensor,
    out: tensor,
    out_row_stride: tensor,
    out_head_stride: tensor,
    heads_per_program: constexpr,
    block_rows: constexpr,
    value_dim: constexpr,
    value_dim_pow2: constexpr,
    merge_rows: constexpr,
    has_sinks: constexpr,
    num_columns: constexpr,
) -> None:
    """Merge the splits of `merge_rows` of the rows that one program would have without splits."""
    row_parts: constexpr = block_rows // merge_rows
    block_tokens: constexpr = block_rows // heads_per_program
    num_groups = tl.num_programs(0) // row_parts
    head_group = tl.program_id(0) // row_parts
    first_partial = tl.load(merges + tl.program_id(1))
    if first_partial < 0:
        return
    own = programs + first_partial * num_columns
    span = tl.load(own).to(tl.int32)
    first_token = tl.load(own + 1).to(tl.int32)
    num_splits = tl.load(own + 3).to(tl.int32)
    first_row = tl.load(offsets + span)
    count = (tl.load(offsets + span + 1) - first_row).to(tl.int32)

    row = tl.program_id(0) % row_parts * merge_rows + tl.arange(0, merge_rows)
    token = first_token + row // heads_per_program
    head = head_group * heads_per_program + row % heads_per_program
    is_row = (row < block_tokens * heads_per_program) & (token < count)
    dim = tl.arange(0, value_dim_pow2)
    is_stored = is_row[:, None] & (dim < value_dim)[None, :]

    top = tl.full([merge_rows], float("-inf"), tl.float32)
    total = tl.zeros([merge_rows], tl.float32)
    acc = tl.zeros([merge_rows, value_dim_pow2], tl.float32)
    for split in range(num_splits):
        partial_row = ((first_partial + split) * num_groups + head_group) * block_rows + row
        part_lse = tl.load(lse + partial_row, mask=is_row, other=float("-inf"))
        has_seen = part_lse > float("-inf")
        part = tl.load(
            partials + partial_row[:, None] * value_dim + dim[None, :],
            mask=is_stored & has_seen[:, None],
            other=0.0,
        )  # [merge_rows, value_dim]
        new_top = tl.maximum(top, part_lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part_lse - base)
        decay = tl.exp2(top - base)
        total = total * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        top = new_top
    if has_sinks:
        total += tl.exp2(load_sinks(sinks, head, is_row) - top)
    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    out_rows = (first_row + token) * out_row_stride + head * out_head_stride
    tl.store(out + out_rows[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=is_stored)
