"""KV in contiguous regions that are reserved whole when a sequence begins: three baselines.

Servers before PagedAttention keep a sequence's KV in one stretch, and so set aside room for all
that it may ever have (sections 3.1 and 6.1). How much that is, is the policy:

- "max": the longest sequence there may be (Orca (Max), FasterTransformer);
- "pow2": the prompt, and the output's length rounded up to a power of two (Orca (Pow2));
- "oracle": its true final length, known in a replay only (Orca (Oracle)).

In an engine the final length is taken to be the prompt and `max_tokens`, so there "oracle" is what
a server does that believes its clients.

A buddy allocator places the regions (`aquifer.cache.contiguous`), in blocks of `block_size` tokens,
so a region is a power of two of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from aquifer.cache.base import KVLayout, StateLayout
from aquifer.cache.contiguous import ContiguousCache
from aquifer.cache.footprint import Count, Footprint
from aquifer.errors import ConfigError
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
        largest = BuddyAllocator.rounded(-(-max_tokens // block_size))
        num_blocks = max(min(pool.free_bytes // block_bytes, max_seqs * largest), 1)
        footprint = RegionFootprint(
            layout.token_bytes,
            block_bytes,
            pool.page_bytes,
            shares=False,
            least_tokens=max_tokens if policy == "max" else 0,
        )
        super().__init__(
            pool, owner, layout, max_seqs, max_tokens, block_size, num_blocks, footprint
        )
        self._policy: Policy = policy
        self._buddies = BuddyAllocator(num_blocks)

    def expect(
        self, slot: int, num_prompt: int, num_total: int, forecast: Forecast | None = None
    ) -> None:
        """Reserve as the policy says."""
        self._expected_tokens[slot] = tokens_to_reserve(
            self._policy, num_prompt, num_total, self._max_tokens
        )

    @property
    def free_blocks(self) -> int:
        """Blocks of the arena in no region."""
        return self._buddies.free_units

    def check(self) -> None:
        """Verify the placement of the regions (`BuddyAllocator.check`)."""
        self._buddies.check()

    def _place(self, slot: int, num_tokens: int) -> range | None:
        """The smallest power of two of blocks."""
        return self._buddies.allocate(self._blocks_for(num_tokens))

    def _vacate(self, region: range) -> None:
        """Give it back to the buddies."""
        self._buddies.release(region.start)
