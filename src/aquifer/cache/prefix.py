"""Prefix caching: the KV of earlier requests, found by their tokens.

Blocks of a sequence form a chain: what is in a block depends on the tokens that lie in it and on
all tokens before. So blocks that are kept form a trie. A node is known by its parent and by the
tokens that its block adds, themselves and not a digest of them:

    key of a node = (parent node, bytes of tokens [tokens_touching(i), tokens_touching(i + 1)))

and a first block's parent is `extra`: whatever else changes the KV. A lookup compares tokens one by
one, so a request never reads KV of other tokens, also where hashes collide by chance or by malice.

Three kinds of nodes:

    guarded     a lease of a running sequence, or a pin, is on it or below it: stays
    inner       nodes hang below it, none of them guarded: stays until they have gone
    leaf        nothing hangs below it: the next victims are among these

Leaves of the same number of reuses and about the same cost to restore wait in one queue, least
recently used first. The regret of `aquifer.memory.reclaim` falls with age, so the heads of a few
dozen queues are all that has to be compared, however many leaves there are. Costs to restore differ
by less than a factor of √2 within a queue, so no leaf that stays has a regret less than 1/√2 of the
victim's. To begin, extend or end a sequence costs time in proportion to its blocks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aquifer.cache.base import Blocks
from aquifer.errors import InvariantError
from aquifer.memory.reclaim import ReuseModel, regret_per_byte

TokenIds = npt.NDArray[np.int32]

_TOKEN_BYTES = np.dtype(np.int32).itemsize
_NOT_QUEUED = 0
_MANY_BLOCKS = 1 << 40  # more than any sequence has
# Stale queue entries that may pile up before the queues are rebuilt, beside as many as live ones.
_STALE_ENTRIES = 1024

_ParentKey = int | tuple[Hashable]  # a node's number, or (extra,) at the top: never equal
_Key = tuple[_ParentKey, bytes]
_QueueKey = tuple[int, int]  # reuses, cost to restore in steps of the square root of two


@dataclass(slots=True, eq=False)
class _Node:
    """A block that is held.

    `reuses` and `last_used_s` count what ended here. Those of the nodes below are added when they
    go, so they are exact once a node is a leaf, and a use is one write however long its path is.
    """

    number: int  # never given out twice
    key: _Key
    parent: _Node | None
    block: int
    index: int  # the block's place in its sequence
    last_used_s: float
    reuses: int = 0
    num_children: int = 0
    num_guards: int = 0  # leases and pins on it, and children that are guarded
    ticket: int = _NOT_QUEUED  # of its entry in a queue


@dataclass(frozen=True, slots=True)
class Match:
    """What is cached of a request: to be locked before anything is reserved, or thrown away.

    Attributes:
        blocks: the blocks that the tokens lie in, for `SequenceCache.adopt`.
        num_tokens: tokens that need not be computed; 0 if there are no blocks.
        num_query_tokens: tokens that were looked for.
    """

    blocks: list[int]
    num_tokens: int
    num_query_tokens: int
    _extra: Hashable
    _node: _Node | None  # of the last block


@dataclass(slots=True, eq=False)
class Lease:
    """Guards the path of one sequence, from the root to the last block known of it.

    Attributes:
        match: what the sequence began with.
    """

    match: Match
    _node: _Node | None  # the last block; None before the first
    _is_open: bool = True


@dataclass(slots=True, eq=False)
class _Pin:
    """A prefix that stays: `node` is the last block of it that is cached now."""

    extra: Hashable
    data: bytes  # of its tokens
    node: _Node | None = None


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What is held, and what came of it."""

    held_blocks: int
    held_bytes: int
    pinned_bytes: int
    evictable_bytes: int  # of blocks with neither a lease nor a pin on them or below
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int


