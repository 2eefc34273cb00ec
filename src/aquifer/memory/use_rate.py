"""The rate at which a tenant is used, learnt from its own uses: Gamma-Poisson with forgetting.

Uses are taken to come at random moments (a Poisson process) at a rate that is unknown and changes.
Before anything is seen, rates follow a gamma distribution of shape `prior_uses` and rate `prior_s`.
After n uses in t seconds it is a gamma distribution of shape `prior_uses + n` and rate
`prior_s + t`. So that the rate may change, what was seen is forgotten: a use, and a second, counts
the less the longer ago it was, by exp(-age / memory_s).

The tenant is needed again within the horizon with the probability that such a process has a use in
it:

    p = 1 - ((prior_s + t) / (prior_s + t + horizon_s)) ** (prior_uses + n)

p falls with each second without a use. It is nearly 1 for all that is used several times within
the horizon, be it three times or thirty; `expected_uses` tells these apart.

Retained prefixes have another model (`ReuseModel` of
`aquifer.memory.reclaim`): each is used too seldom to learn from its own uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HORIZON_S = 60.0
"""How far ahead a use counts: that of `ReuseModel`, so that both can be compared."""


_MOST_USES = 5.0


def expected_uses(probability: float) -> float:
    """Uses expected within the horizon of what is needed in it with this probability: -ln(1 - p).

    That is so if uses come at random moments. It is p where that is small. It is bounded, so that
    what is needed for certain can be compared too.
    """
    return min(-math.log1p(-probability), _MOST_USES) if probability < 1 else _MOST_USES


@dataclass(frozen=True, slots=True)
class UsePrior:
    """What is assumed before anything is seen, and how fast what was seen is forgotten.

    Args:
        prior_uses: shape of the distribution of rates, in uses.
        prior_s: rate of that distribution; `prior_uses / prior_s` is the mean rate.
        memory_s: time after which a use counts 1/e.
    """

    prior_uses: float = 0.5
    prior_s: float = 120.0
    memory_s: float = 300.0


class UseRate:
    """The uses of one tenant so far.

    Args:
        now_s: the time, on the clock of all later calls.
        prior: what is assumed.

    Attributes:
        last_use_s: when it was used last, or `now_s` before.
    """

    def __init__(self, now_s: float, prior: UsePrior | None = None) -> None:
        self.last_use_s = now_s
        self._prior = prior or UsePrior()
        self._begun_s = now_s
        self._num_uses = 0.0  # as they counted at the last use

    def use(self, now_s: float) -> None:
        """Note a use."""
        self._num_uses = self._uses_at(now_s) + 1
        self.last_use_s = now_s

    def probability(self, now_s: float, horizon_s: float = HORIZON_S) -> float:
        """p(needed again within the horizon), in (0, 1)."""
        prior = self._prior
        seen_s = -prior.memory_s * math.expm1(-max(now_s - self._begun_s, 0.0) / prior.memory_s)
        shape = prior.prior_uses + self._uses_at(now_s)
        return -math.expm1(-shape * math.log1p(horizon_s / (prior.prior_s + seen_s)))

    def _uses_at(self, now_s: float) -> float:
        """The uses so far, each for what it counts now."""
        age_s = max(now_s - self.last_use_s, 0.0)
        return self._num_uses * math.exp(-age_s / self._prior.memory_s)
