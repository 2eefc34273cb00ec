"""Forecasts by recent lengths, and how far a predictor is believed."""

import numpy as np
import pytest

from aquifer.predict.calibration import Calibration
from aquifer.predict.lengths import NUM_BINS, Forecast, bin_of
from aquifer.predict.prior import RecentLengths


def of_lengths(lengths: list[int], classes: tuple[int, ...] = ()) -> RecentLengths:
    recent = RecentLengths()
    for length in lengths:
        recent.observe(classes, length)
    return recent


def test_there_is_no_forecast_of_few_lengths() -> None:
    assert of_lengths([5] * 19).forecast(()) is None
    assert of_lengths([5] * 20).forecast(()) is not None


def test_the_forecast_follows_the_lengths() -> None:
    random = np.random.default_rng(0)
    lengths = np.ceil(random.lognormal(5, 0.8, 1000)).astype(int).tolist()
    forecast = of_lengths(lengths).forecast(())
    assert forecast is not None
    for share in (0.1, 0.5, 0.9):
        assert forecast.quantile(share) == pytest.approx(np.quantile(lengths, share), rel=0.2)
    assert forecast.mean == pytest.approx(np.mean(lengths), rel=0.15)


def test_a_class_moves_the_forecast_by_what_it_has_seen() -> None:
    recent = of_lengths([100] * 200, (1,))
    unknown = recent.forecast((2,))
    assert unknown is not None
    assert unknown.quantile(0.5) <= 100
    for _ in range(5):
        recent.observe((2,), 1000)
    few = recent.forecast((2,))
    for _ in range(300):
        recent.observe((2,), 1000)
    many = recent.forecast((2,))
    assert few is not None
    assert many is not None
    assert unknown.cumulative(500) > few.cumulative(500) > 0.5
    assert many.cumulative(500) < 0.1
    other = recent.forecast((1,))
    assert other is not None
    assert other.cumulative(500) > 0.9


def test_old_lengths_are_forgotten() -> None:
    recent = of_lengths([1000] * 1000)
    for _ in range(1000):
        recent.observe((), 10)
    forecast = recent.forecast(())
    assert forecast is not None
    assert forecast.quantile(0.95) < 20


def test_a_thousand_classes_too_many_are_forgotten() -> None:
    recent = RecentLengths()
    for number in range(5000):
        recent.observe((number,), 10 + number % 7)
    forecast = recent.forecast((0,))
    assert forecast is not None
    np.testing.assert_array_equal(forecast.masses, recent.forecast((-1,)).masses)  # type: ignore[union-attr]


# --- calibration ------------------------------------------------------------------------------


def around(length: float) -> Forecast:
    """A sure forecast."""
    bins = np.arange(NUM_BINS)
    return Forecast.of(np.exp(-0.5 * ((bins - int(bin_of(max(int(length), 1)))) / 1.5) ** 2))


def log_likelihood(calibration: Calibration, pairs: list[tuple[Forecast, int]]) -> float:
    prior = of_lengths([length for _, length in pairs]).forecast(())
    assert prior is not None
    logs = []
    for number, (predicted, length) in enumerate(pairs):
        if number >= len(pairs) // 2:
            combined = calibration.combine(predicted, prior)
            logs.append(np.log(combined.masses[bin_of(length)] / prior.masses[bin_of(length)]))
        calibration.observe(predicted, prior, length)
    return float(np.mean(logs))


def lengths() -> list[int]:
    drawn = np.random.default_rng(1).lognormal(5, 1, 400)
    return np.ceil(drawn).astype(int).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_a_predictor_that_knows_is_believed_also_where_it_is_off(factor: float) -> None:
    calibration = Calibration()
    random = np.random.default_rng(2)
    pairs = [(around(factor * length * random.lognormal(0, 0.2)), length) for length in lengths()]
    gain = log_likelihood(calibration, pairs)
    assert gain > 0.5
    assert calibration.weight > 0.99


@pytest.mark.parametrize("says", ["random", "short", "long"])
def test_a_wrong_predictor_does_no_harm(says: str) -> None:
    calibration = Calibration()
    random = np.random.default_rng(3)
    said = {"short": 1.0, "long": 1e5}
    pairs = [(around(said.get(says, random.lognormal(5, 1))), length) for length in lengths()]
    assert log_likelihood(calibration, pairs) > -0.05


def test_a_forecast_that_is_too_wide_is_sharpened() -> None:
    calibration = Calibration()
    wide = Forecast.of(np.exp(-0.5 * ((np.arange(NUM_BINS) - int(bin_of(150))) / 12) ** 2))
    prior = Forecast.of(np.ones(NUM_BINS))
    random = np.random.default_rng(4)
    for _ in range(400):
        calibration.observe(wide, prior, int(random.integers(120, 180)))
    combined = calibration.combine(wide, prior)
    assert combined.cumulative(200) - combined.cumulative(100) > 0.7
    assert wide.cumulative(200) - wide.cumulative(100) < 0.25
