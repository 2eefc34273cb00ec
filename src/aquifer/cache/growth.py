"""Which growing sequences to map pages for in a step, so that no step has to map for many."""

from __future__ import annotations

import numpy as np

from aquifer.cache.base import IntArray

AHEAD_TOKENS = 16
"""Tokens to map for beyond what is requested, where the pool has room. Mapping costs by the call,
so a sequence of tokens larger than a page grows by several tokens at a time. The waste is that of a
usual block of PagedAttention."""

_SPREAD_SEQS = 24
"""Sequences to map for in one call, as long as no others need a page now. Sequences that started
together need their next page in the same step: for 256 of them, at 27 us a page on an H200, that is
a stall of 7 ms. Spread evenly, 16 of them need a page in each step where a page holds 16 tokens;
the limit is half as many again, for sequences that come in clusters."""


class GrowthTurns:
    """Chooses the sequences that get their next pages now.

    Args:
        max_seqs: most sequences to choose among.
    """

    def __init__(self, max_seqs: int) -> None:
        # Ranks from 1 on, less what the next call will map for.
        self._ranks = np.arange(1, max_seqs + 1) - _SPREAD_SEQS

    def choose(self, left: IntArray) -> IntArray:
        """Indices of the sequences to map for in this call: those that are short, or will be soon.

        A sequence with a negative `left` is short now. One with `left` tokens can wait for
        `left + 1` calls, if each adds a token. Each of these calls maps for _SPREAD_SEQS sequences.
        So no call has to map for more, as long as

            rank <= _SPREAD_SEQS * (left + 1)

        holds for each sequence that is not short, ranked from 1 in order of `left`. Where it does
        not hold, the largest difference is the number of sequences to map for ahead of need. All
        sequences count whose pages have no room for AHEAD_TOKENS - 1 more tokens, also those that
        will end before they need another page; nothing is mapped for the latter.

        Args:
            left: [num_seqs], tokens that fit on the mapped pages beyond those asked for.
        """
        soon = left[left < AHEAD_TOKENS - 1]
        if len(soon) > _SPREAD_SEQS:
            soon.sort()
            num_short = int(soon.searchsorted(0))
            waiting = soon[num_short:]
            if len(waiting) > _SPREAD_SEQS:
                surplus = (self._ranks[: len(waiting)] - _SPREAD_SEQS * waiting).max()
                num_ahead = min(int(surplus), _SPREAD_SEQS - num_short)
                if num_ahead > 0:
                    # Pages are handed out in the order of the call.
                    return np.sort(np.argsort(left, kind="stable")[: num_short + num_ahead])
        return (left < 0).nonzero()[0]
