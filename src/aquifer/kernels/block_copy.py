"""Fused block copy: many copies in one kernel launch (PagedAttention, section 5.1).

Copy-on-write copies the last block of a sequence. A step with many new samples or beams needs many
small copies, and each would cost a launch.
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

_BLOCK = 4096  # elements copied by one program


def block_copy_reference(memory: torch.Tensor, pieces: torch.Tensor) -> None:
    """`block_copy` in plain torch."""
    for source, destination, count in pieces.T.tolist():
        memory[destination : destination + count] = memory[source : source + count]


def block_copy(memory: torch.Tensor, pieces: torch.Tensor, max_count: int) -> None:
    """Copy pieces of a tensor to other places in it.

    A piece's destination must not overlap the source or destination of another piece.

    Args:
        memory: [elements] of an integer dtype, contiguous; wider elements need fewer loads. Only
            the pieces are accessed, and the driver looks up the first address; other addresses
            may be unmapped.
        pieces: [3, num_pieces] int64 on the same device, contiguous: source, destination and
            number of elements of each piece.
        max_count: upper bound on the elements of a piece, known to the host; it sets the grid.
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
