"""Random numbers in place of a checkpoint's weights."""

from __future__ import annotations

import hashlib
import math

import torch

from aquifer.weights.parameters import Parameter

_STD = 0.02  # standard deviation that most models are initialised with
_BLOCK_ELEMENTS = 1 << 24
"""Numbers that one seed makes. A shard makes the blocks that it has a part of, one at a time."""


def fill_normal(parameter: Parameter, tensor: torch.Tensor, seed: int, place: int) -> None:
    """Fill a parameter with normal random numbers, or a shard with the part of them that it has.

    Args:
        parameter: the parameter.
        tensor: its memory.
        seed: of the model's numbers.
        place: number of the parameter, so that each has numbers of its own.
    """
    shard, (num_rows, *row_shape) = parameter.shard, parameter.whole_shape
    block_rows = max(_BLOCK_ELEMENTS // max(math.prod(row_shape), 1), 1)
    generator = torch.Generator(tensor.device)
    for number, begin in enumerate(range(0, num_rows, block_rows)):
        end = min(begin + block_rows, num_rows)
        generator.manual_seed(_mixed(seed, place, number))
        if shard is None:
            tensor[begin:end].normal_(0, _STD, generator=generator)
            continue
        # Of other dimensions, a shard has a part of each row.
        is_rows = shard.dim == 0
        parts = list(shard.overlaps(*((begin, end) if is_rows else (0, shard.whole_size))))
        if not parts:
            continue
        block = tensor.new_empty((end - begin, *row_shape)).normal_(0, _STD, generator=generator)
        for start, stop, own in parts:
            if is_rows:
                tensor[own : own + stop - start] = block[start - begin : stop - begin]
            else:
                rows = tensor[begin:end].narrow(shard.dim, own, stop - start)
                rows.copy_(block.narrow(shard.dim, start, stop - start))


def _mixed(*numbers: int) -> int:
    """A seed that differs from those of other numbers in its lower half too, which is all that the
    generator of the host uses."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
