"""Protocols of cache managers: what a sequence keeps while it runs, in any layout.

A sequence is named by its slot, its index in the arrays of running sequences. The scheduler is the
only writer of progress; a manager derives pages from the token counts that it is given.

What a sequence keeps has one part or several, each with a manager of its own (`GroupCache`): layers
that attend to all tokens keep all of them, and layers with a window the latest ones. The engine
calls a `SequenceCache`. With one part that keeps everything, this is the part's manager itself,
else a `GroupedCache` over all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from aquifer.cache.footprint import Footprint
from aquifer.cache.group_tensors import GroupedShape
from aquifer.cache.journal import KVOp
from aquifer.cache.layout import KVLayout, LayerKV, StateLayout, StateTensor
from aquifer.cache.spans import IntArray, Rows, Spans
from aquifer.cache.state_view import Recurrence
from aquifer.cache.tensors import KVShape, KVTensors
from aquifer.cache.view import AttentionOptions, KVSource, KVView
from aquifer.memory.pool import Owner, PagePool
from aquifer.predict.lengths import Forecast

__all__ = [
    "AttentionOptions",
    "Blocks",
    "CacheFactory",
    "CachePart",
    "CacheStats",
    "DeviceCache",
    "GroupCache",
    "GroupFactory",
    "IntArray",
    "KVLayout",
    "KVPart",
    "KVView",
    "Kept",
    "LayerKV",
    "Recurrence",
    "Rows",
    "SequenceCache",
    "Spans",
    "StateLayout",
    "StateTensor",
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

    def blocks(self, slot: int, num_tokens: int) -> Sequence[int]:
        """The blocks that the first `num_tokens` tokens of a sequence lie in, in order.

        Pre-condition: room was reserved for these tokens.
        """

    def retain(self, blocks: Sequence[int]) -> None:
        """Keep blocks also when no sequence uses them. Each must be dropped once.

        Pre-condition: no sequence will write to what is to be kept of them. For a sequence that
        goes on, these are blocks that begin before its next token.

        A held block that no sequence uses is accounted as a retained prefix (`Kind.PREFIX`).
        """

    def unretain(self, blocks: Sequence[int]) -> None:
        """The opposite of `retain`; blocks that are neither used nor held are given back."""


class DeviceCache(KVSource, Protocol):
    """The device's half of a cache: `KVTensors`, or several of them as `GroupedTensors`."""

    @property
    def shape(self) -> KVShape | GroupedShape:
        """Shape of the addresses, for a follower."""

    def open(self) -> bool:
        """Take the anchors' pages, before any others; False means that the pool is short."""

    def vacate(self) -> None:
        """Unmap all pages that were given up, after the work that may touch them."""

    def record(self, note: Callable[[KVOp], None] | None = None) -> None:
        """Begin to record all changes. Pre-condition: no page has been mapped yet.

        Args:
            note: called with each change, in place of keeping it for `take_journal`.
        """

    def take_journal(self) -> tuple[KVOp, ...]:
        """All changes since recording began, or since the last call, in order."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The blocks of a sequence's last tokens in one part.

    Attributes:
        first: number of the sequence's blocks before these, which are not kept.
        blocks: the blocks, in order.
    """

    first: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class CachePart:
    """A part of what a sequence keeps.

    Attributes:
        cache: its manager.
        window_tokens: it keeps this many latest tokens, the next one included; None for all.
        keeps_state: whether it is recurrent state (`aquifer.cache.state`): a sequence can go on
            only after the very token that its state follows.
    """

    cache: GroupCache
    window_tokens: int | None
    keeps_state: bool = False

    def first_needed(self, position: int) -> int:
        """The first token that rows from a position on attend to."""
        return 0 if self.window_tokens is None else max(position + 1 - self.window_tokens, 0)


