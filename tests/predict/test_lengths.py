"""Forecasts of lengths: bins, quantiles, bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquifer.predict.lengths import EDGES, NUM_BINS, Forecast, bin_of

lengths = st.integers(1, 1 << 20)
weights = st.lists(st.floats(0, 1), min_size=NUM_BINS, max_size=NUM_BINS).filter(
    lambda values: sum(values) > 1e-3
)


@given(lengths)
def test_a_length_lies_in_its_bin(length: int) -> None:
    number = int(bin_of(length))
    assert EDGES[number] < length <= EDGES[number + 1]


def test_longer_lengths_are_in_the_last_bin() -> None:
    assert bin_of(1 << 30) == NUM_BINS - 1


@given(weights, st.floats(0.01, 1.0))
def test_a_quantile_is_the_least_length_that_is_not_exceeded(
    values: list[float], share: float
) -> None:
    forecast = Forecast.of(values)
    length = forecast.quantile(share)
    assert forecast.cumulative(length) >= share - 1e-9
    if length > 1:
        assert forecast.cumulative(length - 1) < share + 1e-9


@given(lengths)
def test_a_certain_length_is_exact(length: int) -> None:
    forecast = Forecast.certain(length)
    assert forecast.quantile(0.01) == forecast.quantile(1.0) == forecast.mean == length
    assert forecast.cumulative([length - 1, length, length + 1]).tolist() == [0, 1, 1]
    assert forecast.uncertainty == 0


@given(weights, lengths)
def test_a_limit_cuts_the_tail(values: list[float], most: int) -> None:
    forecast = Forecast.of(values)
    limited = forecast.limited(most)
    assert limited.masses.sum() == pytest.approx(1)
    assert limited.cumulative(EDGES[int(bin_of(most)) + 1]) == pytest.approx(1)
    below = EDGES[: int(bin_of(most)) + 1]
    np.testing.assert_allclose(limited.cumulative(below), forecast.cumulative(below))


def test_uncertainty_is_the_entropy_of_the_bins() -> None:
    assert Forecast.of(np.ones(NUM_BINS)).uncertainty == pytest.approx(1)
    one = np.zeros(NUM_BINS)
    one[3] = 1
    assert Forecast.of(one).uncertainty == 0
