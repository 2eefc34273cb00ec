"""Order in which kept blocks are evicted, and guards of those that stay.

    guarded     a lease or a pin is on the node or below it: it stays
    inner       it has children, none of them guarded: it stays until they have been evicted
    leaf        it has no children: the next victims are among these

All blocks of a node are guarded or none is. Those of a leaf have the same last use and the same
number of reuses, and go one by one, the last one first. Later tokens cost no less to restore than
earlier ones, so a block that follows a victim in this order has no larger regret.

A checkpoint is a leaf too: it is a child of the node that it follows, so it goes before that node.
A lease guards nodes and not the checkpoints after them: its sequence has blocks of its own window.

Leaves of the same number of reuses and about the same cost to restore wait in one queue, least
recently used first. The regret of `aquifer.memory.reclaim` falls with age, so only the heads of a
few dozen queues have to be compared, however many leaves there are. Costs to restore differ by less
than a factor of √2 within a queue, so no leaf that stays has a regret less than 1/√2 of the
victim's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aquifer.cache.prefix.checkpoints import Checkpoints
from aquifer.cache.prefix.trie import NOT_QUEUED, Node, Trie
from aquifer.memory.reclaim import ReuseModel, regret_per_byte
from aquifer.memory.runs import join

# Stale queue entries that may pile up before the queues are rebuilt, beside as many as live ones.
_STALE_ENTRIES = 1024

_QueueKey = tuple[int, int]  # reuses, cost to restore in steps of the square root of two


@dataclass(slots=True)
class _Queues:
    """Leaves by class, each class in order of their last use.

    Each class is a heap, as a node may become a leaf long after its last use. An entry is valid as
    long as its ticket is the node's; stale entries are thrown away when they reach the head.
    """

    heaps: dict[_QueueKey, list[tuple[float, int, Node]]] = field(default_factory=dict)
    num_nodes: int = 0
    num_entries: int = 0
    last_ticket: int = NOT_QUEUED

    def put(self, key: _QueueKey, node: Node) -> None:
        """Add a node, which is in no queue, to a class."""
        self.last_ticket += 1
        node.ticket = self.last_ticket
        heapq.heappush(self.heaps.setdefault(key, []), (node.last_used_s, self.last_ticket, node))
        self.num_nodes += 1
        self.num_entries += 1
        if self.num_entries > 2 * self.num_nodes + _STALE_ENTRIES:
            self._drop_stale()

    def take(self, node: Node) -> None:
        """Remove a node from its queue, if it is in one."""
        if node.ticket != NOT_QUEUED:
            node.ticket = NOT_QUEUED
            self.num_nodes -= 1

    def first(self, key: _QueueKey) -> Node | None:
        """The least recently used node of a class."""
        heap = self.heaps.get(key)
        while heap:
            _, ticket, node = heap[0]
            if node.ticket == ticket:
                return node
            heapq.heappop(heap)
            self.num_entries -= 1
        self.heaps.pop(key, None)
        return None

    def _drop_stale(self) -> None:
        live = {
            key: [entry for entry in heap if entry[2].ticket == entry[1]]
            for key, heap in self.heaps.items()
        }
        self.heaps = {key: heap for key, heap in live.items() if heap}
        for heap in self.heaps.values():
            heapq.heapify(heap)
        self.num_entries = self.num_nodes


@dataclass(slots=True)
class _Remainder:
    """The state that a node would have without some of the nodes below it."""

    num_children: int
    reuses: int
    last_used_s: float


@dataclass(slots=True)
class Evicted:
    """What `VictimQueues.evict` has removed."""

    blocks: Sequence[int] = ()  # to be dropped
    num_bytes: int = 0  # that it gives back, checkpoints included
    paths: list[int] = field(default_factory=list)  # of what gives back bytes, if it is logged
    regret_s: float = 0.0  # of all of them


class VictimQueues:
    """Guards nodes of a trie, and removes others in order of regret.

    Args:
        trie: the nodes.
        block_tokens: tokens of a block; 0 without KV.
        block_bytes: what evicting a block gives back; 0 if nodes have no blocks.
        checkpoints: the checkpoints of the trie.
        restore_s: as for `PrefixCache`.
        reuse: probability that a prefix is needed again.
        sensitivity: as for `PrefixCache`.
        is_logged: whether to tell the paths of what is evicted.
    """

    def __init__(
        self,
        trie: Trie,
        block_tokens: float,
        block_bytes: int,
        checkpoints: Checkpoints,
        restore_s: Callable[[float, float], float],
        reuse: ReuseModel,
        sensitivity: float,
        *,
        is_logged: bool = False,
    ) -> None:
        self._is_logged = is_logged
        self._trie = trie
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._checkpoints = checkpoints
        self._restore_s = restore_s
        self._reuse = reuse
        self._sensitivity = sensitivity
        self._queues = _Queues()
        self._num_guarded = 0

    @property
    def num_evictable(self) -> int:
        """Blocks of nodes that are not guarded."""
        return self._trie.num_blocks - self._num_guarded

    def guard(self, node: Node | None) -> None:
        """Guard a node and all above it, up to the first one that is guarded already."""
        while node is not None:
            node.num_guards += 1
            if node.num_guards > 1:
                return
            if node.is_checkpoint:
                self._checkpoints.guard(node, 1)
            else:
                self._num_guarded += node.num_blocks
            if node.ticket != NOT_QUEUED:
                self._queues.take(node)
            node = node.parent

    def unguard(self, node: Node | None) -> None:
        """The opposite of one call of `guard`."""
        while node is not None:
            node.num_guards -= 1
            if node.num_guards:
                return
            if node.is_checkpoint:
                self._checkpoints.guard(node, -1)
            else:
                self._num_guarded -= node.num_blocks
            if not node.num_children:
                self._put(node)
            node = node.parent

    def offer(self, checkpoint: Node) -> None:
        """Let a new checkpoint be evicted, unless it is guarded."""
        self._put(checkpoint)

    def touch(self, checkpoint: Node, now_s: float) -> None:
        """Record a use of a checkpoint."""
        checkpoint.reuses += 1
        checkpoint.last_used_s = max(checkpoint.last_used_s, now_s)
        if not checkpoint.num_guards:
            self._queues.take(checkpoint)
            self._put(checkpoint)

    def cheapest(self, now_s: float) -> float | None:
        """The least regret per byte of a leaf; None if there is no leaf to evict."""
        return min(
            (
                self._regret_of(node, now_s)
                for key in list(self._queues.heaps)
                if (node := self._queues.first(key)) is not None
            ),
            default=None,
        )

    def evict(self, num_bytes: int, now_s: float, limit: float = math.inf) -> Evicted:
        """Remove blocks and checkpoints in order of regret, until they give back `num_bytes`.

        A node without children left is a leaf and may be the next victim. The first victim is
        removed at any regret; the removal ends before another one of a regret above `limit`. The
        blocks of checkpoints are dropped, those of the other nodes are left to the caller.
        """
        # The heads of the queues by regret. A head that is no longer one, because of a new leaf or
        # its removal, is skipped: its queue was offered again at that moment.
        offers: list[tuple[float, int, _QueueKey]] = []

        def offer(key: _QueueKey) -> None:
            node = self._queues.first(key)
            if node is not None:
                heapq.heappush(offers, (self._regret_of(node, now_s), node.ticket, key))

        for key in list(self._queues.heaps):
            offer(key)
        evicted = Evicted()
        dropped: list[Sequence[int]] = []
        while offers and evicted.num_bytes < num_bytes:
            regret, ticket, key = heapq.heappop(offers)
            node = self._queues.first(key)
            if node is None or node.ticket != ticket:
                continue
            if evicted.num_bytes and regret > limit:
                break
            num_blocks = node.num_blocks
            if self._block_bytes:
                # The blocks before the last one have no larger regret, so they go with it.
                wanted = -(-(num_bytes - evicted.num_bytes) // self._block_bytes)
                num_blocks = min(num_blocks, wanted if regret <= limit else 1)
            before_bytes = evicted.num_bytes
            if self._is_logged and (node.is_checkpoint or self._block_bytes):
                evicted.paths += self._trie.paths(node)[-max(num_blocks, 1) :]
            if num_blocks < node.num_blocks:
                dropped.append(self._trie.trim(node, num_blocks))
                evicted.num_bytes += num_blocks * self._block_bytes
                self._queues.take(node)
                other_key: _QueueKey | None = self._put(node)
            else:
                other_key = self._remove(node)
                evicted.num_bytes += self._freed(node, dropped)
            evicted.regret_s += regret * (evicted.num_bytes - before_bytes)
            offer(key)
            if other_key is not None and other_key != key:
                offer(other_key)
        evicted.blocks = join(dropped)
        return evicted

    def evict_all(self) -> Sequence[int]:
        """Remove all nodes that are not guarded; see `evict`."""
        nodes = [node for node in self._trie.nodes if not node.num_guards]
        # Each node is a leaf when its turn comes.
        nodes.sort(key=lambda node: (node.end, node.is_checkpoint), reverse=True)
        dropped: list[Sequence[int]] = []
        for node in nodes:
            self._remove(node)
            self._freed(node, dropped)
        return join(dropped)

    def _freed(self, node: Node, dropped: list[Sequence[int]]) -> int:
        """Drop the blocks of a removed checkpoint, or add those of another node to `dropped`, the
        last one first; returns their bytes."""
        if node.is_checkpoint:
            return self._checkpoints.drop(node)
        if node.blocks:
            dropped.append(node.blocks[: node.num_blocks][::-1])
        return node.num_blocks * self._block_bytes

    def bytes_below(self, num_bytes: int, now_s: float, limit: float) -> int:
        """Bytes that could be evicted at a regret per byte below `limit`, up to `num_bytes` or a
        little more.

        A node counts if all nodes below it count, and its regret without them is below the limit.
        It takes time in proportion to the number of queues and the nodes counted. Leaves that are
        queued behind one of a larger regret do not count, though theirs may be a little less.
        """
        remainders: dict[Node, _Remainder] = {}
        found_bytes = 0
        for heap in self._queues.heaps.values():
            # An entry at i was used before those at 2 * i + 1 and 2 * i + 2.
            places = [0]
            while places and found_bytes < num_bytes:
                place = places.pop()
                if place >= len(heap):
                    continue
                _, ticket, node = heap[place]
                if node.ticket == ticket:
                    if self._regret_of(node, now_s) >= limit:
                        continue
                    found_bytes += self._num_bytes(node)
                    found_bytes += self._bytes_above(node, now_s, limit, remainders)
                places += (2 * place + 1, 2 * place + 2)
        return found_bytes

    def _bytes_above(
        self, leaf: Node, now_s: float, limit: float, remainders: dict[Node, _Remainder]
    ) -> int:
        """Bytes of the nodes above a leaf that could be evicted after it.

        Args:
            leaf: a leaf that was counted.
            now_s: the time.
            limit: as for `bytes_below`.
            remainders: states of nodes with children that were counted; updated.
        """
        found_bytes = 0
        reuses, last_used_s = leaf.reuses, leaf.last_used_s
        node = leaf.parent
        while node is not None and not node.num_guards:
            left = remainders.get(node)
            if left is None:
                left = _Remainder(node.num_children, node.reuses, node.last_used_s)
                remainders[node] = left
            left.num_children -= 1
            left.reuses += reuses
            left.last_used_s = max(left.last_used_s, last_used_s)
            reuses, last_used_s = left.reuses, left.last_used_s
            if left.num_children or self._regret(node, reuses, last_used_s, now_s) >= limit:
                break
            found_bytes += self._num_bytes(node)
            node = node.parent
        return found_bytes

    def _remove(self, node: Node) -> _QueueKey | None:
        """Remove a leaf.

        Returns:
            The queue that its parent has joined, if that is a leaf now.
        """
        self._trie.remove(node)
        self._queues.take(node)
        parent = node.parent
        if parent is None or parent.num_children or parent.num_guards:
            return None
        return self._put(parent)

    def _put(self, leaf: Node) -> _QueueKey:
        """Add a leaf to the queue of its class, which is returned."""
        key = self._queue_key(leaf)
        self._queues.put(key, leaf)
        return key

    def _num_bytes(self, node: Node) -> int:
        """What evicting a node as a whole gives back."""
        return node.checkpoint_bytes or node.num_blocks * self._block_bytes

    def _victim_bytes(self, node: Node) -> int:
        """What evicting the last block of a node gives back, or a checkpoint."""
        return node.checkpoint_bytes if node.is_checkpoint else self._block_bytes

    def restored(self, node: Node) -> tuple[Sequence[int], Callable[[int, int], float]]:
        """The path of each block of a node, or of a checkpoint, and the seconds to compute those at
        [start, stop) among these."""
        paths, tokens = self._trie.paths(node), self._block_tokens
        if node.is_checkpoint:
            return paths[:1], lambda _start, _stop: self._restore_victim_s(node)
        begin = node.begin
        return paths, lambda start, stop: self._restore_s(
            (begin + start) * tokens, (stop - start) * tokens
        )

    def _restore_victim_s(self, node: Node) -> float:
        """Seconds to compute the last block again, or the tokens from checkpoint to checkpoint."""
        if node.is_checkpoint:
            first = self._trie.num_tokens(node.end) - node.restore_tokens
            return self._restore_s(first, node.restore_tokens)
        return self._restore_s((node.end - 1) * self._block_tokens, self._block_tokens)

    def _regret_of(self, leaf: Node, now_s: float) -> float:
        """Regret per byte of a leaf."""
        return self._regret(leaf, leaf.reuses, leaf.last_used_s, now_s)

    def _regret(self, node: Node, reuses: int, last_used_s: float, now_s: float) -> float:
        """Regret per byte of a node's last block with this number of reuses and this last use."""
        num_bytes = self._victim_bytes(node)
        if not num_bytes:
            return 0.0
        probability = self._reuse.probability(now_s - last_used_s, reuses)
        return regret_per_byte(
            probability, self._restore_victim_s(node), num_bytes, self._sensitivity
        )

    def _queue_key(self, leaf: Node) -> _QueueKey:
        """The class of a leaf: costs to restore a byte differ by less than √2 within one."""
        num_bytes = self._victim_bytes(leaf)
        cost_s = self._restore_victim_s(leaf) / num_bytes if num_bytes else 0.0
        mantissa, exponent = math.frexp(cost_s)
        return min(leaf.reuses, self._reuse.max_reuses), 2 * exponent + (mantissa >= math.sqrt(0.5))
