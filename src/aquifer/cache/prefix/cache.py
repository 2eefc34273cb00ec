"""Cache of prefixes: the scheduler's interface to the trie, its victims and its pins.

To begin, extend or end a sequence takes time in proportion to its blocks. Statistics and properties
are counters: but for `promised_bytes`, they take the same time however many blocks are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from aquifer.cache.base import Blocks, CachePart, Kept
from aquifer.cache.prefix.checkpointer import Checkpointer
from aquifer.cache.prefix.checkpoints import Checkpoints
from aquifer.cache.prefix.pins import Pins
from aquifer.cache.prefix.trie import Match, Node, TokenIds, Trie, check_token_ids, path_end
from aquifer.cache.prefix.victims import VictimQueues
from aquifer.errors import InvariantError
from aquifer.memory.eviction_log import Losses
from aquifer.memory.reclaim import ReuseModel


@dataclass(slots=True, eq=False)
class Lease:
    """Guard of the path of one sequence, from the root to the last block known of it.

    Attributes:
        match: the prefix that the sequence began with.
        node: node of its last known block, for this package; None before the first block.
        match_node: the node that the match ends with, for this package; None if it is empty.
        checkpoint: the checkpoint that it guards until `PrefixCache.settle`, for this package.
        is_open: True until `PrefixCache.unlock`.
    """

    match: Match
    node: Node | None
    match_node: Node | None = None
    checkpoint: Node | None = None
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Blocks that are kept now, and counts since the start."""

    held_blocks: int
    held_bytes: int
    checkpoint_bytes: int  # of these: what checkpoints hold
    pinned_bytes: int
    evictable_bytes: int  # blocks with neither a lease nor a pin on them or below
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int


