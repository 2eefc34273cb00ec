"""Checkpoints: what parts of a cache with a window must have kept for a prefix to be of use.

A layer without a window needs the KV of all tokens of a prefix, and every prefix of those is then
kept, too. A layer with a window of W tokens needs the last W tokens alone, and gives back what was
before. So a sequence can go on only after certain numbers of tokens: where a checkpoint was taken.

    checkpoint after n tokens: [max(n - W, 0), n) of each part with a window
                               a copy of the state, taken while it was that after n tokens

That is one token more than the row at n attends to. So also a request of n tokens can begin with
it, which computes the last one again; not if there is state, which cannot go back by a token.

Between checkpoints with state in a prompt are as many tokens as have KV of the state's size. So
they take no more memory than the KV that they are of use with.

Neighbouring checkpoints overlap, and hold the blocks that they have in common each for itself. The
blocks that only one of them holds come free with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from aquifer.cache.base import CachePart, Kept
from aquifer.cache.prefix.trie import Node

_PER_WINDOW = 4
"""Checkpoints in a window's length of a prompt. A request that leaves the prompt of an earlier one
somewhere computes at most this part of a window again, beside what is different."""


class Checkpoints:
    """The checkpoints of one trie, with the blocks that they hold.

    Args:
        parts: the parts of the cache.

    Attributes:
        every_tokens: distance of the checkpoints in a prompt.
        are_exact: whether a sequence can begin only with all tokens of a checkpoint, not with one
            less, as there is recurrent state.
        held_bytes: bytes of the blocks that they hold; each block counts once.
        guarded_bytes: bytes of those that guarded checkpoints hold.
        full_bytes: bytes of a checkpoint at most.
    """

    def __init__(self, parts: Sequence[CachePart]) -> None:
        self._parts = [part for part in parts if part.window_tokens is not None]
        windows = [part.window_tokens or 0 for part in self._parts]
        self._states = [part.cache for part in self._parts if part.keeps_state]
        self.are_exact = bool(self._states)
        self.every_tokens = max(min(windows) // _PER_WINDOW, 1) if windows else 0
        if self._states:
            state_bytes = sum(state.footprint.block_bytes for state in self._states)
            self.every_tokens = -(-state_bytes // max(parts[0].cache.footprint.token_bytes, 1))
        self.held_bytes = 0
        self.guarded_bytes = 0
        self.full_bytes = sum(
            part.cache.footprint.stretch_pages(window) * part.cache.footprint.page_bytes
            for part, window in zip(self._parts, windows, strict=True)
        )
        self._holders: list[Counter[int]] = [Counter() for _ in self._parts]
        self._guards: list[Counter[int]] = [Counter() for _ in self._parts]

    def __bool__(self) -> bool:
        """Whether any part has a window, so that a prefix needs a checkpoint."""
        return bool(self._parts)

    def take(self, slot: int, num_tokens: int) -> tuple[Kept, ...] | None:
        """What a sequence keeps before a position; None if it has given some of it back."""
        found = []
        for part in self._parts:
            assert part.window_tokens is not None
            kept = part.cache.kept_at(slot, num_tokens, part.window_tokens)
            if kept is None:
                return None
            found.append(kept)
        return tuple(found)

    def marked(self, slot: int) -> list[int]:
        """Numbers of tokens after which a sequence has marked its state, ascending."""
        return [count for state in self._states for count in state.marked(slot) or ()]

    def unmark(self, slot: int, num_tokens: int) -> None:
        """Drop what a sequence has marked after so many tokens."""
        for state in self._states:
            state.unmark(slot, num_tokens)

    def upto(self, checkpoint: Node, num_tokens: int) -> list[Kept]:
        """The blocks of a checkpoint that the first tokens of its prefix lie in.

        Args:
            checkpoint: a checkpoint.
            num_tokens: the tokens of its prefix, or one less.
        """
        found = []
        for part, each in zip(self._parts, checkpoint.kept, strict=True):
            footprint = part.cache.footprint
            end = -(-num_tokens * footprint.token_bytes // footprint.block_bytes)
            found.append(Kept(each.first, each.blocks[: end - each.first]))
        return found

    def hold(self, kept: Sequence[Kept]) -> int:
        """Hold the blocks of a new checkpoint; returns the bytes that none held before."""
        added_bytes = 0
        for part, holders, each in zip(self._parts, self._holders, kept, strict=True):
            part.cache.retain(each.blocks)
            added_bytes += _count(holders, each, 1) * part.cache.footprint.kept_block_bytes
        self.held_bytes += added_bytes
        return added_bytes

    def drop(self, checkpoint: Node) -> int:
        """Drop the blocks of a checkpoint; returns the bytes that no other holds."""
        freed_bytes = 0
        for part, holders, each in zip(self._parts, self._holders, checkpoint.kept, strict=True):
            freed_bytes += _count(holders, each, -1) * part.cache.footprint.kept_block_bytes
            part.cache.unretain(each.blocks)
        self.held_bytes -= freed_bytes
        return freed_bytes

    def guard(self, checkpoint: Node, change: int) -> None:
        """Count that a checkpoint is guarded, by 1, or no longer, by -1."""
        for part, guards, each in zip(self._parts, self._guards, checkpoint.kept, strict=True):
            num_bytes = _count(guards, each, change) * part.cache.footprint.kept_block_bytes
            self.guarded_bytes += change * num_bytes

    def pages(self, checkpoint: Node) -> int:
        """Pages that the blocks of a checkpoint take if they lie side by side."""
        return sum(
            -(
                -len(each.blocks)
                * part.cache.footprint.kept_block_bytes
                // part.cache.footprint.page_bytes
            )
            for part, each in zip(self._parts, checkpoint.kept, strict=True)
        )


def _count(counter: Counter[int], kept: Kept, change: int) -> int:
    """Change the counts of blocks by 1 or -1; the number of those that had none, or have none."""
    num_changed = 0
    for block in kept.blocks:
        count = counter[block] + change
        if count:
            counter[block] = count
        else:
            del counter[block]
        num_changed += count == max(change, 0)
    return num_changed
