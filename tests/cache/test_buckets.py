"""Buckets: bounds that follow lengths, routing of forecasts, and pieces that tile the arena."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aquifer.cache.buckets import (
    BucketBounds,
    BucketPool,
    Granularity,
    Routing,
    Rule,
    least_waste,
)
from aquifer.errors import ConfigError, InvariantError
from aquifer.predict.lengths import NUM_BINS, Forecast, bin_of

SIZES = Granularity(16, 128, 4096)


def spread(mean_log: float, sigma: float) -> Forecast:
    """The forecast of a log-normal length."""
    lengths = np.random.default_rng(0).lognormal(mean_log, sigma, 20_000)
    bins = bin_of(np.maximum(lengths.astype(np.int64), 1))
    return Forecast.of(np.bincount(bins, minlength=NUM_BINS))


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "size"),
    [(0, 0), (1, 16), (16, 16), (17, 32), (128, 128), (129, 256), (4000, 4096), (4100, 4100)],
)
def test_sizes_are_multiples(num_tokens: int, size: int) -> None:
    assert SIZES.align(num_tokens) == size


def test_the_largest_size_may_be_any() -> None:
    sizes = Granularity(16, 128, 1000)
    assert [sizes.align(number) for number in (896, 897, 1000)] == [896, 1000, 1000]


def test_sizes_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError, match="16 and 100 tokens do not fit together"):
        Granularity(16, 100, 1000)


# --- bounds ----------------------------------------------------------------------------------


def test_bounds_before_lengths() -> None:
    assert BucketBounds(SIZES, 5).bounds == (256, 512, 1024, 2048, 4096)
    assert BucketBounds(SIZES, 4, widths="equal").bounds == (1024, 2048, 3072, 4096)
    assert BucketBounds(Granularity(16, 128, 40), 8).bounds == (16, 32, 40)  # equal ones merged


def test_bounds_are_quantiles() -> None:
    sizes = Granularity(4, 2048, 4096)
    bounds = BucketBounds(sizes, 5, window=1000, every=100, rule="equal shares")
    lengths = np.random.default_rng(0).lognormal(5.5, 0.7, 1300).astype(np.int64) + 1
    before = bounds.bounds
    for number, length in enumerate(lengths.tolist(), start=1):
        bounds.observe(length)
        if number < 100:
            assert bounds.bounds == before
    window = lengths[-1000:]
    levels = 0.99 * np.array([0.25, 0.5, 0.75, 1.0])
    found = np.quantile(window, levels, method="higher")
    expected = [sizes.align(int(each)) for each in found]
    assert bounds.bounds == (*expected, 4096)
    # Each regular bucket has about as many of these lengths as any other.
    edges = np.array([0, *bounds.bounds])
    counts = np.diff(np.searchsorted(np.sort(window), edges, side="right"))
    assert (abs(counts[:4] - 247) < 20).all()
    assert counts[4] <= 10


def test_bounds_follow_a_shift_within_a_window() -> None:
    bounds = BucketBounds(SIZES, 4, window=200, every=20, rule="equal shares")
    for _ in range(400):
        bounds.observe(100)
    assert bounds.bounds == (112, 4096)
    for number in range(200):
        bounds.observe(900)
        assert max(bounds.bounds[:-1]) == (112 if number < 19 else 1024)
    assert bounds.bounds == (1024, 4096), "nothing of the old lengths is left"


def test_static_bounds_stay() -> None:
    bounds = BucketBounds(SIZES, 4, widths="equal", is_static=True)
    for _ in range(1000):
        bounds.observe(10)
    assert bounds.bounds == (1024, 2048, 3072, 4096)


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(st.lists(st.integers(1, 4096), min_size=10, max_size=60), st.integers(2, 10))
def test_bounds_are_ascending_and_aligned(lengths: list[int], num_buckets: int) -> None:
    bounds = BucketBounds(SIZES, num_buckets, window=20, every=10, rule="equal shares")
    for length in lengths:
        bounds.observe(length)
        found = bounds.bounds
        assert list(found) == sorted(set(found))
        assert len(found) <= num_buckets
        assert found[-1] == 4096
        assert all(bound == SIZES.align(bound) for bound in found)
        for total in (1, 16, 500, 4096):
            bound = bounds.of(total)
            rest = [each for each in found[:-1] if each >= total]
            assert bound == min(rest, default=None)


def test_bounds_without_sense() -> None:
    with pytest.raises(ConfigError, match="at least 2 buckets"):
        BucketBounds(SIZES, 1)
    with pytest.raises(ConfigError, match="unknown widths 'odd'; choose equal, doubling"):
        BucketBounds(SIZES, 4, widths="odd")  # type: ignore[arg-type]


# --- routing ---------------------------------------------------------------------------------


def choose(
    forecast: Forecast | None, most_total: int = 4096, num_tokens: int = 0, **options: float | None
) -> int | None:
    bounds = BucketBounds(SIZES, 5)  # 256, 512, 1024, 2048, 4096
    return bounds.of(Routing(**options).total(100, forecast, most_total), num_tokens)  # type: ignore[arg-type]


def test_the_smallest_bucket_that_holds_prompt_and_output() -> None:
    assert choose(Forecast.certain(156)) == 256
    assert choose(Forecast.certain(157)) == 512
    assert choose(Forecast.certain(1948)) == 2048
    assert choose(Forecast.certain(1949)) is None, "the large bucket"
    assert choose(Forecast.certain(3000), most_total=240) == 256, "it is ended there"


def test_without_certainty_the_large_bucket() -> None:
    assert choose(None) is None
    uniform = Forecast.of(np.ones(NUM_BINS))
    assert choose(uniform) is None
    assert Routing(threshold=1.0).total(100, uniform, 1000) == 1000
    forecast = spread(4.0, 0.5)
    assert 0.5 < forecast.uncertainty < 0.65
    assert choose(forecast) == 256
    assert choose(forecast, threshold=0.5) is None


def test_the_estimate_is_inflated_by_uncertainty() -> None:
    forecast = spread(5.0, 0.5)
    uncertainty = forecast.limited(3996).uncertainty
    plain = Routing(inflation=0.0).total(100, forecast, 4096)
    assert plain == 100 + forecast.quantile(0.9)
    inflated = Routing(inflation=2.0).total(100, forecast, 4096)
    assert inflated == 100 + int(np.ceil(forecast.quantile(0.9) * (1 + 2 * uncertainty)))
    by_mean = Routing(inflation=0.0, level=None).total(100, forecast, 4096)
    assert by_mean == 100 + int(np.ceil(forecast.mean))
    assert by_mean < plain
    assert Routing(inflation=0.5).total(100, Forecast.certain(50), 4096) == 150, "nothing to hedge"


def test_a_forecast_that_was_too_short_is_not_used_again() -> None:
    forecast = Forecast.certain(50)
    assert choose(forecast, num_tokens=149) == 256
    assert choose(forecast, num_tokens=150) is None


def test_routing_without_sense() -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Routing(threshold=1.5)
    with pytest.raises(ConfigError, match="must be in"):
        Routing(level=0.0)


# --- pieces ----------------------------------------------------------------------------------


def test_a_piece_comes_from_its_list_before_space() -> None:
    pool = BucketPool(100)
    first, second = pool.take(10), pool.take(10)
    assert (first, second) == (range(10), range(10, 20))
    pool.give(0)
    assert pool.take(10) == range(10)
    pool.give(0)
    assert pool.take(5) == range(20, 25), "space comes before pieces of other sizes"
    pool.check()


def test_free_pieces_are_merged_when_space_is_short() -> None:
    pool = BucketPool(40)
    starts = [pool.take(10) for _ in range(4)]
    assert all(starts)
    for start in (10, 20):
        pool.give(start)
    pool.check()
    assert pool.take(21) is None
    assert pool.free_blocks == 20
    assert pool.take(20) == range(10, 30)
    pool.check()
    assert pool.occupancy == {(10, False): 2, (20, False): 1}


def test_an_empty_pool_is_one_space() -> None:
    pool = BucketPool(50, reserve_blocks=20)
    pool.check_empty()
    pieces = [pool.take(size, is_large=True) for size in (10, 8, 12, 10)]
    for piece in pieces:
        assert piece is not None
        with pytest.raises(InvariantError, match="in use"):
            pool.check_empty()
        pool.give(piece.start)
    pool.check_empty()
    assert pool.take(30) == range(30)


def test_the_reserve_is_for_the_large_bucket() -> None:
    pool = BucketPool(50, reserve_blocks=20)
    assert pool.take(20) == range(20)
    assert pool.take(20) is None
    large = pool.take(20, is_large=True)
    assert large == range(30, 50)
    assert pool.take(20, is_large=True) is None
    pool.check()
    pool.give(30)
    assert pool.take(11) is None
    assert pool.take(10, is_large=True) == range(20, 30), "elsewhere first"
    assert pool.take(10, is_large=True) == range(30, 40)
    assert pool.occupancy == {(20, False): 1, (10, True): 2}
    pool.check()


def test_a_piece_is_given_back_once() -> None:
    pool = BucketPool(20)
    pool.take(5)
    pool.give(0)
    with pytest.raises(InvariantError, match="no piece in use begins at block 0"):
        pool.give(0)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(
    st.integers(1, 120),
    st.integers(0, 40),
    st.lists(
        st.tuples(
            st.sampled_from(("take", "take", "large", "give", "rebound")), st.integers(0, 99)
        ),
        max_size=80,
    ),
)
def test_nothing_is_lost(num_blocks: int, reserve: int, operations: list[tuple[str, int]]) -> None:
    """Pieces of changing sizes come and go; they never overlap, and in the end all space is one."""
    reserve = min(reserve, num_blocks)
    pool = BucketPool(num_blocks, reserve)
    sizes = [4, 8, 16]
    used: dict[int, range] = {}
    for what, number in operations:
        if what == "rebound":
            sizes = [1 + number % 5, 6 + number % 7, 14 + number % 11]
        elif what == "give":
            if used:
                start = list(used)[number % len(used)]
                pool.give(start)
                del used[start]
        else:
            is_large = what == "large"
            size = sizes[-1] if is_large else sizes[number % 2]
            before = pool.free_blocks
            piece = pool.take(size, is_large=is_large)
            if piece is None:
                assert pool.free_blocks == before
            else:
                assert len(piece) == size
                taken = {block for each in used.values() for block in each}
                assert not taken & set(piece)
                assert piece.stop <= (num_blocks if is_large else num_blocks - reserve)
                used[piece.start] = piece
        pool.check()
        assert pool.free_blocks == num_blocks - sum(map(len, used.values()))
        assert pool.num_used == len(used)
    for start in used:
        pool.give(start)
    if num_blocks > reserve:
        assert pool.take(num_blocks - reserve) == range(num_blocks - reserve)
    pool.check()


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    candidates=st.lists(st.integers(1, 60), min_size=1, max_size=7, unique=True),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    num_bounds=st.integers(1, 5),
)
def test_no_other_bounds_waste_less(
    candidates: list[int], lengths: list[int], num_bounds: int
) -> None:
    candidates.sort()
    lengths = [min(length, candidates[-1]) for length in lengths]

    def given_to(bounds: tuple[int, ...]) -> int:
        return sum(min(bound for bound in bounds if bound >= length) for length in lengths)

    found = least_waste(np.array(lengths), np.array(candidates), num_bounds)
    assert len(found) <= num_bounds
    best = min(
        given_to((*others, candidates[-1]))
        for count in range(num_bounds)
        for others in combinations(candidates[:-1], count)
    )
    assert given_to(tuple(found)) == best


def test_bounds_by_waste_give_less_than_equal_shares() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6, 0.9, 1000), 1, 4000).astype(int).tolist()
    given = {}
    rules: tuple[Rule, ...] = ("least waste", "equal shares")
    for rule in rules:
        bounds = BucketBounds(Granularity(16, 128, 4096), 8, rule=rule)
        for length in lengths:
            bounds.observe(length)
        given[rule] = sum(bounds.of(length) or 4096 for length in lengths)
    assert given["least waste"] < 0.95 * given["equal shares"]
