"""Radix tree of the blocks that are kept.

The blocks of a sequence form a chain: the contents of a block depend on the tokens in it and on all
tokens before. So the blocks that are kept form a tree. A node has a run of blocks that follow each
other, with the tokens that they add:

    blocks of a node = [begin, end) of each sequence that goes through it
    its tokens       = [tokens_touching(begin), tokens_touching(end))
    its key          = (parent node, bytes of the tokens that its first block adds)

The parent of a first block is `extra`, which stands for anything else that changes the KV. A
lookup finds a child by its key, and compares all tokens of the node. Keys are the tokens themselves
and not a digest of them. So a request never reads KV of other tokens, even if hashes collide by
chance or by malice.

A node is split where sequences part, and where a lease, a pin or a checkpoint ends inside of it: so
that all blocks of a node have the same guards and the same uses. It loses blocks from its end, and
gets none: what continues it is another node.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence, ValuesView
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from aquifer.cache.base import Blocks, Kept
from aquifer.errors import InvariantError
from aquifer.memory.runs import join, num_equal

TokenIds = npt.NDArray[np.int32]

NOT_QUEUED = 0

_MANY_BLOCKS = 1 << 40  # more than any sequence has
_CHECKPOINT = b"checkpoint"  # in place of tokens: no whole number of token ids

ParentKey = int | tuple[Hashable]  # a node's number, or (extra,) for first blocks: never equal
Key = tuple[ParentKey, bytes]


@dataclass(slots=True, eq=False)
class Node:
    """Blocks that are kept and follow each other, or a checkpoint after them, without children.

    `reuses` and `last_used_s` count the requests that ended at its last block. The counts of blocks
    below are added when these are removed. So both are exact once a node is a leaf, and recording a
    use is one write, however long the path.
    """

    number: int  # never used again
    key: Key
    parent: Node | None
    begin: int  # the first block's place in its sequence; of a checkpoint, the end of its parent
    end: int  # the place behind the last block
    last_used_s: float
    # Those of the blocks that it had at first: it may have lost some of the last ones.
    token_ids: TokenIds | None = None
    blocks: Sequence[int] = ()  # none where the first part of a cache has a window
    kept: tuple[Kept, ...] = ()  # of a checkpoint: blocks of the parts with a window
    checkpoint_bytes: int = 0  # of a checkpoint: what evicting it gives back
    restore_tokens: int = 0  # of a checkpoint: tokens since the one before it
    reuses: int = 0
    num_children: int = 0
    num_guards: int = 0  # leases and pins on it, and children that are guarded
    num_pins: int = 0  # pins on it, and children that are pinned
    is_checkpoint: bool = False
    ticket: int = NOT_QUEUED  # number of its entry in a queue of victims
    is_kept: bool = True  # False once it is removed
    paths: list[int] | None = None  # see `Trie.paths`; of the blocks that it had then

    @property
    def num_blocks(self) -> int:
        """Blocks of the node; 0 for a checkpoint."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Match:
    """Cached prefix of a request. Lock it before anything is reserved, or throw it away.

    Attributes:
        blocks: the blocks that the tokens lie in, for `SequenceCache.adopt`.
        num_tokens: tokens that need not be computed; 0 if there are no blocks.
        num_query_tokens: length of the request that was looked up.
        extra: as given to `match`.
        node: the node that the path ends in, for this package; None if there is no block.
        end: blocks of the path: it may end inside of the node.
        checkpoint: the checkpoint after them; None where none is needed.
    """

    blocks: Sequence[int]
    num_tokens: int
    num_query_tokens: int
    extra: Hashable
    node: Node | None
    end: int
    checkpoint: Node | None = None


