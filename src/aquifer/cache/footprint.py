"""Memory that tokens take: every formula in bytes or pages about KV, in one place.

A sequence's KV lies in blocks of equal size, the unit that sequences share and that prefixes are
kept in; the blocks lie on pages, the unit that the pool hands out:

    virtual     a block is a place, a page or a stripe, and tokens may straddle blocks
    paged       a block holds a whole number of tokens, and may be smaller or larger than a place

Layer-major KV is mapped by the stripe, a page in each of its buffers (`aquifer.memory.stripes`), so
that each buffer has a last page that is used in part.

All results are exact integers. Without any KV (token_bytes == 0) everything takes 0 pages.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import gcd
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
        place_pages: pages that are mapped as one: those of a stripe where KV is layer-major.
        limit_pages: pages that all sequences together can have; None for all that there are.
    """

    token_bytes: int
    block_bytes: int
    page_bytes: int
    shares: bool = True
    place_pages: int = 1
    limit_pages: int | None = None

    def limited(self, num_pages: int) -> int:
        """How many of these pages all sequences together can have."""
        return num_pages if self.limit_pages is None else min(num_pages, self.limit_pages)

    @property
    def has_kv(self) -> bool:
        """Whether the model has any."""
        return self.token_bytes > 0

    @property
    def kept_block_bytes(self) -> int:
        """What a block takes that is kept for later sequences: what its eviction gives back."""
        return self.block_bytes

    @property
    def block_tokens(self) -> float:
        """Tokens that a block has room for, not always a whole number; 0 without KV."""
        return self.block_bytes / self.token_bytes if self.token_bytes else 0.0

    def pages(self, num_tokens: Count) -> Count:
        """Pages under one sequence of `num_tokens` tokens; of an array, for each of its entries."""
        return self._pages_under(self.blocks(num_tokens) * self.block_bytes)

    def blocks(self, num_tokens: Count) -> Count:
        """Blocks that the first `num_tokens` tokens of a sequence lie in."""
        if not self.token_bytes:
            return 0 * num_tokens
        return -(-num_tokens * self.token_bytes // self.block_bytes)

    def paged_bytes(self, num_tokens: _IntArray) -> int:
        """Size of the pages of several sequences that share nothing.

        Args:
            num_tokens: [sequences], the tokens of each.
        """
        return int(self.pages(num_tokens).sum()) * self.page_bytes

    def stretch_pages(self, num_tokens: Count) -> Count:
        """Pages under any `num_tokens` neighbouring tokens of a sequence, at most."""
        if not self.token_bytes:
            return 0 * num_tokens
        # The stretch begins at a multiple of the token's size, so at most that far into a block.
        before = self.block_bytes - gcd(self.token_bytes, self.block_bytes)
        num_blocks = (before + num_tokens * self.token_bytes - 1) // self.block_bytes + 1
        return self._pages_under(num_blocks * self.block_bytes) * (num_tokens > 0)

    def whole_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill to the last byte."""
        return num_tokens * self.token_bytes // self.block_bytes if self.token_bytes else 0

    def blocks_pages(self, num_blocks: int) -> int:
        """Pages that `num_blocks` blocks take if they lie side by side."""
        return self._pages_under(self.blocks_bytes(num_blocks))

    def shared_pages(self, num_blocks: int) -> int:
        """Pages that are saved at least where sequences share `num_blocks` whole blocks."""
        if not self.shares:
            return 0
        return self.blocks_bytes(num_blocks) // self._place_bytes * self.place_pages

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
                shared and take nothing; a block that is filled in part is copied. Units of large
                pages that are copied too do not count, as it depends on where they are.
        """
        return self.pages(num_tokens) - self.shared_pages(self.whole_blocks(num_cached))

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
        num_shared = (num_sequences - 1) * self.whole_blocks(max(num_prompt - 1, 0))
        return num_pages - self.shared_pages(num_shared)

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
        if not self._has_bytes:
            return UNLIMITED_TOKENS

        def is_too_long(num_total: int) -> bool:
            shared = min(num_prompt, num_total - 1)
            return self.most(shared, num_total, num_sequences) > num_pages

        low, high = 1, self._most_tokens(max(num_pages, 0)) + 1
        # `most` rises with the total where the prompt stays the same, but not always where the
        # prompt grows too: a token more may let a whole block more be shared.
        if is_too_long(num_prompt + 1):
            high = min(high, num_prompt)
        else:
            low = num_prompt + 1
        return low + bisect_left(range(low + 1, high + 1), True, key=is_too_long)

    def growth(self, more_tokens: _IntArray, num_tokens: _IntArray) -> int:
        """Pages to set aside for running sequences to grow by.

        Args:
            more_tokens: [num_seqs], tokens by which each may grow. A sequence that grows by a
                single token may need a whole page at once, or a stripe of pages.
            num_tokens: [num_seqs], tokens that each has.
        """
        if not self.token_bytes:
            return 0
        least_bytes = (more_tokens > 0) * self._place_bytes
        num_bytes = int(np.maximum(more_tokens * self.token_bytes, least_bytes).sum())
        return -(-num_bytes // self.page_bytes)

    @property
    def _place_bytes(self) -> int:
        """Size of what is mapped as one."""
        return self.place_pages * self.page_bytes

    def _pages_under(self, num_bytes: Count) -> Count:
        """Pages under so many bytes that begin where a place does."""
        return -(-num_bytes // self._place_bytes) * self.place_pages

    @property
    def _has_bytes(self) -> bool:
        """Whether a sequence takes any memory."""
        return self.token_bytes > 0

    def _most_tokens(self, num_pages: int) -> int:
        """An upper bound of the tokens of one sequence on so many pages."""
        return num_pages * self.page_bytes // self.token_bytes


@dataclass(frozen=True, slots=True)
class StateFootprint(Footprint):
    """Footprint of recurrent state: as large for one token as for any number of them.

    The state after n tokens stands where KV of token n - 1 would be, and is its block. So
    `token_bytes` and `block_bytes` are the size of a state.
    """

    def pages(self, num_tokens: Count) -> Count:
        """Pages under one sequence at most. States lie side by side, so one may begin and end in
        the middle of a page."""
        return (num_tokens > 0) * self._most_pages

    def stretch_pages(self, num_tokens: Count) -> Count:
        """The same as `pages`."""
        return self.pages(num_tokens)

    def growth(self, more_tokens: _IntArray, num_tokens: _IntArray) -> int:
        """No pages: a sequence that has begun has its state."""
        return 0

    @property
    def kept_block_bytes(self) -> int:
        """Checkpoints lie on pages of their own."""
        return self.blocks_pages(1) * self.page_bytes

    @property
    def _most_pages(self) -> int:
        before = self.page_bytes - gcd(self.block_bytes, self.page_bytes)
        return (before + self.block_bytes - 1) // self.page_bytes + 1


@dataclass(frozen=True, slots=True)
class PartFootprint:
    """Footprint of one part of what a sequence keeps (`aquifer.cache.base.CachePart`).

    Attributes:
        footprint: footprint of the part's KV where nothing of it is given back.
        kept_tokens: tokens before the next one that rows attend to; None for all.
        step_tokens: tokens of a step at most, which it has beside those.
        ahead_tokens: tokens that pages are mapped for ahead of need, which it has beside those.
        checkpoint_tokens: tokens before those that it keeps for checkpoints.
    """

    footprint: Footprint
    kept_tokens: int | None
    step_tokens: int
    ahead_tokens: int = 0
    checkpoint_tokens: int = 0

    def pages(self, num_tokens: Count) -> Count:
        """Pages under one sequence at most until it has `num_tokens` tokens."""
        pages = self.footprint.pages(num_tokens)
        if self.kept_tokens is None:
            return pages
        return _least(pages, self._most_kept(self.step_tokens))

    def needed(self, num_tokens: int, num_cached: int) -> int:
        """See `Footprint.needed`."""
        if self.kept_tokens is None:
            return self.footprint.needed(num_tokens, num_cached)
        # Where the blocks that are adopted begin depends on the sequence.
        num_shared = self.footprint.whole_blocks(min(num_cached, self.kept_tokens)) - 1
        return self.pages(num_tokens) - self.footprint.shared_pages(max(num_shared, 0))

    def most(self, num_prompt: int, num_total: int, num_sequences: int) -> int:
        """See `Footprint.most`. Sequences share no tokens for long, so they count in full."""
        if self.kept_tokens is None:
            return self.footprint.most(num_prompt, num_total, num_sequences)
        # The tokens of a step are those of all sequences; each may begin one more block.
        each = self._most_kept(1) + self.footprint.blocks_pages(1)
        return min(
            self._most_kept(self.step_tokens) + (num_sequences - 1) * each,
            num_sequences * self.footprint.pages(num_total - 1),
        )

    def growth(self, more_tokens: _IntArray, num_tokens: _IntArray) -> int:
        """See `Footprint.growth`. A sequence beyond its window may need another page even so."""
        if self.kept_tokens is None:
            return self.footprint.growth(more_tokens, num_tokens)
        left = np.maximum(self.kept_tokens - num_tokens, 1)
        return self.footprint.growth(np.minimum(more_tokens, left), num_tokens)

    def _most_kept(self, step_tokens: int) -> int:
        """Pages under one sequence at most, however long it is.

        Args:
            step_tokens: tokens of it in one step.
        """
        assert self.kept_tokens is not None, "there is a window"
        kept_tokens = self.kept_tokens + self.checkpoint_tokens
        return self.footprint.stretch_pages(kept_tokens + step_tokens + self.ahead_tokens)


@dataclass(frozen=True, slots=True)
class GroupedFootprint(Footprint):
    """Footprint of several parts, of which some give back what is behind their windows.

    Blocks are those of the first part: `token_bytes`, `block_bytes` and what follows from them are
    of it alone. Pages are those of all parts.

    Attributes:
        parts: the parts.
    """

    parts: tuple[PartFootprint, ...] = ()

    def pages(self, num_tokens: Count) -> Count:
        """Pages under one sequence at most until it has `num_tokens` tokens."""
        pages = 0 * num_tokens
        for part in self.parts:
            pages = pages + part.pages(num_tokens)
        return pages

    def needed(self, num_tokens: int, num_cached: int = 0) -> int:
        """See `Footprint.needed`."""
        return sum(part.needed(num_tokens, num_cached) for part in self.parts)

    @property
    def _has_bytes(self) -> bool:
        return any(part.footprint.token_bytes for part in self.parts)

    def most(self, num_prompt: int, num_total: int, num_sequences: int = 1) -> int:
        """See `Footprint.most`."""
        return sum(part.most(num_prompt, num_total, num_sequences) for part in self.parts)

    def growth(self, more_tokens: _IntArray, num_tokens: _IntArray) -> int:
        """See `Footprint.growth`."""
        return sum(part.growth(more_tokens, num_tokens) for part in self.parts)

    def _most_tokens(self, num_pages: int) -> int:
        """As many as if all pages were of the part that keeps all tokens, if there is one."""
        if self.parts[0].kept_tokens is not None or not self.token_bytes:
            return UNLIMITED_TOKENS
        return num_pages * self.page_bytes // self.token_bytes


def _least(numbers: Count, limit: int) -> Count:
    """Each number, or the limit where it is larger."""
    return numbers - (numbers > limit) * (numbers - limit)
