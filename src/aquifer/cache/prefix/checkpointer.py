"""Where checkpoints of running sequences are taken, and where a sequence stops for one.

Parts with windows keep KV of many positions, so that their checkpoints are taken of what is there:
at a sequence's end, where it leaves earlier ones, and between. A recurrent state is that of one
position alone. So a sequence stops where a checkpoint will be of use, and its state is marked
there, which copies it; the checkpoint is taken when its tokens are inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from aquifer.cache.prefix.checkpoints import Checkpoints
from aquifer.cache.prefix.pins import Pins
from aquifer.cache.prefix.trie import Node, TokenIds, Trie, path_end
from aquifer.cache.prefix.victims import VictimQueues


class Checkpointer:
    """Takes the checkpoints of one trie.

    Args:
        trie: the trie.
        checkpoints: its checkpoints so far.
        victims: where new ones are offered to be evicted.
        pins: the pinned prefixes, which guard the checkpoints at their ends.
        restored: is called with each checkpoint that may have been evicted before.
        block_bytes: bytes of a block of the trie's nodes; 0 if they have none.
    """

    def __init__(
        self,
        trie: Trie,
        checkpoints: Checkpoints,
        victims: VictimQueues,
        pins: Pins,
        restored: Callable[[Node], None],
        block_bytes: int,
    ) -> None:
        self._trie = trie
        self._checkpoints = checkpoints
        self._victims = victims
        self._pins = pins
        self._restored = restored
        self._block_bytes = block_bytes
        self._needs_stops = checkpoints.are_exact and block_bytes > 0

    def add(
        self,
        last: Node | None,
        slot: int,
        start: int,
        num_known: int,
        num_computed: int,
        now_s: float,
    ) -> None:
        """Take checkpoints of a sequence: at its end, where it leaves earlier ones, and between.

        Args:
            last: node of its last whole block; None if it has none.
            slot: its slot.
            start: whole blocks that it had when it was inserted last.
            num_known: of those that it has now, the first that were kept before.
            num_computed: as for `insert`.
            now_s: the time.
        """
        trie, every_tokens = self._trie, self._checkpoints.every_tokens
        end = path_end(last)
        # A block may depend on a token more than ends in it.
        marked = [n for n in self._checkpoints.marked(slot) if trie.first_blocks(n) <= end]
        if self._checkpoints.are_exact:
            places = {trie.first_blocks(n) for n in marked}
        else:
            places = {end, max(num_known, start)}
            first, final = (trie.num_tokens(place) // every_tokens for place in (start, end))
            places.update(trie.first_blocks(i * every_tokens) for i in range(first + 1, final + 1))
        for place in sorted(places):
            num_tokens = trie.num_tokens(place)
            # The last node may be that of a match, of which the last token is computed again.
            if not 0 < num_tokens <= num_computed:
                continue
            node = last
            while node is not None and place <= node.begin:
                node = node.parent
            assert node is not None
            if place == node.end and trie.checkpoint(node) is not None:
                continue
            kept = self._checkpoints.take(slot, num_tokens)
            if kept is None:
                continue
            node = trie.split(node, place)
            before = node.parent
            while before is not None and trie.checkpoint(before) is None:
                before = before.parent
            since = trie.num_tokens(path_end(before))
            checkpoint = trie.add_checkpoint(node, kept, num_tokens - since, now_s)
            checkpoint.checkpoint_bytes = self._checkpoints.hold(kept)
            # Else its tokens count with their blocks.
            if place <= num_known or not self._block_bytes:
                self._restored(checkpoint)
            self._victims.offer(checkpoint)
            self._pins.take_checkpoint(node)
        for num_tokens in marked:
            self._checkpoints.unmark(slot, num_tokens)

    def stops(self, token_ids: TokenIds, extra: Hashable, num_begun: int) -> list[int]:
        """Where a sequence should stop once, so that its state can be marked for a checkpoint.

        Numbers of tokens, ascending: at distances of `Checkpoints.every_tokens`, where it leaves
        what is kept, and at the last block's end before its last token. Where two are less than a
        quarter of that distance apart, one of them is left out, as it would save little.

        Args:
            token_ids: the sequence's tokens.
            extra: as given to `insert`.
            num_begun: tokens that it begins with.

        Returns: none where there is no state.
        """
        if not self._needs_stops:
            return []
        trie, every_tokens = self._trie, self._checkpoints.every_tokens
        num_whole = trie.num_whole(len(token_ids) - 1)
        if not num_whole:
            return []
        _, num_known = trie.descend(token_ids, extra, None, 0)
        last = trie.num_tokens(num_whole)
        where_left = trie.num_tokens(min(num_known, num_whole))
        between = [
            trie.num_tokens(trie.num_whole(count))
            for count in range(num_begun + every_tokens, last, every_tokens)
        ]
        least_tokens = max(every_tokens // 4, 1)
        stops: list[int] = []
        # Several requests have begun alike up to where it leaves the others: that is of most use.
        for count in (where_left, last, *between):
            distances = [abs(count - stop) for stop in stops]
            if min([count - num_begun, *distances]) >= least_tokens:
                stops.append(count)
        return sorted(stops)

    def ends_block(self, num_tokens: int) -> bool:
        """Whether a checkpoint with state can be taken after so many tokens: a block ends there."""
        if not self._needs_stops or not num_tokens:
            return False
        return self._trie.num_tokens(self._trie.num_whole(num_tokens)) == num_tokens
