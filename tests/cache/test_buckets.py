"""Buckets: bounds that follow the lengths, and regions of which none is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aquifer.cache.buckets import BucketBounds, BucketPool, Router
from aquifer.errors import InvariantError
from aquifer.predict.lengths import NUM_BINS, Forecast

LONGEST = 4096


def bounds_of(lengths: np.ndarray, **options: bool) -> BucketBounds:
    bounds = BucketBounds(LONGEST, 16, **options)
    for length in lengths.tolist():
        bounds.observe(length)
    return bounds


def lengths(mean: float, count: int = 1000, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(mean), 0.5, count)
    return np.clip(drawn, 1, LONGEST).astype(int)


def test_bounds_are_quantiles_rounded_up() -> None:
    seen = lengths(300)
    bounds = bounds_of(seen).bounds
    assert bounds[-1] == LONGEST
    assert all(bound % 16 == 0 for bound in bounds)
    quantiles = np.quantile(seen, np.arange(1, 9) / 8)
    for bound, quantile in zip(bounds[:7], quantiles, strict=False):
        assert quantile <= bound < quantile + 128 + 16
    # So each bucket has about as many sequences.
    buckets = np.searchsorted(bounds, seen)
    assert np.bincount(buckets, minlength=len(bounds))[:7].min() > 80


def test_bounds_follow_a_shift_within_a_window() -> None:
    bounds = bounds_of(lengths(100))
    assert bounds.bounds[3] < 130
    for length in lengths(1500, seed=1).tolist():
        bounds.observe(length)
    assert bounds.bounds == bounds_of(lengths(1500, seed=1)).bounds
    assert bounds.bounds[0] > 500


def test_static_bounds_stay() -> None:
    assert bounds_of(lengths(100), is_static=True).bounds == [512 * n for n in range(1, 9)]


def forecast_at(length: int) -> Forecast:
    return Forecast.certain(length)


def test_the_smallest_bucket_that_holds_the_estimate() -> None:
    bounds = bounds_of(lengths(300))
    router = Router(bounds, threshold=0.9, inflation=0.5)
    for prompt, output in ((10, 100), (200, 300), (1000, 2000)):
        tokens = router.tokens(prompt, LONGEST, forecast_at(output))
        assert tokens == min(b for b in bounds.bounds if b >= prompt + output)
    assert router.tokens(10, 64, forecast_at(20)) == min(64, bounds.bound(30))
    assert router.tokens(100, 150, forecast_at(60)) == 150  # it may have no more


def test_doubt_gets_the_large_bucket() -> None:
    bounds = bounds_of(lengths(300))
    wide = Forecast.of(np.ones(NUM_BINS))
    assert Router(bounds, 0.9, 0.1).tokens(10, 2000, wide) == 2000
    assert Router(bounds, 0.9, 0.1).tokens(10, 2000, None) == 2000
    narrow = forecast_at(100)
    spread = Forecast.of(np.exp(-0.5 * ((np.arange(NUM_BINS) - 24) / 4) ** 2))
    tight, raised = (Router(bounds, 0.9, alpha).tokens(10, 2000, spread) for alpha in (0.0, 3.0))
    assert tight < raised
    assert Router(bounds, 0.9, 0.0).tokens(10, 2000, narrow) == Router(bounds, 0.9, 9.0).tokens(
        10, 2000, narrow
    )


# --- regions ----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.data())
def test_no_region_is_lost_or_given_twice(data: st.DataObject) -> None:
    largest = data.draw(st.integers(4, 20))
    pool = BucketPool(data.draw(st.integers(largest, 100)), largest)
    taken: list[range] = []
    for _ in range(40):
        if taken and data.draw(st.booleans()):
            pool.give(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        else:
            size = data.draw(st.integers(1, largest))
            region = pool.take(size, may_have_reserve=size == largest)
            if region is not None:
                assert len(region) == size
                taken.append(region)
        pool.check()
        units = [unit for region in taken for unit in region]
        assert len(set(units)) == len(units) == pool.used_units
        assert all(0 <= unit < pool.num_units for unit in units)
    for region in taken:
        pool.give(region)
    pool.check()
    assert pool.is_empty
    assert pool.take(largest, may_have_reserve=True) is not None


def test_the_large_bucket_has_a_region_when_all_else_is_taken() -> None:
    pool = BucketPool(20, 6)
    while pool.take(2) is not None:
        pass
    large = pool.take(6, may_have_reserve=True)
    assert large is not None
    assert pool.take(6, may_have_reserve=True) is None
    pool.give(large)
    pool.check()
    assert pool.take(2) is None  # it is kept again
    assert pool.take(6, may_have_reserve=True) is not None


def test_free_regions_of_other_sizes_are_joined() -> None:
    pool = BucketPool(12, 12)
    regions = [pool.take(3) for _ in range(4)]
    for region in regions:
        assert region is not None
        pool.give(region)
    assert pool.take(12) == range(12)


def test_a_region_is_given_back_once() -> None:
    pool = BucketPool(12, 4)
    region = pool.take(4)
    assert region is not None
    pool.give(region)
    with pytest.raises(InvariantError, match="no region"):
        pool.give(region)