class Trie:
    """Nodes of kept blocks, by key.

    Args:
        cache: manager of the blocks.
        block_bytes: what a block takes; 0 if nodes have no blocks.
        has_checkpoints: whether a prefix is of use only where there is a checkpoint.
        are_exact: whether it is of use only to requests that are longer (`Checkpoints.are_exact`).

    Attributes:
        num_blocks: blocks of all nodes.
    """

    def __init__(
        self,
        cache: Blocks,
        block_bytes: int,
        *,
        has_checkpoints: bool = False,
        are_exact: bool = False,
    ) -> None:
        self.num_blocks = 0
        self._block_bytes = block_bytes
        self._has_checkpoints = has_checkpoints
        self._are_exact = are_exact
        self._cache = cache
        # Without KV there are no blocks, and the manager need not know how many tokens lie in one.
        has_kv = cache.footprint.token_bytes > 0
        self._max_tokens = cache.tokens_in(_MANY_BLOCKS) if has_kv else 0
        self._nodes: dict[Key, Node] = {}
        self._last_number = 0
        # [i]: tokens that end in the first i blocks, and tokens that these blocks depend on;
        # extended as far as a sequence needs.
        self._num_tokens = [0]
        self._ends = [0]

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def nodes(self) -> ValuesView[Node]:
        """All nodes, in no order."""
        return self._nodes.values()

    def match(self, token_ids: TokenIds, extra: Hashable, known: Match | None = None) -> Match:
        """The longest prefix that is kept: see `PrefixCache.match`."""
        node: Node | None = None
        end = 0
        if known is not None:
            self._require_same(known, token_ids, extra)
            node, end = self.kept_part(known)
        start = end
        last, end = self.descend(token_ids, extra, node, end)
        if (
            known is not None
            and end == start == known.end
            and known.num_query_tokens == len(token_ids)
            and (known.checkpoint is None or known.checkpoint.is_kept)
        ):
            return known if node is known.node else replace(known, node=node)
        if self._has_checkpoints:
            return self._match_checkpoint(token_ids, extra, last, end)
        num_tokens = min(self._num_tokens[end], len(token_ids) - 1)
        end = bisect_left(self._num_tokens, num_tokens)
        last = _node_at(last, end)
        blocks = self._path_blocks(last, end)
        return Match(blocks, num_tokens, len(token_ids), extra, last, end)

    def _match_checkpoint(
        self, token_ids: TokenIds, extra: Hashable, node: Node | None, end: int
    ) -> Match:
        """`match` where a checkpoint is needed, given the end of the path that is kept."""
        most_tokens = len(token_ids) - 1
        if node is not None and end < node.end:
            node = node.parent
        while node is not None:
            checkpoint = self.checkpoint(node)
            num_tokens = min(self._num_tokens[node.end], most_tokens)
            if self._are_exact and num_tokens < self._num_tokens[node.end]:
                checkpoint = None
            if checkpoint is not None and num_tokens:
                num_blocks = bisect_left(self._num_tokens, num_tokens)
                blocks = self._path_blocks(_node_at(node, num_blocks), num_blocks)
                num_query = len(token_ids)
                return Match(blocks, num_tokens, num_query, extra, node, node.end, checkpoint)
            node = node.parent
        return Match([], 0, len(token_ids), extra, None, 0)

    def kept_part(self, match: Match) -> tuple[Node | None, int]:
        """The node in which the part of a match ends that is still kept, and its blocks."""
        node, end = match.node, match.end
        while node is not None:
            # Parents stay longer than their children. What was split off is above.
            if node.is_kept and end > node.begin:
                return node, min(end, node.end)
            end, node = min(end, node.begin), node.parent
        return None, 0

    def checkpoint(self, node: Node) -> Node | None:
        """The checkpoint after a node."""
        return self._nodes.get((node.number, _CHECKPOINT))

    def num_tokens(self, num_blocks: int) -> int:
        """Tokens that end in the first blocks of a sequence, which are kept."""
        return self._num_tokens[num_blocks]

    def first_blocks(self, num_tokens: int) -> int:
        """The least number of blocks in which so many tokens end, where such blocks are kept."""
        return bisect_left(self._num_tokens, num_tokens)

    def add_checkpoint(
        self, node: Node, kept: tuple[Kept, ...], restore_tokens: int, now_s: float
    ) -> Node:
        """Add a checkpoint after a node that has none."""
        self._last_number += 1
        key = (node.number, _CHECKPOINT)
        checkpoint = Node(self._last_number, key, node, node.end, node.end, now_s, kept=kept)
        checkpoint.is_checkpoint = True
        checkpoint.restore_tokens = restore_tokens
        self._nodes[key] = checkpoint
        node.num_children += 1
        return checkpoint

    def descend(
        self, token_ids: TokenIds, extra: Hashable, node: Node | None, end: int
    ) -> tuple[Node | None, int]:
        """Follow a sequence as far as its blocks are kept.

        Args:
            token_ids: the sequence's, from the first.
            extra: as given to `match`.
            node: where to begin; None for the first block.
            end: blocks of the path up to there, which may end inside of the node.

        Returns: the node in which the path ends, and the blocks of the path.
        """
        num_whole, ends = self.num_whole(len(token_ids)), self._ends
        while end < num_whole:
            start = ends[end]
            if node is None or end == node.end:
                ids = token_ids[start : ends[end + 1]].tobytes()
                child = self._nodes.get((parent_key(extra, node), ids))
                if child is None:
                    break
                node, end = child, end + 1
                start = ends[end]
            stop = min(node.end, num_whole)
            if end < stop:
                assert node.token_ids is not None
                first, last = ends[node.begin], ends[stop]
                same = num_equal(
                    node.token_ids[start - first : last - first], token_ids[start:last]
                )
                end = bisect_right(ends, start + same, end, stop + 1) - 1
            if end < node.end:
                break
        return node, end

    def extend(
        self,
        token_ids: TokenIds,
        extra: Hashable,
        parent: Node | None,
        blocks: Sequence[int],
        now_s: float,
    ) -> Node:
        """Add a node of all whole blocks of a sequence below `parent`, none of which is kept yet.

        Args:
            token_ids: the sequence's tokens, from the first.
            extra: as given to `match`.
            parent: the node before; None if these are its first blocks.
            blocks: the blocks, at least one; empty where nodes have none.
            now_s: the time.
        """
        begin, end = path_end(parent), self.num_whole(len(token_ids))
        added_ids = token_ids[self._ends[begin] : self._ends[end]].copy()
        key = (parent_key(extra, parent), self._first_ids(added_ids, begin))
        self._last_number += 1
        node = Node(self._last_number, key, parent, begin, end, now_s, added_ids, blocks)
        self._nodes[key] = node
        if parent is not None:
            parent.num_children += 1
        self.num_blocks += node.num_blocks
        return node

    def split(self, node: Node, end: int) -> Node:
        """The node with the blocks of `node` before `end`, and none from there on.

        It is `node` itself if that ends there. Otherwise it is a new node above `node`, which keeps
        the blocks from `end` on, with its children, leases, pins and uses.
        """
        if end == node.end:
            return node
        assert node.token_ids is not None
        num_blocks, num_ids = end - node.begin, self._ends[end] - self._ends[node.begin]
        self._last_number += 1
        above = Node(
            self._last_number,
            node.key,
            node.parent,
            node.begin,
            end,
            node.last_used_s,
            node.token_ids[:num_ids],
            node.blocks[:num_blocks],
            num_children=1,
            num_guards=int(node.num_guards > 0),
            num_pins=int(node.num_pins > 0),
        )
        self._nodes[node.key] = above
        if node.paths is not None:
            above.paths, node.paths = node.paths[:num_blocks], node.paths[num_blocks:]
        node.token_ids, node.blocks = node.token_ids[num_ids:], node.blocks[num_blocks:]
        node.parent, node.begin = above, end
        node.key = (above.number, self._first_ids(node.token_ids, end))
        self._nodes[node.key] = node
        return above

    def trim(self, leaf: Node, num_blocks: int) -> Sequence[int]:
        """Remove the last blocks of a node without children, but not all.

        Returns: the blocks, the last one first.
        """
        blocks = leaf.blocks[: leaf.num_blocks]
        leaf.end -= num_blocks
        self.num_blocks -= num_blocks
        return blocks[leaf.num_blocks :][::-1]

    def paths(self, node: Node) -> list[int]:
        """For each block of a node, a hash of all tokens up to its end, and of `extra`.

        A checkpoint has one. They are not unique, and computed when they are asked for first.
        """
        above: list[Node] = []  # the nodes of which they are not known, the lowest one first
        at: Node | None = node
        while at is not None and at.paths is None:
            above.append(at)
            at = at.parent
        path = at.paths[at.num_blocks - 1] if at is not None and at.paths is not None else None
        for at in reversed(above):
            if path is None:
                path = hash(at.key[0])
            if at.is_checkpoint:
                at.paths = [hash((path, _CHECKPOINT))]
                continue
            assert at.token_ids is not None
            first, at.paths = self._ends[at.begin], []
            for index in range(at.begin, at.end):
                start, stop = self._ends[index] - first, self._ends[index + 1] - first
                path = hash((path, at.token_ids[start:stop].tobytes()))
                at.paths.append(path)
        assert node.paths is not None
        return node.paths if node.is_checkpoint else node.paths[: node.num_blocks]

    def remove(self, leaf: Node) -> None:
        """Remove a node without children; its uses are added to its parent's."""
        del self._nodes[leaf.key]
        self.num_blocks -= leaf.num_blocks
        leaf.is_kept = False
        parent = leaf.parent
        if parent is not None:
            parent.num_children -= 1
            parent.reuses += leaf.reuses
            parent.last_used_s = max(parent.last_used_s, leaf.last_used_s)

    def num_whole(self, num_tokens: int) -> int:
        """Number of a sequence's blocks that depend on the first `num_tokens` tokens alone."""
        self._cover(num_tokens)
        return bisect_right(self._ends, num_tokens) - 1

    def _cover(self, num_tokens: int) -> None:
        """Extend the table of blocks to all that `num_tokens` tokens lie in."""
        num_tokens = min(num_tokens, self._max_tokens)
        # The next block is there if its beginning is.
        while self._num_tokens[-1] < num_tokens:
            num_blocks = len(self._ends)
            self._num_tokens.append(self._cache.tokens_in(num_blocks))
            self._ends.append(self._cache.tokens_touching(num_blocks))

    def _first_ids(self, token_ids: TokenIds, begin: int) -> bytes:
        """The tokens that the block at `begin` adds, given those from that block on: for a key."""
        return token_ids[: self._ends[begin + 1] - self._ends[begin]].tobytes()

    def _path_blocks(self, node: Node | None, end: int) -> Sequence[int]:
        """The first `end` blocks of the path to a node."""
        parts: list[Sequence[int]] = []
        while node is not None:
            if node.blocks:
                parts.append(node.blocks[: end - node.begin])
            end, node = node.begin, node.parent
        return join(parts[::-1])

    def _require_same(self, known: Match, token_ids: TokenIds, extra: Hashable) -> None:
        """Refuse an earlier match of other tokens than these, or than the first of them.

        Raises:
            InvariantError: the last block of the match has other tokens.
        """
        node, end = _node_at(known.node, known.end), known.end
        if node is None:
            return
        start, stop = self._ends[end - 1], self._ends[end]
        first = self._ends[node.begin]
        assert node.token_ids is not None
        its_ids = node.token_ids[start - first : stop - first]
        if known.extra != extra or not np.array_equal(its_ids, token_ids[start:stop]):
            raise InvariantError("a match is resumed for other tokens")


def check_token_ids(token_ids: TokenIds) -> None:
    """Refuse token ids of another width, since their bytes would match other tokens.

    Raises:
        InvariantError: they are not a row of int32.
    """
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise InvariantError(f"token ids are {token_ids.dtype} of {token_ids.ndim} dimensions")


def parent_key(extra: Hashable, node: Node | None) -> ParentKey:
    """The parent's part of the key of the node after `node`; of a first one if that is None."""
    return (extra,) if node is None else node.number


def path_end(node: Node | None) -> int:
    """Blocks of the path up to the end of a node; 0 for None."""
    return 0 if node is None else node.end


def _node_at(node: Node | None, end: int) -> Node | None:
    """The node above or at `node` in which the first `end` blocks of its path end."""
    while node is not None and end <= node.begin:
        node = node.parent
    return node
