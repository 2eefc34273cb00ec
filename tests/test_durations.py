"""Durations as text."""

from __future__ import annotations

import math

import pytest

from aquifer.durations import parse_duration
from aquifer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (2.5, 2.5),
        ("0", 0.0),
        ("90", 90.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        (" 1.5H ", 5400.0),
        ("250ms", 0.25),
        ("2d", 172_800.0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (math.inf, math.inf),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5x", "5m x", "1h 30m", "--1", "nan", math.nan, "1e3"])
def test_what_is_no_duration(text: str | float) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration(text)
