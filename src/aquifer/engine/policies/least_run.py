"""How long a model runs before it gives its memory to one that waits to be loaded."""

from __future__ import annotations

_LEAST_RUN_S = 0.5
_RUN_BY_LOAD = 4.0
"""A model runs for at least this many times as long as it takes to load the one that waits, with
all copies of KV: so at most a fifth of the time is lost by models that take turns."""
_LONG_BY_LEAST = 4.0


def least_run_s(load_s: float) -> float:
    """Seconds that a model runs at least before it gives way to one that takes `load_s` to load."""
    return max(_LEAST_RUN_S, _RUN_BY_LOAD * load_s)


def short_run_s(load_s: float) -> float:
    """The same where requests of the one that waits have had no token, and all of the one that runs
    have: a model still runs for as long as the change takes."""
    return max(_LEAST_RUN_S, load_s)


def long_run_s(load_s: float) -> float:
    """The same where all requests of the one that waits have had their first token."""
    return _LONG_BY_LEAST * least_run_s(load_s)
