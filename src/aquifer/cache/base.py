"""What a sequence keeps while it runs: one protocol, whatever the layout behind it.

A sequence is named by its slot, its place in the arrays of running sequences. The scheduler is
the only writer of progress; a manager derives pages from the token counts it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from aquifer.cache.footprint import Footprint
from aquifer.cache.layout import KVLayout, LayerKV
from aquifer.cache.spans import IntArray, Rows, Spans
from aquifer.cache.tensors import KVTensors
from aquifer.cache.view import KVView
from aquifer.memory.pool import Owner, PagePool

__all__ = [
    "Blocks",
    "CacheFactory",
    "CacheStats",
    "IntArray",
    "KVLayout",
    "KVView",
    "LayerKV",
    "Rows",
    "SequenceCache",
    "Spans",
]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a manager holds. `mapped_bytes + shared_bytes == written_bytes + wasted_bytes`."""

    written_tokens: int  # of all sequences: a token that several share counts for each
    written_bytes: int
    mapped_bytes: int  # of pages that sequences use, each counted once
    shared_bytes: int = 0  # what sharing saves: for each block, its size for every user but one

    @property
    def wasted_bytes(self) -> int:
        """Bytes mapped without a written token in them."""
        return self.mapped_bytes + self.shared_bytes - self.written_bytes


class Blocks(Protocol):
    """Blocks of KV: what sequences share, and what is kept when they have ended.

    In a paged cache these are its blocks, in a virtual one its pages. A block has a number, which
    stays the same for as long as the block is used or held. A block that is shared is never written
    to: a sequence writes only to blocks that it alone has.
    """

    @property
    def layout(self) -> KVLayout:
        """Layout of one token."""

    @property
    def block_bytes(self) -> int:
        """Size of a block."""

    @property
    def footprint(self) -> Footprint:
        """Pages and bytes that tokens take."""

    def tokens_in(self, num_blocks: int) -> int:
        """How many tokens lie in the first blocks of a sequence, the last whole one included."""

    def tokens_touching(self, num_blocks: int) -> int:
        """How many tokens have any byte in the first blocks: at least `tokens_in`.

        The contents of these blocks depend on so many tokens, and on nothing else.
        """

    def blocks(self, slot: int, num_tokens: int) -> list[int]:
        """The blocks that the first tokens of a sequence lie in, in order.

        Pre-condition: room was reserved for so many.
        """

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep blocks when no sequence uses them any more. Each must be dropped once.

        Pre-condition: no sequence will write to them any more. Of one that goes on, those are the
        blocks that lie before its next token.

        A held block that no sequence uses is accounted as a retained prefix (`Kind.PREFIX`).
        """

    def drop(self, blocks: Sequence[int]) -> None:
        """End what `hold` began; blocks that are neither used nor held any more are given back."""


class SequenceCache(Blocks, Protocol):
    """Gives sequences room for tokens. Knows the layout, not the policy.

    The verbs of PagedAttention (section 5.2) are `fork`, `reserve` (append) and `release` (free).
    """

    @property
    def tensors(self) -> KVTensors:
        """The device's half: all that a runner needs."""

    def slot_blocks(self, slot: int) -> list[int]:
        """All blocks of a slot, in order: those for tokens to come included."""

    @property
    def can_share(self) -> bool:
        """Whether `adopt` and `fork` share blocks, and `hold` keeps them; else they copy all."""

    def expect(self, slot: int, num_prompt: int, num_total: int) -> None:
        """Say how long the sequence of a slot is and may become; called before anything else of it.

        For managers that reserve all of it beforehand; others need not know.
        """

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Make sure that each sequence has room for that many tokens in all.

        All or nothing: False means that the pool is short, and nothing has changed. Asking for
        less than a sequence has is no change.
        """

    def release(self, slot: int) -> None:
        """Forget a sequence and give back its blocks, except what is used or held elsewhere."""

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int) -> bool:
        """Begin a sequence in an empty slot with `num_tokens` tokens that are in `blocks` already.

        Blocks that end at or before the last of these tokens are shared. If the sequence's next
        token goes to the last block too, that one is copied: copy-on-write (section 4.4), done at
        once, because a sequence writes in the step after it adopted. The copies of all calls
        between two `upload`s are one launch.

        All or nothing: False means that the pool is short, and nothing has changed.

        Args:
            slot: has no tokens yet.
            blocks: those that the tokens lie in, as `blocks` gives them; in use or held.
            num_tokens: at least 1.
        """

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Let an empty slot share the first tokens of another one: `adopt` of the parent's blocks.

        Copies read what the steps launched so far have written.
        """

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """The free slot that could adopt these blocks at the least cost; None if all are alike."""

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """Copy the KV of a stretch of tokens to host memory, after all that was launched so far.

        Args:
            slot: of the sequence.
            tokens: which, all written or to be written by steps launched already.
            target: uint8, len(tokens) * layout.token_bytes, page-locked where that is faster.
        """

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """The opposite of `copy_out`. Pre-condition: room was reserved, and is not shared."""

    def upload(self) -> None:
        """Let the device know of what was reserved, and make the copies that `adopt` asked for.

        To be called before each step, and before `copy_in` and `copy_out`.
        """

    def view(self, rows: Rows) -> KVView:
        """The addresses of one step. Pre-condition: room was reserved for it.

        It reads nothing but tensors, so that a captured step stays valid as its rows change.
        """

    def stats(self, written_tokens: int) -> CacheStats:
        """What is held, given how many tokens the scheduler knows to be written."""

    def close(self) -> None:
        """Release all sequences and the addresses. Pre-condition: no block is held."""


CacheFactory = Callable[[PagePool, Owner, KVLayout, int, int], SequenceCache]
"""Builds a manager from (pool, owner, layout, max_seqs, max_tokens of one sequence)."""
