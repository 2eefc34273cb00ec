"""Prefill cost model fitted to observed steps; it prices the recomputation of KV."""

from __future__ import annotations

import math

_FIRST_GUESS = 10_000.0
"""Prefill tokens per second assumed before the first observation; only ratios matter then."""

_MIN_TOKENS = 128
"""Steps of fewer prompt tokens are ignored: they say little about prefill speed."""

_WEIGHT = 0.2
"""EMA weight of the latest step."""


class PrefillCost:
    """Prefill speed of a model: an EMA over the steps that it ran.

    The cost of a token is that of its matrix products, equal for all tokens, and that of its
    attention, proportional to its position: together `1 + position / even_tokens`.

    Args:
        even_tokens: the position at which attention takes as many operations as all products.
    """

    def __init__(self, even_tokens: float = math.inf) -> None:
        self._even_tokens = even_tokens
        self._tokens_per_s = _FIRST_GUESS  # at position 0
        self._is_measured = False

    def observe(self, first_token: float, num_tokens: int, seconds: float) -> None:
        """Update the EMA with a step that did little else than prefill these tokens."""
        if num_tokens < _MIN_TOKENS or seconds <= 0:
            return
        rate = self._work(first_token, num_tokens) / seconds
        weight = _WEIGHT if self._is_measured else 1.0
        self._tokens_per_s += weight * (rate - self._tokens_per_s)
        self._is_measured = True

    def seconds(self, first_token: float, num_tokens: float) -> float:
        """Predict the prefill time of [first_token, first_token + num_tokens) of a sequence."""
        return self._work(first_token, num_tokens) / self._tokens_per_s

    def _work(self, first_token: float, num_tokens: float) -> float:
        """The cost of these tokens in units of one token at position 0."""
        return num_tokens * (1 + (first_token + num_tokens / 2) / self._even_tokens)
