"""Expected memory of running sequences, against draws of their lengths."""

from __future__ import annotations

import numpy as np
import pytest

from aquifer.cache.footprint import Footprint
from aquifer.engine.forecasts import HORIZONS, Change, SlotForecasts
from aquifer.predict.lengths import EDGES, NUM_BINS, Forecast, bin_of

FOOTPRINT = Footprint(token_bytes=64, block_bytes=16 * 64, page_bytes=16 * 64)
LIMIT = 1 << 14


def forecast_of(mean: float, spread: float) -> Forecast:
    return Forecast.of(
        np.exp(-0.5 * ((np.arange(NUM_BINS) - int(bin_of(int(mean)))) / spread) ** 2)
    )


def draw(forecast: Forecast, count: int, random: np.random.Generator) -> np.ndarray:
    """Lengths by a forecast."""
    bins = random.choice(NUM_BINS, count, p=forecast.masses)
    return np.ceil(EDGES[bins] + random.random(count) * np.diff(EDGES)[bins]).astype(int)


def test_survival_is_the_share_of_outputs_that_go_on() -> None:
    random = np.random.default_rng(0)
    forecast = forecast_of(200, 4)
    forecasts = SlotForecasts(2)
    forecasts.set(1, forecast)
    lengths = draw(forecast, 200_000, random)
    for num_outputs in (0, 50, 300):
        alive = lengths[lengths > num_outputs]
        more = np.array([1, 10, 100, 1000])
        expected = [(alive > num_outputs + tokens).mean() for tokens in more]
        found = forecasts.survival(np.array([1]), np.array([num_outputs]), more)[0]
        np.testing.assert_allclose(found, expected, atol=0.02)


def test_an_output_that_outlives_its_forecast_goes_on_as_long_again() -> None:
    forecasts = SlotForecasts(2)
    forecasts.set(1, forecast_of(10, 0.5))
    found = forecasts.survival(np.array([1]), np.array([1000]), np.array([1000, 3000]))[0]
    np.testing.assert_allclose(found, [0.5, 0.25], atol=0.01)


def test_a_known_length_is_exact() -> None:
    forecasts = SlotForecasts(2)
    forecasts.set(1, Forecast.certain(100))
    found = forecasts.survival(np.array([1]), np.array([90]), np.array([9, 10, 11]))[0]
    assert found.tolist() == [1, 0, 0]


def test_expected_tokens_left() -> None:
    random = np.random.default_rng(1)
    forecast = forecast_of(300, 3)
    forecasts = SlotForecasts(2)
    forecasts.set(1, forecast)
    lengths = draw(forecast, 200_000, random)
    for num_outputs in (0, 100, 400):
        expected = (lengths[lengths > num_outputs] - num_outputs).mean()
        (found,) = forecasts.expected_left(np.array([1]), np.array([num_outputs]))
        assert found == pytest.approx(expected, rel=0.1)


def test_change_is_the_mean_over_draws_and_its_deviation() -> None:
    random = np.random.default_rng(2)
    num_seqs, num_draws = 40, 4000
    forecasts = SlotForecasts(num_seqs + 1)
    slots = np.arange(1, num_seqs + 1)
    prompts = random.integers(10, 500, num_seqs)
    outputs = random.integers(0, 100, num_seqs)
    now = np.asarray(FOOTPRINT.pages(prompts + outputs)).sum()
    pages = np.zeros((num_draws, len(HORIZONS)))
    for slot in slots.tolist():
        forecast = forecast_of(float(random.integers(50, 400)), 3)
        forecasts.set(slot, forecast)
        begun = outputs[slot - 1]
        lengths = draw(forecast, 40 * num_draws, random)
        lengths = lengths[lengths > begun][:num_draws]
        assert len(lengths) == num_draws
        tokens = prompts[slot - 1] + begun + HORIZONS
        goes_on = begun + HORIZONS < lengths[:, None]
        pages += np.asarray(FOOTPRINT.pages(tokens)) * goes_on
    change = forecasts.change(
        FOOTPRINT, slots, prompts + outputs, prompts, np.full(num_seqs, LIMIT)
    )
    np.testing.assert_allclose(change.mean, pages.mean(0) - now, atol=0.02 * now)
    np.testing.assert_allclose(np.sqrt(change.variance), pages.std(0), rtol=0.1, atol=3)
    assert change.peak(0) == np.ceil(change.mean.max())
    assert change.peak(2) > change.peak(0)


def test_change_is_computed_anew_as_sequences_grow() -> None:
    forecasts = SlotForecasts(2)
    forecasts.set(1, Forecast.certain(100))
    slots, prompt, most = np.array([1]), np.array([50]), np.array([LIMIT])
    peaks = [
        forecasts.change(FOOTPRINT, slots, prompt + outputs, prompt, most).peak(0)
        for outputs in (0, 40, 80)
    ]
    assert peaks == [5, 4, 1]


def test_sequences_without_forecasts_do_not_count() -> None:
    forecasts = SlotForecasts(3)
    forecasts.set(1, None)
    forecasts.set(2, Forecast.certain(1000))
    args = (np.array([10, 10]), np.array([5, 5]), np.full(2, LIMIT))
    both = forecasts.change(FOOTPRINT, np.array([1, 2]), *args)
    alone = forecasts.change(FOOTPRINT, np.array([2]), *(each[1:] for each in args))
    np.testing.assert_array_equal(both.mean, alone.mean)
    none = forecasts.change(FOOTPRINT, np.array([1]), *(each[:1] for each in args))
    assert (none + Change.none()).peak(3) == 0


def test_no_sequence_grows_beyond_its_limit() -> None:
    forecasts = SlotForecasts(2)
    forecasts.set(1, Forecast.certain(5000))
    change = forecasts.change(
        FOOTPRINT, np.array([1]), np.array([64]), np.array([60]), np.array([128])
    )
    assert change.peak(0) == 4
