"""The probability that a tenant is needed again, from its own uses."""

from __future__ import annotations

import math
from random import Random

import pytest

from aquifer.memory.use_rate import UsePrior, UseRate


def test_before_anything_is_seen_it_is_the_prior():
    rate = UseRate(50.0, UsePrior(prior_uses=0.5, prior_s=120.0))
    assert rate.probability(50.0, 60.0) == pytest.approx(1 - (120 / 180) ** 0.5)


def test_it_falls_without_uses_and_rises_with_each():
    rate = UseRate(0.0)
    times = [0.0, 10.0, 100.0, 1000.0, 10_000.0]
    without = [rate.probability(time) for time in times]
    assert without == sorted(without, reverse=True)
    rate.use(10_000.0)
    once = rate.probability(10_000.0)
    assert once > without[-1]
    rate.use(10_000.0)
    assert rate.probability(10_000.0) > once
    after = [rate.probability(10_000.0 + time) for time in times]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize("uses_per_s", [0.01, 0.1, 1.0])
def test_it_learns_the_rate_of_a_poisson_process(uses_per_s: float):
    """With a long memory, p is that of the process."""
    rate = UseRate(0.0, UsePrior(memory_s=1e5))
    random, now_s = Random(1), 0.0
    while now_s < 5e4:
        now_s += random.expovariate(uses_per_s)
        rate.use(now_s)
    horizon_s = 1 / uses_per_s
    assert rate.probability(now_s, horizon_s) == pytest.approx(1 - math.exp(-1), rel=0.06)


def test_what_was_long_ago_is_forgotten():
    """A model that was busy yesterday is as one that never was."""
    busy, never = UseRate(0.0), UseRate(0.0)
    for second in range(1000):
        busy.use(float(second))
    assert busy.probability(1000.0) > 0.9 > 10 * never.probability(1000.0)
    assert busy.probability(86_400.0) == pytest.approx(never.probability(86_400.0))
