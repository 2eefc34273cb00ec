"""KV in contiguous regions that are reserved whole when a sequence begins: three baselines.

Servers before PagedAttention keep a sequence's KV in one stretch, and so set aside room for all
that it may ever have (sections 3.1 and 6.1). How much that is, is the policy:

- "max": the longest sequence there may be (Orca (Max), FasterTransformer);
- "pow2": the prompt, and the output's length rounded up to a power of two (Orca (Pow2));
- "oracle": its true final length, known in a replay only (Orca (Oracle)).

In an engine the final length is taken to be the prompt and `max_tokens`, so there "oracle" is what
a server does that believes its clients.

A buddy allocator places the regions, in blocks of `block_size` tokens, so a region is a power of
two of blocks, one after the other. What such regions have in common is in
`aquifer.cache.contiguous`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from aquifer.cache.base import IntArray, KVLayout, StateLayout
from aquifer.cache.contiguous import ContiguousCache
from aquifer.cache.footprint import Count, Footprint
from aquifer.errors import ConfigError, InvariantError
from aquifer.memory.pool import Owner, PagePool
from aquifer.predict.lengths import Forecast
from aquifer.sim.baselines.buddy import BuddyAllocator

Policy = Literal["max", "pow2", "oracle"]


def tokens_to_reserve(policy: Policy, num_prompt: int, num_total: int, max_tokens: int) -> int:
    """How many tokens to set aside for a sequence.

    Args:
        policy: see the module.
        num_prompt: tokens of the prompt.
        num_total: tokens of prompt and output.
        max_tokens: of the longest sequence; never more than that is set aside.
    """
    if policy == "max":
        return max_tokens
    if policy == "oracle":
        return min(num_total, max_tokens)
    num_outputs = BuddyAllocator.rounded(max(num_total - num_prompt, 1))
    return min(num_prompt + num_outputs, max_tokens)


@dataclass(frozen=True, slots=True)
class RegionFootprint(Footprint):
    """Footprint of sequences in regions of a power of two of blocks.

    Attributes:
        least_tokens: length that every sequence is given a region for, if it is not longer.
    """

    least_tokens: int = 0

    def pages(self, num_tokens: Count) -> Count:
        """Whole pages under the region of a sequence that ends with that many tokens."""
        if isinstance(num_tokens, np.ndarray):
            return np.array([self.pages(count) for count in num_tokens.tolist()], np.int64)
        if not self.token_bytes:
            return 0
        block_tokens = self.block_bytes // self.token_bytes
        num_blocks = -(-max(num_tokens, self.least_tokens) // block_tokens)
        return self.blocks_pages(BuddyAllocator.rounded(num_blocks)) if num_blocks else 0


@dataclass(frozen=True, slots=True)
class Waste:
    """What a manager has taken without a token in it, by the kinds of section 3.1, in bytes."""

    future_bytes: int  # "reserved": for tokens that will come
    internal_bytes: int  # set aside for tokens that will never come
    external_bytes: int  # taken by rounding, to a region and to pages: no token could come there


class ReservedCache(ContiguousCache):
    """The `SequenceCache` of regions reserved whole.

    The arena is what the pool has free when the cache is made. It may be had by others meanwhile:
    then a region can be refused although there is room in the arena.

    Args:
        pool: where pages come from.
        owner: the pages' owner.
        layout: of one token.
        max_seqs: number of slots.
        max_tokens: longest sequence.
        state: must be None: there is no room for recurrent state.
        policy: how much to reserve.
        block_size: tokens of a block, a power of two.

    Raises:
        ConfigError: there is no such policy, or the model has recurrent state.
    """

    def __init__(
        self,
        pool: PagePool,
        owner: Owner,
        layout: KVLayout,
        max_seqs: int,
        max_tokens: int,
        state: StateLayout | None = None,
        *,
        policy: Policy = "max",
        block_size: int = 16,
    ) -> None:
        if state is not None:
            raise ConfigError(
                "regions reserved whole have no room for recurrent state; replay with virtual "
                "or paged"
            )
        if policy not in get_args(Policy):
            raise ConfigError(f"unknown policy {policy!r}; choose {', '.join(get_args(Policy))}")
        block_bytes = block_size * layout.token_bytes
        footprint = RegionFootprint(
            layout.token_bytes,
            block_bytes,
            pool.page_bytes,
            shares=False,
            least_tokens=max_tokens if policy == "max" else 0,
        )
        largest = BuddyAllocator.rounded(-(-max_tokens // block_size))
        num_blocks = max(min(pool.free_bytes // block_bytes, max_seqs * largest), 1)
        super().__init__(
            pool, owner, layout, max_seqs, max_tokens, block_size, num_blocks, footprint
        )
        self._policy: Policy = policy
        self._max_tokens = max_tokens
        self._buddies = BuddyAllocator(num_blocks)
        # What `expect` said, and what was taken.
        self._expected_tokens = np.full(max_seqs + 1, max_tokens, np.int64)
        self._wanted_tokens = np.zeros(max_seqs + 1, np.int64)

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Decide how much to set aside for the sequences that come to a slot, until the next call.

        Without any, it is the longest sequence.
        """
        self._expected_tokens[slot] = tokens_to_reserve(
            self._policy, num_prompt, num_total, self._max_tokens
        )

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Give a region to each sequence that has none.

        Raises:
            InvariantError: a sequence has outgrown its region, so it was not expected rightly.
        """
        held = self._num_blocks[slots]
        outgrown = (held > 0) & (held * self._block_size < num_tokens)
        if outgrown.any():
            raise InvariantError(f"slots {slots[outgrown]} have outgrown what they reserved")
        if not super().reserve(slots, num_tokens):
            return False
        has_begun = (held == 0) & (self._num_blocks[slots] > 0)
        begun = slots[has_begun]
        self._wanted_tokens[begun] = np.maximum(self._expected_tokens[begun], num_tokens[has_begun])
        return True

    def waste(self, written_tokens: int, final_tokens: IntArray) -> Waste:
        """What is reserved and not written, by kind: the bars of Fig. 2.

        Args:
            written_tokens: of all sequences.
            final_tokens: [max_seqs + 1], for each slot what its sequence will have when it ends; of
                slots that have reserved nothing it does not matter.
        """
        token_bytes = self.layout.token_bytes
        wanted_tokens = int(self._wanted_tokens.sum())
        all_final_tokens = int(final_tokens[self._num_blocks > 0].sum())
        return Waste(
            future_bytes=(all_final_tokens - written_tokens) * token_bytes,
            internal_bytes=(wanted_tokens - all_final_tokens) * token_bytes,
            external_bytes=self._mapped_bytes - wanted_tokens * token_bytes,
        )

    @property
    def free_blocks(self) -> int:
        """Blocks of the arena in no region."""
        return self._buddies.free_units

    def check(self) -> None:
        """Verify the placement of the regions (`BuddyAllocator.check`)."""
        self._buddies.check()

    def _leave(self, slot: int) -> None:
        self._wanted_tokens[slot] = 0
        super()._leave(slot)

    def _place(self, slot: int, num_tokens: int) -> range | None:
        """As many blocks as are expected, or needed if too little was said."""
        wanted = max(int(self._expected_tokens[slot]), num_tokens)
        return self._buddies.allocate(self._blocks_for(wanted))

    def _unplace(self, blocks: range) -> None:
        self._buddies.release(blocks.start)