class PrefixCache:
    """Finds, keeps and evicts the KV of earlier requests of one model.

    A sequence goes through it in this order:

        match = prefixes.match(token_ids, extra)
        lease = prefixes.lock(match)          # otherwise making room could evict the match
        ...                                   # resume with prefixes.kept(match); if that fails,
                                              # unlock(lease) and wait
        prefixes.settle(lease)
        prefixes.record(lease, now_s)
        prefixes.insert(lease, slot, token_ids, num_computed, now_s)    # at any time, any number
        prefixes.unlock(lease, now_s)         # it ended, or was preempted; then release its slot

    It is a tenant of `aquifer.memory.reclaim.Reclaimer`: a source of victims. For a model without
    KV, nothing is found and nothing is kept.

    Args:
        cache: the manager of the blocks.
        restore_s: seconds to compute KV again, given the position of the first token and the number
            of tokens; both may be fractions, where a block holds less than a token. Later tokens
            cost more, as they attend to all earlier ones. Tokens cost what their parts cost.
        reuse: probability that a prefix is needed again.
        sensitivity: weight of a second of delay of this model, compared with others.
        parts: the parts of the cache, of which `cache` is the first; none if it is the only one.
        retained_bytes: bytes of pages that are only held. Windows of running sequences may be held,
            too, and evicting them gives back nothing; None to count them as evictable.
        losses: where it reports what it has evicted, and what of that is computed again; None for
            nowhere.
    """

    def __init__(
        self,
        cache: Blocks,
        restore_s: Callable[[float, float], float],
        reuse: ReuseModel | None = None,
        sensitivity: float = 1.0,
        parts: Sequence[CachePart] = (),
        retained_bytes: Callable[[], int] | None = None,
        losses: Losses | None = None,
    ) -> None:
        self._losses = losses
        self._retained_bytes = retained_bytes
        self._cache = cache
        self._footprint = cache.footprint
        self._checkpoints = Checkpoints(parts)
        # Where even the first part has a window, nodes have no blocks, and tell tokens alone.
        self._has_blocks = not parts or parts[0].window_tokens is None
        self._block_bytes = cache.footprint.block_bytes if self._has_blocks else 0
        self._trie = Trie(
            cache,
            self._block_bytes,
            has_checkpoints=bool(self._checkpoints),
            are_exact=self._checkpoints.are_exact,
        )
        self._victims = VictimQueues(
            self._trie,
            cache.footprint.block_tokens,
            self._block_bytes,
            self._checkpoints,
            restore_s,
            reuse or ReuseModel(),
            sensitivity,
            is_logged=losses is not None,
        )
        self._pins = Pins(self._trie, self._victims)
        self._checkpointer = Checkpointer(
            self._trie,
            self._checkpoints,
            self._victims,
            self._pins,
            self._restored,
            self._block_bytes,
        )
        self._num_leases = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._evicted_blocks = 0

    def match(
        self, token_ids: TokenIds, extra: Hashable = None, known: Match | None = None
    ) -> Match:
        """The longest cached prefix, in whole blocks. A lookup has no effect on the cache.

        At least one token is left to be run, as the request's first new token needs its logits. So
        if a request is cached as a whole, its last block is copied.

        Args:
            token_ids: [num_tokens], at least 1.
            extra: as given to `insert`.
            known: an earlier match of these tokens, or of the first of them. The search continues
                from its last block that is still cached; the result is the same as without it.

        Raises:
            InvariantError: `known` is a match of other tokens.
        """
        check_token_ids(token_ids)
        return self._trie.match(token_ids, extra, known)

    def kept(self, match: Match) -> list[Kept]:
        """The blocks of a match in each part of the cache, for `SequenceCache.resume`."""
        of_first = [Kept(0, match.blocks)] if self._has_blocks else []
        if match.checkpoint is None:
            return of_first
        return of_first + self._checkpoints.upto(match.checkpoint, match.num_tokens)

    def evictable_pages(self, match: Match) -> int:
        """Pages of a match that count as evictable until it is locked.

        A request that begins with this match needs room for them too.
        Pre-condition: nothing was evicted since the match.
        """
        node, num_guarded = self._trie.kept_part(match)
        while node is not None and not node.num_guards:  # all above a guarded one are guarded
            num_guarded, node = node.begin, node.parent
        num_blocks = match.end - num_guarded if self._has_blocks else 0
        num_pages = self._footprint.blocks_pages(num_blocks)
        if match.checkpoint is not None and not match.checkpoint.num_guards:
            num_pages += self._checkpoints.pages(match.checkpoint)
        return num_pages

    def lock(self, match: Match) -> Lease:
        """Guard a match, which may be empty, for as long as a sequence runs.

        Raises:
            InvariantError: some of the match has been evicted since.
        """
        node, end = self._trie.kept_part(match)
        checkpoint = match.checkpoint
        if end < match.end or (checkpoint is not None and not checkpoint.is_kept):
            raise InvariantError("a match is locked that was evicted since")
        lease = self._lease(match, node, end)
        lease.match_node, lease.checkpoint = lease.node, checkpoint
        self._victims.guard(checkpoint)
        return lease

    def settle(self, lease: Lease) -> None:
        """The sequence has the blocks of its match, or needs them no more.

        What it begins with may be evicted from now on, as far as parts with a window keep it.
        """
        checkpoint, lease.checkpoint = lease.checkpoint, None
        self._victims.unguard(checkpoint)

    def fork(self, lease: Lease, num_tokens: int) -> Lease:
        """A lease for a sequence that shares the first tokens of another one, and no more."""
        _check_open(lease)
        node = lease.node
        end = min(path_end(node), self._trie.num_whole(num_tokens))
        while node is not None and end <= node.begin:
            node = node.parent
        return self._lease(lease.match, node, end)

    def unlock(self, lease: Lease, now_s: float | None = None) -> None:
        """End a lease. What the sequence computed may be evicted from now on.

        Args:
            lease: an open lease.
            now_s: the time, recorded as the last use; None if the sequence never ran.
        """
        _check_open(lease)
        self.settle(lease)
        lease.is_open = False
        self._num_leases -= 1
        node = lease.node
        if node is not None and now_s is not None:
            node.last_used_s = max(node.last_used_s, now_s)
        self._victims.unguard(node)

    def record(self, lease: Lease, now_s: float) -> None:
        """Count a request that begins with its match, for statistics and as a use of the blocks.

        To be called once for each request: not again after a preemption, and not for each of its
        sequences.
        """
        _check_open(lease)
        self._queried_tokens += lease.match.num_query_tokens
        self._hit_tokens += lease.match.num_tokens
        node = lease.match_node
        if node is not None:
            node.reuses += 1
            node.last_used_s = max(node.last_used_s, now_s)
        checkpoint = lease.match.checkpoint
        if checkpoint is not None and checkpoint.is_kept:
            self._victims.touch(checkpoint, now_s)

    def insert(
        self, lease: Lease, slot: int, token_ids: TokenIds, num_computed: int, now_s: float
    ) -> None:
        """Hold the whole blocks of a sequence, and guard them. Blocks that are known cost little.

        Where another sequence's block with the same contents is held already, that one stays, and
        this sequence's own is freed when it ends.

        Args:
            lease: the sequence's lease.
            slot: the sequence's slot.
            token_ids: [at least num_computed], its tokens from the first.
            num_computed: tokens with KV written by steps that were launched already.
            now_s: the time.
        """
        _check_open(lease)
        check_token_ids(token_ids)
        token_ids = token_ids[:num_computed]
        extra, before = lease.match.extra, lease.node
        start = path_end(before)
        node, num_known = self._trie.descend(token_ids, extra, before, start)
        if node is not None:
            node = self._trie.split(node, num_known)
        num_whole = self._trie.num_whole(num_computed)
        added: Node | None = None
        if num_known < num_whole:
            blocks: Sequence[int] = ()
            if self._has_blocks:
                blocks = self._cache.blocks(slot, num_computed)[num_known:num_whole]
            node = added = self._trie.extend(token_ids, extra, node, blocks, now_s)
            self._cache.retain(blocks)
            if self._has_blocks:
                self._restored(added)
        if node is not before:
            self._victims.guard(node)
            self._victims.unguard(before)
            lease.node = node
        if added is not None:
            self._pins.follow(added)
        if self._checkpoints:
            self._checkpointer.add(lease.node, slot, start, num_known, num_computed, now_s)

    def stops(self, token_ids: TokenIds, extra: Hashable, num_begun: int) -> list[int]:
        """Where a sequence should stop for checkpoints: see `Checkpointer.stops`."""
        return self._checkpointer.stops(token_ids, extra, num_begun)

    def ends_block(self, num_tokens: int) -> bool:
        """Whether a checkpoint with state can be taken after so many tokens: a block ends there."""
        return self._checkpointer.ends_block(num_tokens)

    def pin(self, token_ids: TokenIds, extra: Hashable = None) -> None:
        """Never evict the whole blocks of this prefix: those kept now, and those inserted later.

        Pinning twice has the same effect as pinning once.
        """
        check_token_ids(token_ids)
        self._pins.pin(token_ids, extra)

    def unpin(self, token_ids: TokenIds, extra: Hashable = None) -> bool:
        """The opposite of `pin` of exactly the same tokens. Returns whether they were pinned."""
        check_token_ids(token_ids)
        return self._pins.unpin(token_ids, extra)

    def clear(self) -> None:
        """Drop all blocks without a lease, pinned or not.

        Pins stay: their prefixes are kept again once they are computed again.
        """
        self._pins.detach()
        if self._losses is not None:
            self._losses.forget()
        self._drop(self._victims.evict_all())
        self._pins.attach()

    def close(self) -> None:
        """Drop everything.

        Raises:
            InvariantError: a lease is open.
        """
        if self._num_leases:
            raise InvariantError(f"{self._num_leases} leases are open")
        self._pins.clear()
        self._drop(self._victims.evict_all())

    @property
    def stats(self) -> PrefixStats:
        """Blocks that are kept now, and counts since the start."""
        return PrefixStats(
            held_blocks=self._trie.num_blocks,
            held_bytes=self._trie.num_blocks * self._block_bytes + self._checkpoints.held_bytes,
            checkpoint_bytes=self._checkpoints.held_bytes,
            pinned_bytes=self.pinned_bytes,
            evictable_bytes=self.evictable_bytes,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            evicted_blocks=self._evicted_blocks,
        )

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned blocks; a block that several pins have in common counts once.

        But the windows before the ends of pinned prefixes count for each pin.
        """
        num_bytes = self._pins.num_blocks * self._block_bytes
        return num_bytes + self._pins.num_checkpoints * self._checkpoints.full_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes of pinned blocks, and of those that will be pinned once they are inserted.

        The latter count for each pin, also where several wait for the same blocks. Time in
        proportion to the number of pins.
        """
        num_bytes = self._pins.num_promised * self._block_bytes
        return num_bytes + len(self._pins) * self._checkpoints.full_bytes

    def pin_bytes(self, token_ids: TokenIds, extra: Hashable = None) -> int:
        """Bytes that `pin` would add to `promised_bytes`; 0 if the prefix is pinned already."""
        check_token_ids(token_ids)
        if self._pins.has(token_ids, extra):
            return 0
        num_bytes = self._pins.num_more(token_ids, extra) * self._block_bytes
        return num_bytes + self._checkpoints.full_bytes

    def prefix_bytes(self, num_tokens: int) -> int:
        """Bytes that a pinned prefix of so many tokens takes if it has nothing in common."""
        return self._trie.num_whole(num_tokens) * self._block_bytes + self._checkpoints.full_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of all blocks that are not guarded."""
        num_bytes = self._victims.num_evictable * self._block_bytes
        num_bytes += self._checkpoints.held_bytes - self._checkpoints.guarded_bytes
        if num_bytes and self._retained_bytes is not None:
            return min(num_bytes, self._retained_bytes())
        return num_bytes

    def evictable_below(self, num_bytes: int, now_s: float, limit: float) -> int:
        """Bytes that could be evicted at a regret below `limit`: see `Victims.evictable_below`."""
        most_bytes = num_bytes
        if self._block_bytes:
            most_bytes = -(-num_bytes // self._block_bytes) * self._block_bytes
        return min(self._victims.bytes_below(num_bytes, now_s, limit), most_bytes)

    def cheapest(self, now_s: float) -> float | None:
        """The least regret per byte of a leaf; None if there is no leaf to evict."""
        return self._victims.cheapest(now_s)

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """Drop leaves in order of regret, until `num_bytes` are dropped: see `Victims.evict`."""
        evicted = self._victims.evict(num_bytes, now_s, limit)
        self._evicted_blocks += len(evicted.blocks)
        if self._losses is not None and evicted.paths:
            self._losses.evicted(evicted.paths, evicted.num_bytes, evicted.regret_s)
        self._drop(evicted.blocks)
        return evicted.num_bytes

    def _restored(self, node: Node) -> None:
        """Report what is kept now: it may have been evicted, and was computed again."""
        if self._losses:
            self._losses.restored(*self._victims.restored(node))

    def _lease(self, match: Match, node: Node | None, end: int) -> Lease:
        """A lease of the first `end` blocks of the path to a node, in which they end."""
        if node is not None:
            node = self._trie.split(node, end)
        self._victims.guard(node)
        self._num_leases += 1
        return Lease(match, node)

    def _drop(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._cache.unretain(blocks)


def _check_open(lease: Lease) -> None:
    if not lease.is_open:
        raise InvariantError("a lease is used after it ended")
