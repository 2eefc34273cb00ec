"""Trie of the blocks that are kept.

The blocks of a sequence form a chain: the contents of a block depend on the tokens in it and on all
tokens before. So the blocks that are kept form a trie. A node is found by its parent and the tokens
that its block adds:

    key of a node = (parent node, bytes of tokens [tokens_touching(i), tokens_touching(i + 1)))

The parent of a first block is `extra`, which stands for anything else that changes the KV. Keys are
the tokens themselves and not a digest of them, and a lookup compares them one by one. So a request
never reads KV of other tokens, even if hashes collide by chance or by malice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aquifer.cache.base import Blocks, Kept
from aquifer.errors import InvariantError

TokenIds = npt.NDArray[np.int32]

NOT_QUEUED = 0

_TOKEN_ID_BYTES = np.dtype(np.int32).itemsize
_MANY_BLOCKS = 1 << 40  # more than any sequence has
_CHECKPOINT = b"checkpoint"  # in place of tokens: no whole number of token ids

ParentKey = int | tuple[Hashable]  # a node's number, or (extra,) for first blocks: never equal
Key = tuple[ParentKey, bytes]


@dataclass(slots=True, eq=False)
class Node:
    """A block that is kept, or a checkpoint after it, which has no children.

    `reuses` and `last_used_s` count the requests that ended at this block. The counts of blocks
    below are added when these are removed. So both are exact once a node is a leaf, and recording a
    use is one write, however long the path.
    """

    number: int  # never used again
    key: Key
    parent: Node | None
    block: int | None  # None for a checkpoint, and where the first part of a cache has a window
    index: int  # the block's place in its sequence; of a checkpoint, that of the block before it
    last_used_s: float
    kept: tuple[Kept, ...] = ()  # of a checkpoint: blocks of the parts with a window
    num_bytes: int = 0  # what evicting it gives back
    restore_tokens: int = 0  # of a checkpoint: tokens since the one before it
    reuses: int = 0
    num_children: int = 0
    num_guards: int = 0  # leases and pins on it, and children that are guarded
    num_pins: int = 0  # pins on it, and children that are pinned
    is_checkpoint: bool = False
    ticket: int = NOT_QUEUED  # number of its entry in a queue of victims
    is_kept: bool = True  # False once it is removed
    path: int = 0  # hash of all tokens up to its end, and of `extra`; not unique


@dataclass(frozen=True, slots=True)
class Match:
    """Cached prefix of a request. Lock it before anything is reserved, or throw it away.

    Attributes:
        blocks: the blocks that the tokens lie in, for `SequenceCache.adopt`.
        num_tokens: tokens that need not be computed; 0 if there are no blocks.
        num_query_tokens: length of the request that was looked up.
        extra: as given to `match`.
        nodes: the nodes of `blocks`, for this package.
        checkpoint: the checkpoint after them; None where none is needed.
    """

    blocks: list[int]
    num_tokens: int
    num_query_tokens: int
    extra: Hashable
    nodes: list[Node]
    checkpoint: Node | None = None

    @property
    def last_node(self) -> Node | None:
        """The node of the last block; None if there is no block."""
        return self.nodes[-1] if self.nodes else None


class Trie:
    """Nodes of kept blocks, by key.

    Args:
        cache: manager of the blocks.
        block_bytes: what a node keeps; 0 if nodes have no blocks.
        has_checkpoints: whether a prefix is of use only where there is a checkpoint.

    Attributes:
        num_blocks: nodes that are no checkpoints.
    """

    def __init__(
        self, cache: Blocks, block_bytes: int | None = None, *, has_checkpoints: bool = False
    ) -> None:
        self.num_blocks = 0
        self._block_bytes = cache.footprint.block_bytes if block_bytes is None else block_bytes
        self._has_checkpoints = has_checkpoints
        self._cache = cache
        # Without KV there are no blocks, and the manager need not know how many tokens lie in one.
        has_kv = cache.footprint.token_bytes > 0
        self._max_tokens = cache.tokens_in(_MANY_BLOCKS) if has_kv else 0
        self._nodes: dict[Key, Node] = {}  # in order of creation: parents before children
        self._last_number = 0
        # [i]: tokens that end in the first i blocks, and bytes of the ids of all tokens that these
        # blocks depend on; extended as far as a sequence needs.
        self._num_tokens = [0]
        self._end_bytes = [0]

    def __len__(self) -> int:
        return len(self._nodes)

    def newest_first(self) -> Iterator[Node]:
        """All nodes, each before its parent."""
        return reversed(self._nodes.values())

    def match(self, token_ids: TokenIds, extra: Hashable, known: Match | None = None) -> Match:
        """The longest prefix that is kept: see `PrefixCache.match`."""
        nodes: list[Node] = []
        blocks: list[int] = []
        if known is not None:
            if self._is_current(known, token_ids, extra):
                return known
            # Parents stay longer than their children, so what is left are the first nodes.
            num_left = bisect_left(known.nodes, True, key=lambda node: not node.is_kept)
            nodes += known.nodes[:num_left]
            blocks += known.blocks[:num_left]
        if self._has_checkpoints:
            return self._match_checkpoint(token_ids, extra, nodes)
        found = self.descend(token_ids, extra, nodes[-1] if nodes else None)
        nodes += found
        blocks += [node.block for node in found if node.block is not None]
        num_tokens = min(self._num_tokens[len(nodes)], len(token_ids) - 1)
        while nodes and self._num_tokens[len(nodes) - 1] >= num_tokens:
            nodes.pop()
            blocks.pop()
        return Match(blocks, num_tokens, len(token_ids), extra, nodes)

    def _match_checkpoint(self, token_ids: TokenIds, extra: Hashable, nodes: list[Node]) -> Match:
        """`match` where a checkpoint is needed: the first of these nodes are known to match."""
        nodes += self.descend(token_ids, extra, nodes[-1] if nodes else None)
        most_tokens = len(token_ids) - 1
        while nodes:
            checkpoint = self.checkpoint(nodes[-1])
            num_tokens = min(self._num_tokens[len(nodes)], most_tokens)
            if checkpoint is not None and num_tokens:
                blocks = [node.block for node in nodes if node.block is not None]
                num_blocks = bisect_left(self._num_tokens, num_tokens)
                del blocks[num_blocks:]
                return Match(blocks, num_tokens, len(token_ids), extra, nodes, checkpoint)
            nodes.pop()
        return Match([], 0, len(token_ids), extra, [])

    def checkpoint(self, node: Node) -> Node | None:
        """The checkpoint after a node."""
        return self._nodes.get((node.number, _CHECKPOINT))

    def num_tokens(self, node: Node) -> int:
        """Tokens that end in the blocks up to a node's."""
        return self._num_tokens[node.index + 1]

    def add_checkpoint(
        self, node: Node, kept: tuple[Kept, ...], restore_tokens: int, now_s: float
    ) -> Node:
        """Add a checkpoint after a node that has none."""
        self._last_number += 1
        key = (node.number, _CHECKPOINT)
        checkpoint = Node(self._last_number, key, node, None, node.index, now_s, kept)
        checkpoint.is_checkpoint = True
        checkpoint.restore_tokens = restore_tokens
        checkpoint.path = hash((node.path, _CHECKPOINT))
        self._nodes[key] = checkpoint
        node.num_children += 1
        return checkpoint

    def descend(self, token_ids: TokenIds, extra: Hashable, node: Node | None) -> list[Node]:
        """The nodes below `node` that the next blocks of a sequence are kept in, in order.

        Args:
            token_ids: the sequence's, from the first.
            extra: as given to `match`.
            node: where to begin; None for the first block.
        """
        if self._child(token_ids, extra, node) is None:
            return []  # without a copy of all tokens
        nodes = self._nodes
        index = next_index(node)
        parent = parent_key(extra, node)
        start = self._end_bytes[index]
        data = token_ids.tobytes()
        found: list[Node] = []
        for end in self._end_bytes[index + 1 : self.num_whole(len(token_ids)) + 1]:
            child = nodes.get((parent, data[start:end]))
            if child is None:
                break
            found.append(child)
            parent, start = child.number, end
        return found

    def extend(
        self,
        token_ids: TokenIds,
        extra: Hashable,
        node: Node | None,
        blocks: Sequence[int | None],
        now_s: float,
    ) -> list[Node]:
        """Add the blocks of a sequence below `node`, none of which is kept yet.

        Args:
            token_ids: the sequence's tokens, from the first.
            extra: as given to `match`.
            node: node of the block before; None for the first block.
            blocks: the sequence's blocks, from the first, at least the whole ones; None for each
                where nodes have none.
            now_s: the time.
        """
        num_whole, first = self.num_whole(len(token_ids)), next_index(node)
        data, ends = token_ids.tobytes(), self._end_bytes
        added: list[Node] = []
        parent, number = parent_key(extra, node), self._last_number
        path = hash(parent) if node is None else node.path
        for index in range(first, num_whole):
            key = (parent, data[ends[index] : ends[index + 1]])
            number += 1
            child = Node(number, key, node, blocks[index], index, now_s, (), self._block_bytes)
            self._nodes[key] = child
            child.path = path = hash((path, key[1]))
            if node is not None:
                node.num_children += 1
            added.append(child)
            node, parent = child, number
        self._last_number = number
        self.num_blocks += len(added)
        return added

    def remove(self, leaf: Node) -> None:
        """Remove a node without children; its uses are added to its parent's."""
        del self._nodes[leaf.key]
        self.num_blocks -= not leaf.is_checkpoint
        leaf.is_kept = False
        parent = leaf.parent
        if parent is not None:
            parent.num_children -= 1
            parent.reuses += leaf.reuses
            parent.last_used_s = max(parent.last_used_s, leaf.last_used_s)

    def num_whole(self, num_tokens: int) -> int:
        """Number of a sequence's blocks that depend on the first `num_tokens` tokens alone."""
        self._cover(num_tokens)
        return bisect_right(self._end_bytes, num_tokens * _TOKEN_ID_BYTES) - 1

    def _cover(self, num_tokens: int) -> None:
        """Extend the table of blocks to all that `num_tokens` tokens lie in."""
        num_tokens = min(num_tokens, self._max_tokens)
        # The next block is there if its beginning is.
        while self._num_tokens[-1] < num_tokens:
            num_blocks = len(self._end_bytes)
            self._num_tokens.append(self._cache.tokens_in(num_blocks))
            num_touching = self._cache.tokens_touching(num_blocks)
            self._end_bytes.append(num_touching * _TOKEN_ID_BYTES)

    def _child(self, token_ids: TokenIds, extra: Hashable, node: Node | None) -> Node | None:
        """The node of the next block after `node`, if that block is whole and kept."""
        index = next_index(node)
        if index >= self.num_whole(len(token_ids)):
            return None
        return self._nodes.get((parent_key(extra, node), self._block_ids(token_ids, index)))

    def _block_ids(self, token_ids: TokenIds, index: int) -> bytes:
        """The tokens that a block adds to those before it, as bytes of a key."""
        start, end = (self._end_bytes[i] // _TOKEN_ID_BYTES for i in (index, index + 1))
        return token_ids[start:end].tobytes()

    def _is_current(self, known: Match, token_ids: TokenIds, extra: Hashable) -> bool:
        """Whether an earlier match of these tokens, or of the first of them, is still complete.

        Raises:
            InvariantError: it is a match of other tokens.
        """
        node = known.last_node
        if node is not None and (
            known.extra != extra or node.key[1] != self._block_ids(token_ids, node.index)
        ):
            raise InvariantError("a match is resumed for other tokens")
        return (
            known.num_query_tokens == len(token_ids)
            and (node is None or node.is_kept)
            and (known.checkpoint is None or known.checkpoint.is_kept)
            and self._child(token_ids, extra, node) is None
        )


def check_token_ids(token_ids: TokenIds) -> None:
    """Refuse token ids of another width, since their bytes would match other tokens.

    Raises:
        InvariantError: they are not a row of int32.
    """
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise InvariantError(f"token ids are {token_ids.dtype} of {token_ids.ndim} dimensions")


def parent_key(extra: Hashable, node: Node | None) -> ParentKey:
    """The parent's part of the key of the block after `node`; of a first block if that is None."""
    return (extra,) if node is None else node.number


def next_index(node: Node | None) -> int:
    """Place in its sequence of the block after `node`; of a first block if that is None."""
    return 0 if node is None else node.index + 1
