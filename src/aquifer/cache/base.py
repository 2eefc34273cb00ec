"""Protocols of cache managers: what a sequence keeps while it runs, in any layout.

A sequence is named by its slot, its index in the arrays of running sequences. The scheduler is the
only writer of progress; a manager derives pages from the token counts that it is given.
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
from aquifer.cache.view import AttentionOptions, KVView
from aquifer.memory.pool import Owner, PagePool

__all__ = [
    "AttentionOptions",
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
    """Memory of a manager. `mapped_bytes + shared_bytes == written_bytes + wasted_bytes`."""

    written_tokens: int  # over all sequences: a token that several share counts for each
    written_bytes: int
    mapped_bytes: int  # pages that sequences use, each counted once
    shared_bytes: int = 0  # saved by sharing: for each block, its size for every user but one

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
    def footprint(self) -> Footprint:
        """Pages and bytes that tokens take."""

    def tokens_in(self, num_blocks: int) -> int:
        """Number of tokens that end in the first `num_blocks` blocks of a sequence."""

    def tokens_touching(self, num_blocks: int) -> int:
        """Number of tokens that have any byte in the first blocks: at least `tokens_in`.

        The contents of these blocks depend on these tokens, and on nothing else.
        """

    def blocks(self, slot: int, num_tokens: int) -> list[int]:
        """The blocks that the first `num_tokens` tokens of a sequence lie in, in order.

        Pre-condition: room was reserved for these tokens.
        """

    def retain(self, blocks: Sequence[int]) -> None:
        """Keep blocks also when no sequence uses them. Each must be dropped once.

        Pre-condition: no sequence will write to them. For a sequence that goes on, these are the
        blocks that lie before its next token.

        A held block that no sequence uses is accounted as a retained prefix (`Kind.PREFIX`).
        """

    def unretain(self, blocks: Sequence[int]) -> None:
        """The opposite of `retain`; blocks that are neither used nor held are given back."""


class SequenceCache(Blocks, Protocol):
    """Gives sequences room for tokens. Knows the layout, not the policy.

    The verbs of PagedAttention (section 5.2) are `fork`, `reserve` (append) and `release` (free).
    """

    @property
    def tensors(self) -> KVTensors:
        """The device's half, which is all that a runner needs."""

    def slot_blocks(self, slot: int) -> list[int]:
        """All blocks of a slot, in order, including those for tokens to come."""

    @property
    def can_share(self) -> bool:
        """Whether `adopt` and `fork` share blocks, and `retain` keeps them; else forks copy all."""

    def expect(self, slot: int, num_prompt: int, num_total: int) -> None:
        """Announce the present and the largest length of a slot's sequence; called first.

        Managers that reserve the whole sequence beforehand need it; others may ignore it.
        """

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Make sure that each sequence has room for `num_tokens` tokens in all.

        All or nothing: False means that the pool is short, and nothing has changed. A request for
        less than a sequence has changes nothing.
        """

    def release(self, slot: int) -> None:
        """Forget a sequence and give back its blocks, except what is used or held elsewhere."""

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int) -> bool:
        """Begin a sequence in an empty slot with `num_tokens` tokens that are in `blocks` already.

        Blocks that end at or before the end of these tokens are shared. If the sequence's next
        token belongs in the last block too, that block is copied: copy-on-write (section 4.4), done
        at once, because a sequence writes in the step after it adopted. The copies of all calls
        between two `upload`s are one launch.

        All or nothing: False means that the pool is short, and nothing has changed.

        Args:
            slot: a slot without tokens.
            blocks: the blocks that the tokens lie in, as `blocks` returns them; in use or held.
            num_tokens: at least 1.
        """

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Let an empty slot share the first tokens of another one: `adopt` of the parent's blocks.

        Copies read the KV that the steps launched so far write.
        """

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """The free slot that adopts these blocks at the least cost, or begins at the least cost if
        there are none; None if all cost the same."""

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """Copy the KV of a stretch of tokens to host memory, after all work launched so far.

        Args:
            slot: the sequence's slot.
            tokens: positions of the tokens, all written by steps that were launched already.
            target: uint8, len(tokens) * layout.token_bytes, page-locked where that is faster.
        """

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """The opposite of `copy_out`. Pre-condition: room is reserved, and is not shared."""

    def upload(self) -> None:
        """Send changes of tables to the device, and launch the copies that `adopt` requested.

        To be called before each step, and before `copy_in` and `copy_out`.
        """

    def stats(self, written_tokens: int) -> CacheStats:
        """Memory of the manager, given how many tokens the scheduler counts as written."""

    def close(self) -> None:
        """Release all sequences and the addresses. Pre-condition: no block is held."""


CacheFactory = Callable[[PagePool, Owner, KVLayout, int, int], SequenceCache]
"""Builds a manager from (pool, owner, layout, max_seqs, max_tokens of one sequence)."""
