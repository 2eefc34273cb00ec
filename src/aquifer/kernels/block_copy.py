"""Copies of many pieces of memory in one launch (PagedAttention, section 5.1, "fused block copy").

Copy-on-write copies the last block of a sequence; in a step with many new samples or beams that is
many small copies, of which each would cost a call.
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

_BLOCK = 4096  # elements of one program


def block_copy_reference(memory: torch.Tensor, pieces: torch.Tensor) -> None:
    """`block_copy` in plain torch."""
    for source, destination, count in pieces.T.tolist():
        memory[destination : destination + count] = memory[source : source + count]


def block_copy(memory: torch.Tensor, pieces: torch.Tensor, max_count: int) -> None:
    """Copy pieces of a tensor to other places in it.

    No piece may be written to where another one is read from or written to.

    Args:
        memory: [elements] of whole numbers, contiguous; the wider its elements, the fewer loads.
            Only what the pieces name is touched, and the device is asked about the very first
            address; the rest may be addresses without memory.
        pieces: [3, num_pieces] int64 on the same device, contiguous: for each piece where it
            begins, where it goes, and how many elements it has.
        max_count: no piece has more elements; known to the host, since it makes the grid.
    """
    if not runs_triton(memory):
        block_copy_reference(memory, pieces)
        return
    assert memory.dim() == 1
    assert memory.is_contiguous()
    assert not memory.is_floating_point()
    assert pieces.shape[0] == 3
    assert pieces.is_contiguous()
    num_pieces = pieces.shape[1]
    if num_pieces and max_count:
        _block_copy_kernel[(num_pieces, -(-max_count // _BLOCK))](
            memory, pieces, num_pieces, block=_BLOCK, num_warps=8,
            **launch_options(memory.device),
        )  # fmt: skip


@jit_once(counts=("num_pieces",), indices=("memory", "pieces"))
def _block_copy_kernel(
    memory: tensor,
    pieces: tensor,
    num_pieces: tensor,
    block: constexpr,
    overlaps: constexpr,
) -> None:
    """Program (i, j) copies the j-th `block` elements of piece i."""
    await_predecessor(overlaps)
    release_successor(overlaps)
    piece = pieces + tl.program_id(0)
    source = tl.load(piece)
    destination = tl.load(piece + num_pieces)
    count = tl.load(piece + 2 * num_pieces)
    element = tl.program_id(1) * block + tl.arange(0, block)
    inside = element < count
    values = tl.load(memory + source + element, mask=inside)
    tl.store(memory + destination + element, values, mask=inside)
