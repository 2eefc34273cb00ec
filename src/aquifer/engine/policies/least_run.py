"""How long a model runs at least, before it gives its memory to one that waits to be loaded."""

from __future__ import annotations

_LEAST_RUN_S = 0.5
_RUN_BY_LOAD = 4.0
"""A model runs for at least this many times as long as it takes to load the one that waits, with
all copies of KV: so at most a fifth of the time is lost by models that take turns."""


def least_run_s(load_s: float) -> float:
    """Seconds that a model runs at least before it gives way to one that takes `load_s` to load."""
    return max(_LEAST_RUN_S, _RUN_BY_LOAD * load_s)
