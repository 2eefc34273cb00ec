"""Memory that tokens take: every formula in bytes or pages about KV, in one place.

A sequence's KV lies in blocks of equal size, the unit that sequences share and that prefixes are
kept in; the blocks lie on pages, the unit that the pool hands out:

    virtual     a block is a page, so block_bytes == page_bytes, and tokens may straddle blocks
    paged       a block holds a whole number of tokens, and may be smaller or larger than a page

All results are exact integers. Without any KV (token_bytes == 0) everything takes 0 pages.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_IntArray = npt.NDArray[np.int64]
Count = TypeVar("Count", int, _IntArray)
"""A number, or an array of numbers."""

UNLIMITED_TOKENS = 1 << 40
"""Length of a sequence that no memory limits; more than any model's context length."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Pages and bytes for numbers of tokens, as one cache manager places them.

    A manager that rounds otherwise overrides `pages`; the other methods follow from it.

    Attributes:
        token_bytes: KV of one token over all layers; 0 if the model has no KV.
        block_bytes: size of a block.
        page_bytes: size of a page of the pool.
        shares: whether sequences can share blocks, and blocks can be kept.
    """

    token_bytes: int
    block_bytes: int
    page_bytes: int
    shares: bool = True

    @property
    def block_tokens(self) -> float:
        """Tokens that a block has room for, not always a whole number; 0 without KV."""
        return self.block_bytes / self.token_bytes if self.token_bytes else 0.0

    def pages(self, num_tokens: Count) -> Count:
        """Pages under one sequence of `num_tokens` tokens; of an array, for each of its entries."""
        if not self.token_bytes:
            return 0 * num_tokens
        num_blocks = -(-num_tokens * self.token_bytes // self.block_bytes)
        return -(-num_blocks * self.block_bytes // self.page_bytes)

    def whole_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill to the last byte."""
        return num_tokens * self.token_bytes // self.block_bytes if self.token_bytes else 0

    def blocks_pages(self, num_blocks: int) -> int:
        """Pages that `num_blocks` blocks take if they lie side by side."""
        return -(-self.blocks_bytes(num_blocks) // self.page_bytes)

    def blocks_bytes(self, num_blocks: int) -> int:
        """Size of `num_blocks` blocks."""
        return num_blocks * self.block_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """Size of the KV of `num_tokens` tokens, without rounding: what a swap copies."""
        return num_tokens * self.token_bytes

    def needed(self, num_tokens: int, num_cached: int = 0) -> int:
        """Pages that a sequence takes from the pool to hold `num_tokens` tokens.

        Args:
            num_tokens: its length.
            num_cached: tokens that it begins with, in blocks that it adopts. Whole blocks are
                shared and take nothing; a block that is filled in part is copied.
        """
        return self.pages(num_tokens) - self._shared_bytes(num_cached) // self.page_bytes

    def most(self, num_prompt: int, num_total: int, num_sequences: int = 1) -> int:
        """Pages that a request takes at most, if its sequences share the prompt and no more.

        Args:
            num_prompt: tokens of its prompt, less than `num_total`.
            num_total: tokens of each of its sequences in the end, prompt included. The last one is
                never run, so it needs no KV. The last token of the prompt is not shared: each
                sequence runs it itself.
            num_sequences: number of sequences that run for it.
        """
        num_pages = num_sequences * self.pages(num_total - 1)
        saved_bytes = (num_sequences - 1) * self._shared_bytes(max(num_prompt - 1, 0))
        return num_pages - saved_bytes // self.page_bytes

    def longest(self, num_pages: int, num_prompt: int = 1, num_sequences: int = 1) -> int:
        """The largest `num_total` for which `most` is not more than `num_pages`.

        Args:
            num_pages: pages that there are; a negative number counts as 0.
            num_prompt: as for `most`.
            num_sequences: as for `most`.

        Returns:
            At least 1, as a single token needs no KV. If it is at most `num_prompt`, the prompt
            does not fit, and a request of that length with a shorter prompt does.
            `UNLIMITED_TOKENS` without KV.
        """
        if not self.token_bytes:
            return UNLIMITED_TOKENS

        def is_too_long(num_total: int) -> bool:
            shared = min(num_prompt, num_total - 1)
            return self.most(shared, num_total, num_sequences) > num_pages

        low, high = 1, max(num_pages, 0) * self.page_bytes // self.token_bytes + 1
        # `most` rises with the total where the prompt stays the same, but not always where the
        # prompt grows too: a token more may let a whole block more be shared.
        if is_too_long(num_prompt + 1):
            high = min(high, num_prompt)
        else:
            low = num_prompt + 1
        return low + bisect_left(range(low + 1, high + 1), True, key=is_too_long)

    def growth(self, more_tokens: _IntArray) -> int:
        """Pages to set aside for running sequences to grow by.

        Args:
            more_tokens: [num_seqs], tokens by which each may grow. A sequence that grows by a
                single token may need a whole page at once.
        """
        if not self.token_bytes:
            return 0
        least_bytes = (more_tokens > 0) * self.page_bytes
        num_bytes = int(np.maximum(more_tokens * self.token_bytes, least_bytes).sum())
        return -(-num_bytes // self.page_bytes)

    def _shared_bytes(self, num_tokens: int) -> int:
        """Size of the blocks that a sequence shares if it begins with these tokens of another."""
        return self.blocks_bytes(self.whole_blocks(num_tokens)) if self.shares else 0
