"""Copy-on-write copies, gathered until the next step and made by one launch."""

from __future__ import annotations

from math import gcd

import numpy as np
import torch

from aquifer.kernels.block_copy import block_copy
from aquifer.memory.range import VirtualRange
from aquifer.memory.transfer import upload

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class PendingCopies:
    """Copies from pieces of one range to other places in it.

    Args:
        range_: the range.
        block_bytes: size of a block. All pieces begin where a block or a page begins, and end in
            the same one.
        num_buffers: buffers that the range is cut into. Each has an equal part of each piece, and
            sizes and offsets are those of all together.
    """

    def __init__(self, range_: VirtualRange, block_bytes: int, num_buffers: int = 1) -> None:
        self._num_buffers = num_buffers
        self._word_bytes = gcd(block_bytes // num_buffers, range_.page_bytes, max(_WORDS))
        self._buffer_words = range_.num_bytes // num_buffers // self._word_bytes
        num_words = range_.num_bytes // self._word_bytes
        self._memory = range_.tensor((num_words,), _WORDS[self._word_bytes])
        self._pieces: list[tuple[int, int, int]] = []  # in bytes

    def __len__(self) -> int:
        """Number of copies not launched yet."""
        return len(self._pieces)

    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(source, destination, length) in bytes of each copy not launched yet."""
        return tuple(self._pieces)

    def add(self, source_byte: int, destination_byte: int, num_bytes: int) -> None:
        """Request a copy. Both places must stay mapped until `launch`.

        The length is rounded up to a word, within the block: the next token overwrites these
        bytes.
        """
        self._pieces.append((source_byte, destination_byte, num_bytes))

    def rehearse(self) -> None:
        """Launch the kernel over no bytes, to compile it. The range's first page must be mapped."""
        if not self._memory.is_meta:
            nothing = torch.zeros((3, 1), dtype=torch.int64, device=self._memory.device)
            block_copy(self._memory, nothing, 1)

    def launch(self) -> None:
        """Make all copies, after all work handed to the device so far. Does not wait for them."""
        if not self._memory.is_meta:  # a modelled device has no bytes
            pieces = -(
                -np.array(self._pieces, np.int64).T // (self._num_buffers * self._word_bytes)
            )
            if self._num_buffers > 1:  # [3, 1, pieces], and where each buffer begins
                starts = np.arange(self._num_buffers) * self._buffer_words
                pieces = (pieces[:, None] + np.outer([1, 1, 0], starts)[..., None]).reshape(3, -1)
            on_device = upload(np.ascontiguousarray(pieces), self._memory.device)
            block_copy(self._memory, on_device, int(pieces[2].max()))
        self._pieces.clear()