@dataclass(slots=True)
class _Queues:
    """Leaves by class, each class in order of their last use.

    Each class is a heap, as a node may become a leaf long after its last use. An entry is valid as
    long as its ticket is the node's; others are thrown away when they come up.
    """

    heaps: dict[_QueueKey, list[tuple[float, int, _Node]]] = field(default_factory=dict)
    num_nodes: int = 0
    _num_entries: int = 0
    _last_ticket: int = _NOT_QUEUED

    def put(self, key: _QueueKey, node: _Node) -> None:
        """Let a node wait in a class. Pre-condition: it waits nowhere."""
        self._last_ticket += 1
        node.ticket = self._last_ticket
        heapq.heappush(self.heaps.setdefault(key, []), (node.last_used_s, self._last_ticket, node))
        self.num_nodes += 1
        self._num_entries += 1
        if self._num_entries > 2 * self.num_nodes + _STALE_ENTRIES:
            self._forget_stale()

    def take(self, node: _Node) -> None:
        """Let a node wait no longer, if it does."""
        if node.ticket != _NOT_QUEUED:
            node.ticket = _NOT_QUEUED
            self.num_nodes -= 1

    def first(self, key: _QueueKey) -> _Node | None:
        """The least recently used node of a class."""
        heap = self.heaps.get(key)
        while heap:
            _, ticket, node = heap[0]
            if node.ticket == ticket:
                return node
            heapq.heappop(heap)
            self._num_entries -= 1
        self.heaps.pop(key, None)
        return None

    def _forget_stale(self) -> None:
        live = {
            key: [entry for entry in heap if entry[2].ticket == entry[1]]
            for key, heap in self.heaps.items()
        }
        self.heaps = {key: heap for key, heap in live.items() if heap}
        for heap in self.heaps.values():
            heapq.heapify(heap)
        self._num_entries = self.num_nodes


