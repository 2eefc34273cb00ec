"""Prefixes that stay until they are unpinned.

A pin guards the blocks of its prefix that are kept, and moves down as more of them are inserted.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from aquifer.cache.prefix.trie import Node, ParentKey, TokenIds, Trie, parent_key, path_end
from aquifer.cache.prefix.victims import VictimQueues


@dataclass(slots=True, eq=False)
class _Pin:
    """A pinned prefix; `node` is its last block that is kept, and `checkpoint` what follows it."""

    extra: Hashable
    token_ids: TokenIds
    num_whole: int  # whole blocks of the prefix, kept or not
    node: Node | None = None
    checkpoint: Node | None = None

    @property
    def awaited(self) -> ParentKey:
        """The parent's part of the key of the next node that the pin waits for."""
        return parent_key(self.extra, self.node)

    @property
    def num_missing(self) -> int:
        """Whole blocks that are not kept yet."""
        return self.num_whole - path_end(self.node)


class Pins:
    """The pins of one trie.

    Args:
        trie: the nodes.
        victims: guards the pinned nodes.

    Attributes:
        num_blocks: pinned blocks; a block that several pins have in common counts once.
        num_checkpoints: pins with a checkpoint at the end of their prefix.
    """

    def __init__(self, trie: Trie, victims: VictimQueues) -> None:
        self.num_blocks = 0
        self.num_checkpoints = 0
        self._trie = trie
        self._victims = victims
        self._pins: dict[tuple[Hashable, bytes], _Pin] = {}
        # By `_Pin.awaited`, so that a new node finds the pins that wait for it.
        self._waiting: dict[ParentKey, set[_Pin]] = {}

    def pin(self, token_ids: TokenIds, extra: Hashable) -> None:
        """See `PrefixCache.pin`."""
        data = token_ids.tobytes()
        if (extra, data) not in self._pins:
            num_whole = self._trie.num_whole(len(token_ids))
            pin = self._pins[extra, data] = _Pin(extra, np.frombuffer(data, np.int32), num_whole)
            self._wait(pin)
            self._advance(pin)

    def unpin(self, token_ids: TokenIds, extra: Hashable) -> bool:
        """See `PrefixCache.unpin`."""
        pin = self._pins.pop((extra, token_ids.tobytes()), None)
        if pin is None:
            return False
        self._leave(pin)
        return True

    def __len__(self) -> int:
        return len(self._pins)

    def has(self, token_ids: TokenIds, extra: Hashable) -> bool:
        """Whether exactly this prefix is pinned."""
        return (extra, token_ids.tobytes()) in self._pins

    @property
    def num_promised(self) -> int:
        """Pinned blocks once all pinned prefixes are kept. Blocks that are not kept yet count for
        each pin."""
        return self.num_blocks + sum(pin.num_missing for pin in self._pins.values())

    def num_more(self, token_ids: TokenIds, extra: Hashable) -> int:
        """Blocks that a pin of this prefix would add to `num_promised`, if it is not pinned."""
        node, end = self._trie.descend(token_ids, extra, None, 0)
        while node is not None and not node.num_pins:
            end, node = node.begin, node.parent
        num_pinned = end  # all above a pinned node is pinned
        return self._trie.num_whole(len(token_ids)) - num_pinned

    def follow(self, added: Node) -> None:
        """Let pins move down to the blocks of a node that was added to the trie."""
        if self._pins:
            parent, _ = added.key
            for pin in list(self._waiting.get(parent, ())):
                self._advance(pin)

    def take_checkpoint(self, node: Node) -> None:
        """Guard the checkpoint that a node has got, where a pinned prefix ends."""
        for pin in list(self._waiting.get(node.number, ())):
            self._guard_checkpoint(pin)

    def detach(self) -> None:
        """Take all pins off their nodes, until `attach`."""
        for pin in self._pins.values():
            self._leave(pin)

    def attach(self) -> None:
        """Put all pins on the last kept nodes of their prefixes."""
        for pin in self._pins.values():
            self._wait(pin)
            self._advance(pin)

    def clear(self) -> None:
        """Forget all pins."""
        self.detach()
        self._pins.clear()

    def _advance(self, pin: _Pin) -> None:
        """Move a pin down as far as its prefix is kept."""
        before = pin.node
        node, end = self._trie.descend(pin.token_ids, pin.extra, before, path_end(before))
        if node is not None and node is not before:
            self._stop_waiting(pin)
            pin.node = self._trie.split(node, end)
            self._wait(pin)
            self._mark(pin.node)
            self._unmark(before)
        self._guard_checkpoint(pin)

    def _leave(self, pin: _Pin) -> None:
        """Take a pin off its node."""
        self._stop_waiting(pin)
        self._drop_checkpoint(pin)
        self._unmark(pin.node)
        pin.node = None

    def _guard_checkpoint(self, pin: _Pin) -> None:
        """Guard the checkpoint at a pin's node, and no longer the one that it had."""
        found = None if pin.node is None else self._trie.checkpoint(pin.node)
        if found is pin.checkpoint:
            return
        self._drop_checkpoint(pin)
        if found is not None:
            self._victims.guard(found)
            self.num_checkpoints += 1
            pin.checkpoint = found

    def _drop_checkpoint(self, pin: _Pin) -> None:
        if pin.checkpoint is not None:
            self._victims.unguard(pin.checkpoint)
            self.num_checkpoints -= 1
            pin.checkpoint = None

    def _wait(self, pin: _Pin) -> None:
        self._waiting.setdefault(pin.awaited, set()).add(pin)

    def _stop_waiting(self, pin: _Pin) -> None:
        pins = self._waiting[pin.awaited]
        pins.remove(pin)
        if not pins:
            del self._waiting[pin.awaited]

    def _mark(self, node: Node | None) -> None:
        """Guard a node, and count it and all nodes above it as pinned, each once."""
        self._victims.guard(node)
        while node is not None:
            node.num_pins += 1
            if node.num_pins > 1:
                return
            self.num_blocks += node.num_blocks
            node = node.parent

    def _unmark(self, node: Node | None) -> None:
        """The opposite of `_mark`."""
        self._victims.unguard(node)
        while node is not None:
            node.num_pins -= 1
            if node.num_pins:
                return
            self.num_blocks -= node.num_blocks
            node = node.parent