class SequenceVerbs(Blocks, Protocol):
    """What a cache and each part of it do for sequences.

    The verbs of PagedAttention (section 5.2) are `fork`, `reserve` (append) and `release` (free).
    The methods of `Blocks` are those of the first part.
    """

    @property
    def parts(self) -> tuple[CachePart, ...]:
        """The parts of what a sequence keeps. A part without a window comes first."""

    @property
    def stuck_slot(self) -> int | None:
        """Slot of the running sequence for which the last `reserve` found no place in one piece;
        None if it failed for want of pages, or did not fail."""

    @property
    def can_share(self) -> bool:
        """Whether `resume` and `fork` share blocks, and `retain` keeps them; else forks copy."""

    def keep_checkpoints(self) -> None:
        """From now on, keep the windows before the last whole block of the first part.

        There a prefix ends that can be kept (`aquifer.cache.prefix.checkpoints`). Pre-condition: no
        sequence has begun.
        """

    def slot_blocks(self, slot: int) -> Sequence[int]:
        """All blocks of a slot that it still has, in order, including those for tokens to come."""

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Announce the length of a slot's sequence; called first.

        Managers that reserve the whole sequence beforehand need it; others may ignore it.

        Args:
            slot: the slot.
            num_prompt: its present length, tokens.
            num_total: its largest length, prompt included.
            forecast: of the tokens that follow the prompt; None if lengths are not predicted.
        """

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Make sure that an admitted sequence has room for the tokens that it has, as `reserve`.

        A part with a window gets as much as it needs at once while these tokens are run: no more
        than the window and the tokens of a step.
        """

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Make sure that each sequence has room for `num_tokens` tokens in all.

        All or nothing: False means that the pool is short, and nothing has changed. A request for
        less than a sequence has changes nothing.
        """

    def advance(self, slots: IntArray, positions: IntArray) -> None:
        """Give back KV that no row at these positions or later attends to.

        Steps that were launched may still read it: pages stay until these are done, and blocks are
        overwritten by later steps only.

        Args:
            slots: running sequences.
            positions: [num_seqs], the least position that each one's next row can have.
        """

    def learn(self, num_total: int) -> None:
        """A sequence has ended by itself, of this manager or of that of another device.

        Managers with buckets learn from it; others may ignore it.

        Args:
            num_total: its final length, prompt included, tokens.
        """

    def release(self, slot: int) -> None:
        """Forget a sequence and give back its blocks, except what is used or held elsewhere."""

    def resume(self, slot: int, kept: Sequence[Kept], num_tokens: int) -> bool:
        """Begin a sequence in an empty slot with tokens that are in blocks of all parts already.

        Blocks are shared or copied as `GroupCache.adopt` says. All or nothing: False means that the
        pool is short, and nothing has changed.

        Args:
            slot: a slot without tokens.
            kept: for each part, the blocks that the tokens lie in which rows to come attend to; in
                use or held.
            num_tokens: at least 1.
        """

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """Whether a sequence still has what rows after its first `num_tokens` tokens attend to."""

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Let an empty slot share the first tokens of another one, and what comes before its next
        token: `resume` with the parent's blocks.

        Copies read the KV that the steps launched so far write. Pre-condition: `can_fork`, and
        where a part keeps state, these are all tokens of the steps launched so far.
        """

    def mark(self, slot: int, num_tokens: int) -> None:
        """Copy what a later sequence needs to begin after these tokens, if the pool has room.

        They are all tokens of the steps launched so far. Only parts with state need it.
        """

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """The free slot that shares these blocks of the first part at the least cost, or begins at
        the least cost if there are none; None if all cost the same."""

    def upload(self) -> None:
        """Send changes of tables to the device, and launch the copies that were requested.

        To be called before each step, and before `copy_in` and `copy_out` of a part.
        """

    def stats(self, written_tokens: int | IntArray) -> CacheStats:
        """Memory of the manager.

        Args:
            written_tokens: tokens that the scheduler counts as written: of each slot, [slots], or
                in all, which suffices where no part has a window.
        """

    def close(self) -> None:
        """Release all sequences and the addresses. Pre-condition: no block is held."""


class SequenceCache(SequenceVerbs, Protocol):
    """Gives sequences room for tokens. Knows the layout, not the policy."""

    @property
    def tensors(self) -> DeviceCache:
        """The device's half, which is all that a runner needs."""


class GroupCache(SequenceVerbs, Protocol):
    """Manager of one part: of layers that keep the KV of the same tokens, or of all state.

    By itself it keeps all tokens; `admit` and `advance` give back nothing. The owner of several
    parts has it `forget` tokens. Then the blocks of a slot are those of its last tokens.

    Attributes:
        ahead_tokens: tokens beyond those asked for that `reserve` maps for at most.
    """

    ahead_tokens: int

    def kept_at(self, slot: int, num_tokens: int, window_tokens: int) -> Kept | None:
        """What a checkpoint after some tokens of a slot holds; None if some of it is gone.

        Args:
            slot: the slot.
            num_tokens: the tokens, all written.
            window_tokens: the window of the part.
        """

    def marked(self, slot: int) -> list[int] | None:
        """Numbers of tokens after which `kept_at` returns something, ascending; None for all after
        which the window is still there."""

    def unmark(self, slot: int, num_tokens: int) -> None:
        """Drop what was copied for a checkpoint after so many tokens."""

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int, first: int = 0) -> bool:
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
            first: number of the first ones that are missing: the slot begins after them.
        """

    def forget(self, slots: IntArray, num_tokens: IntArray) -> None:
        """Give back blocks that lie wholly in the first `num_tokens` tokens of each sequence.

        In an empty slot, the sequence begins after these tokens: `reserve` gives it no blocks that
        lie wholly in them.
        """

    def num_forgotten(self, slot: int) -> int:
        """The first token of a slot that is kept as a whole, with all that come after it."""

    def ends(self, slots: IntArray) -> IntArray:
        """Number of blocks of each slot, those that were given up included; for `shrink`."""

    def shrink(self, slots: IntArray, ends: IntArray) -> None:
        """Take back what `reserve` gave since `ends` returned these numbers."""

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """Copy the KV of a stretch of tokens to host memory, after all work launched so far.

        Args:
            slot: the sequence's slot.
            tokens: positions of the tokens, all written by steps that were launched already.
            target: uint8, len(tokens) * layout.token_bytes, page-locked where that is faster.
        """

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """The opposite of `copy_out`. Pre-condition: room is reserved, and is not shared."""


class KVPart(GroupCache, SequenceCache, Protocol):
    """Manager of one part of the KV."""

    @property
    def tensors(self) -> KVTensors:
        """The device's half."""


class CacheFactory(Protocol):
    """Builds a manager."""

    def __call__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        state: StateLayout | None = None,
    ) -> SequenceCache:
        """Build it.

        Args:
            pool: where pages come from.
            owner: owner of the KV.
            layout: layout of one token's KV.
            max_seqs: number of slots.
            max_tokens: length of the longest sequence.
            state: layout of one sequence's recurrent state; None if no layer has any.
        """


GroupFactory = Callable[[PagePool, Owner, KVLayout, int, int], KVPart]
"""Builds a manager of KV of layers that are one part, from (pool, owner, layout, max_seqs,
max_tokens of one sequence)."""
