"""What a manager has in common with others that keep all tokens in one part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aquifer.cache.base import CachePart, GroupCache, Kept
from aquifer.cache.spans import IntArray


class KeepsAll:
    """The verbs of a `GroupCache` by itself: it is the only part, and keeps all tokens."""

    stuck_slot: int | None = None

    @property
    def parts(self: GroupCache) -> tuple[CachePart, ...]:
        """The manager itself."""
        return (CachePart(self, None),)

    def admit(self: GroupCache, slot: int, num_tokens: int) -> bool:
        """`reserve` all of them."""
        return self.reserve(np.array([slot]), np.array([num_tokens]))

    def resume(self: GroupCache, slot: int, kept: Sequence[Kept], num_tokens: int) -> bool:
        """`adopt` the blocks."""
        (of_all,) = kept
        return self.adopt(slot, of_all.blocks, num_tokens, of_all.first)

    def learn(self, num_total: int) -> None:
        """Do nothing: no lengths are predicted."""

    def keep_checkpoints(self) -> None:
        """Do nothing."""

    def advance(self, slots: IntArray, positions: IntArray) -> None:
        """Do nothing."""

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """True."""
        return True

    def mark(self, slot: int, num_tokens: int) -> None:
        """Do nothing: KV of earlier tokens stays as it is."""

    def marked(self, slot: int) -> list[int] | None:
        """None: see `GroupCache.marked`."""
        return None

    def unmark(self, slot: int, num_tokens: int) -> None:
        """Do nothing."""

    def kept_at(self: GroupCache, slot: int, num_tokens: int, window_tokens: int) -> Kept | None:
        """The blocks of the window, with one token more."""
        first = max(num_tokens - window_tokens, 0)
        if self.num_forgotten(slot) > first:
            return None
        blocks, footprint = self.blocks(slot, num_tokens), self.footprint
        end = -(-num_tokens * footprint.token_bytes // footprint.block_bytes)
        begin = footprint.whole_blocks(first)
        return Kept(begin, blocks[len(blocks) - (end - begin) :])
