"""Durations as text: "5m", "1h30m", "90"."""

from __future__ import annotations

import math
import re

from aquifer.errors import ConfigError

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(text: str | float) -> float:
    """Seconds from a number of seconds or a text like "5m", "1h30m" or "90"; infinite if negative.

    Raises:
        ConfigError: it is no duration.
    """
    seconds = _seconds(text)
    if seconds is None or math.isnan(seconds):
        raise ConfigError(
            f"{text!r} is not a duration; write seconds, or a text like 5m or 1h30m; -1 for any "
            "time"
        )
    return math.inf if seconds < 0 else seconds


def _seconds(text: str | float) -> float | None:
    if not isinstance(text, str):
        return float(text)
    rest = text.strip().lower()
    sign = -1 if rest.startswith("-") else 1
    rest = rest.removeprefix("-")
    if re.fullmatch(r"\d+(?:\.\d+)?", rest):
        return sign * float(rest)
    parts = _PART.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        return None
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in parts)