class PrefixCache:
    """Finds, keeps and evicts the KV of earlier requests of one model.

    A sequence goes through it in this order:

        match = prefixes.match(token_ids, extra)
        lease = prefixes.lock(match)          # or else making room could evict what was found
        ...                                   # adopt; if that fails, unlock(lease) and wait
        prefixes.record(lease, now_s)
        prefixes.insert(lease, slot, token_ids, num_computed, now_s)    # at any time, any number
        prefixes.unlock(lease, now_s)         # it ended, or was preempted; then release its slot

    It is a tenant of `aquifer.memory.reclaim.Reclaimer`: a source of victims.

    Args:
        cache: whose blocks these are.
        restore_s: seconds to compute KV again, given the position of the first token and the number
            of tokens; both may be fractions, where a block holds less than a token. Later tokens
            cost more, as they attend to all earlier ones.
        reuse: how probable it is that a prefix is needed again.
        sensitivity: how much a second of delay of this model matters, compared with others.
    """

    def __init__(
        self,
        cache: Blocks,
        restore_s: Callable[[float, float], float],
        reuse: ReuseModel | None = None,
        sensitivity: float = 1.0,
    ) -> None:
        self._cache = cache
        self._restore_s = restore_s
        self._reuse = reuse or ReuseModel()
        self._sensitivity = sensitivity
        self._block_tokens = cache.block_bytes / cache.layout.token_bytes
        self._max_tokens = cache.tokens_in(_MANY_BLOCKS)
        self._nodes: dict[_Key, _Node] = {}  # in order of creation: parents before children
        self._queues = _Queues()
        self._pins: dict[tuple[Hashable, bytes], _Pin] = {}
        # Pins by the key of the last node that they have, so that a new child finds them.
        self._pins_at: dict[_ParentKey, set[_Pin]] = {}
        # [i]: bytes of the token ids that the first i blocks depend on. Grows as needed.
        self._ends = [0]
        self._last_number = 0
        self._num_guarded = 0
        self._num_leases = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._evicted_blocks = 0

    def match(self, token_ids: TokenIds, extra: Hashable = None) -> Match:
        """The longest cached prefix, in whole blocks. Changes nothing, so ask as often as you like.

        At least one token is left to be run, as the request's first new token needs its logits. So
        of a request that is cached as a whole, the last block is there to be copied.

        Args:
            token_ids: [num_tokens], at least 1.
            extra: as given to `insert`.
        """
        _check_tokens(token_ids)
        self._extend_ends(len(token_ids))
        data = token_ids.tobytes()
        num_bytes = len(data)
        nodes = self._nodes
        node: _Node | None = None
        parent_key: _ParentKey = (extra,)
        blocks: list[int] = []
        start = 0
        for end in itertools.islice(self._ends, 1, None):
            if end > num_bytes:
                break
            child = nodes.get((parent_key, data[start:end]))
            if child is None:
                break
            node, parent_key, start = child, child.number, end
            blocks.append(child.block)
        num_tokens = min(self._cache.tokens_in(len(blocks)), len(token_ids) - 1)
        while node is not None and self._cache.tokens_in(len(blocks) - 1) >= num_tokens:
            node = node.parent
            blocks.pop()
        return Match(blocks, num_tokens, len(token_ids), extra, node)

    def lock(self, match: Match) -> Lease:
        """Guard what was found for as long as a sequence runs. Also for a match of nothing.

        Raises:
            InvariantError: the match was overtaken: some of it has been evicted meanwhile.
        """
        node = match._node
        if node is not None and self._nodes.get(node.key) is not node:
            raise InvariantError("a match is locked that was evicted since")
        return self._lease(match, node)

    def fork(self, lease: Lease) -> Lease:
        """A lease for a sequence that shares all tokens known of another one so far."""
        _check_open(lease)
        return self._lease(lease.match, lease._node)

    def unlock(self, lease: Lease, now_s: float | None = None) -> None:
        """End a lease. What the sequence computed may be evicted from now on.

        Args:
            lease: open.
            now_s: the time, which is that of its last use; None if the sequence never ran.
        """
        _check_open(lease)
        lease._is_open = False
        self._num_leases -= 1
        node = lease._node
        if node is not None and now_s is not None:
            node.last_used_s = max(node.last_used_s, now_s)
        self._unguard(node)

    def record(self, lease: Lease, now_s: float) -> None:
        """Count a request that begins with what its lease guards: once a request.

        A request that comes back after a preemption is not asked for a second time, nor is each of
        the sequences of one request: these are not to be counted.
        """
        _check_open(lease)
        self._queried_tokens += lease.match.num_query_tokens
        self._hit_tokens += lease.match.num_tokens
        node = lease.match._node
        if node is not None:
            node.reuses += 1
            node.last_used_s = max(node.last_used_s, now_s)

    def insert(
        self, lease: Lease, slot: int, token_ids: TokenIds, num_computed: int, now_s: float
    ) -> None:
        """Hold the whole blocks of a sequence, and guard them. What is known already costs little.

        Where another sequence's block with the same contents is held already, that one stays, and
        this sequence's own goes when it ends.

        Args:
            lease: the sequence's.
            slot: where it is.
            token_ids: [at least num_computed], its tokens from the first.
            num_computed: how many of them have their KV written, by steps launched already.
            now_s: the time.
        """
        _check_open(lease)
        _check_tokens(token_ids)
        self._extend_ends(num_computed)
        ends = self._ends
        data = token_ids[:num_computed].tobytes()
        num_bytes = num_computed * _TOKEN_BYTES
        node = lease._node
        index = 0 if node is None else node.index + 1
        blocks: list[int] | None = None
        held: list[int] = []
        parents_of_new: list[_ParentKey] = []
        while index + 1 < len(ends) and ends[index + 1] <= num_bytes:
            parent_key = _parent_key(lease.match._extra, node)
            key = (parent_key, data[ends[index] : ends[index + 1]])
            child = self._nodes.get(key)
            if child is None:
                if blocks is None:
                    blocks = self._cache.blocks(slot, num_computed)
                self._last_number += 1
                child = _Node(self._last_number, key, node, blocks[index], index, now_s)
                self._nodes[key] = child
                if node is not None:
                    node.num_children += 1
                held.append(child.block)
                parents_of_new.append(parent_key)
            node = child
            index += 1
        if node is lease._node:
            return
        if held:
            self._cache.hold(held)
        self._guard(node)
        self._unguard(lease._node)
        lease._node = node
        if self._pins:
            for parent_key in parents_of_new:
                for pin in list(self._pins_at.get(parent_key, ())):
                    self._advance(pin)

    def pin(self, token_ids: TokenIds, extra: Hashable = None) -> None:
        """Never evict the whole blocks of this prefix: those there are, and those inserted later.

        Pinning twice is no different from pinning once.
        """
        _check_tokens(token_ids)
        data = token_ids.tobytes()
        if (extra, data) not in self._pins:
            pin = self._pins[extra, data] = _Pin(extra, data)
            self._extend_ends(len(token_ids))
            self._pins_at.setdefault((extra,), set()).add(pin)
            self._advance(pin)

    def unpin(self, token_ids: TokenIds, extra: Hashable = None) -> bool:
        """The opposite of `pin`, of exactly the same tokens. Returns whether they were pinned."""
        _check_tokens(token_ids)
        pin = self._pins.pop((extra, token_ids.tobytes()), None)
        if pin is None:
            return False
        self._leave(pin)
        self._unguard(pin.node)
        return True

    def clear(self) -> None:
        """Drop all that no running sequence has a lease of, pinned or not.

        What was pinned is still to be kept when it is computed the next time.
        """
        for pin in self._pins.values():
            self._leave(pin)
            self._unguard(pin.node)
            pin.node = None
        # Children come after their parents, so in reverse every node is a leaf when it goes.
        dropped = [node for node in reversed(self._nodes.values()) if not node.num_guards]
        for node in dropped:
            self._remove(node)
        if dropped:
            self._cache.drop([node.block for node in dropped])
        for pin in self._pins.values():
            self._pins_at.setdefault((pin.extra,), set()).add(pin)
            self._advance(pin)

    def close(self) -> None:
        """Drop everything.

        Raises:
            InvariantError: a lease is open.
        """
        if self._num_leases:
            raise InvariantError(f"{self._num_leases} leases are open")
        self.clear()
        self._pins.clear()
        self._pins_at.clear()

    @property
    def stats(self) -> PrefixStats:
        """What is held, and what came of it."""
        pinned: set[_Node] = set()
        for pin in self._pins.values():
            node = pin.node
            while node is not None and node not in pinned:
                pinned.add(node)
                node = node.parent
        block_bytes = self._cache.block_bytes
        return PrefixStats(
            held_blocks=len(self._nodes),
            held_bytes=len(self._nodes) * block_bytes,
            pinned_bytes=len(pinned) * block_bytes,
            evictable_bytes=self.evictable_bytes,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            evicted_blocks=self._evicted_blocks,
        )

    @property
    def evictable_bytes(self) -> int:
        """Bytes of all blocks that are not guarded."""
        return (len(self._nodes) - self._num_guarded) * self._cache.block_bytes

    def cheapest(self, now_s: float) -> float | None:
        """The least regret per byte of a leaf, None if nothing can go."""
        return min(
            (
                self._regret(node, now_s)
                for key in list(self._queues.heaps)
                if (node := self._queues.first(key)) is not None
            ),
            default=None,
        )

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> int:
        """Drop leaves in order of regret, until `num_bytes` are dropped: see `Victims.evict`.

        A block whose last child has gone is a leaf and may be the next one.
        """
        num_wanted = -(-num_bytes // self._cache.block_bytes)
        # The heads of the queues by regret. A head that was overtaken by a new leaf or has gone is
        # thrown away when it comes up: its queue was offered again at that moment.
        offers: list[tuple[float, int, _QueueKey]] = []

        def offer(key: _QueueKey) -> None:
            node = self._queues.first(key)
            if node is not None:
                heapq.heappush(offers, (self._regret(node, now_s), node.ticket, key))

        for key in list(self._queues.heaps):
            offer(key)
        dropped: list[int] = []
        while offers and len(dropped) < num_wanted:
            regret, ticket, key = heapq.heappop(offers)
            node = self._queues.first(key)
            if node is None or node.ticket != ticket:
                continue
            if dropped and regret > limit:
                break
            parent_queue = self._remove(node)
            dropped.append(node.block)
            offer(key)
            if parent_queue is not None:
                offer(parent_queue)
        if dropped:
            self._cache.drop(dropped)
            self._evicted_blocks += len(dropped)
        return len(dropped) * self._cache.block_bytes

    def _lease(self, match: Match, node: _Node | None) -> Lease:
        self._guard(node)
        self._num_leases += 1
        return Lease(match, node)

    def _extend_ends(self, num_tokens: int) -> None:
        """Let `_ends` cover all blocks that so many tokens lie in."""
        num_tokens = min(num_tokens, self._max_tokens)
        ends = self._ends
        # The next block is there if its beginning is.
        while self._cache.tokens_in(len(ends) - 1) < num_tokens:
            ends.append(self._cache.tokens_touching(len(ends)) * _TOKEN_BYTES)

    def _guard(self, node: _Node | None) -> None:
        """Protect a node, and through it all above it; the way up ends where others do already."""
        while node is not None:
            node.num_guards += 1
            if node.num_guards > 1:
                return
            self._num_guarded += 1
            self._queues.take(node)
            node = node.parent

    def _unguard(self, node: _Node | None) -> None:
        """The opposite of `_guard`."""
        while node is not None:
            node.num_guards -= 1
            if node.num_guards:
                return
            self._num_guarded -= 1
            if not node.num_children:
                self._queues.put(self._queue_key(node), node)
            node = node.parent

    def _remove(self, node: _Node) -> _QueueKey | None:
        """Forget a leaf; its block is the caller's to drop.

        Returns:
            The queue that its parent has joined, if that is a leaf now.
        """
        del self._nodes[node.key]
        self._queues.take(node)
        parent = node.parent
        if parent is None:
            return None
        parent.num_children -= 1
        parent.reuses += node.reuses
        parent.last_used_s = max(parent.last_used_s, node.last_used_s)
        if parent.num_children or parent.num_guards:
            return None
        key = self._queue_key(parent)
        self._queues.put(key, parent)
        return key

    def _advance(self, pin: _Pin) -> None:
        """Move a pin down as far as its prefix is cached."""
        node = pin.node
        index = 0 if node is None else node.index + 1
        ends = self._ends
        while index + 1 < len(ends) and ends[index + 1] <= len(pin.data):
            key = (_parent_key(pin.extra, node), pin.data[ends[index] : ends[index + 1]])
            child = self._nodes.get(key)
            if child is None:
                break
            node = child
            index += 1
        if node is not pin.node:
            self._leave(pin)
            self._guard(node)
            self._unguard(pin.node)
            pin.node = node
            self._pins_at.setdefault(_parent_key(pin.extra, node), set()).add(pin)

    def _leave(self, pin: _Pin) -> None:
        """Take a pin from `_pins_at`."""
        key = _parent_key(pin.extra, pin.node)
        pins = self._pins_at[key]
        pins.remove(pin)
        if not pins:
            del self._pins_at[key]

    def _restore_block_s(self, node: _Node) -> float:
        """Seconds to compute a block again."""
        return self._restore_s(node.index * self._block_tokens, self._block_tokens)

    def _regret(self, leaf: _Node, now_s: float) -> float:
        """Regret per byte of a leaf."""
        probability = self._reuse.probability(now_s - leaf.last_used_s, leaf.reuses)
        return regret_per_byte(
            probability, self._restore_block_s(leaf), self._cache.block_bytes, self._sensitivity
        )

    def _queue_key(self, leaf: _Node) -> _QueueKey:
        """Which leaves a leaf is compared with by age alone: their costs differ by less than √2."""
        mantissa, exponent = math.frexp(self._restore_block_s(leaf))
        return min(leaf.reuses, self._reuse.max_reuses), 2 * exponent + (mantissa >= math.sqrt(0.5))


def _parent_key(extra: Hashable, node: _Node | None) -> _ParentKey:
    return (extra,) if node is None else node.number


def _check_tokens(token_ids: TokenIds) -> None:
    """Keys are bytes of tokens, so tokens of another size would be found as other tokens."""
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise InvariantError(f"token ids are {token_ids.dtype} of {token_ids.ndim} dimensions")


def _check_open(lease: Lease) -> None:
    if not lease._is_open:
        raise InvariantError("a lease is used after it ended")
