"""What it takes to compute KV again, by what computing it took so far."""

from __future__ import annotations

import math

_FIRST_GUESS = 10_000.0
"""Tokens a second before any prompt was run. Only ratios matter until then."""

_MIN_TOKENS = 128
"""Steps of fewer prompt tokens say little about the speed of prompts."""

_WEIGHT = 0.2
"""Of the latest step in the running mean."""


class PrefillCost:
    """The speed at which a model computes prompts, from the steps that it ran.

    A token costs its products, which are the same for all, and its attention, in proportion to its
    position: `1 + position / even_tokens` in all.

    Args:
        even_tokens: the position at which attention takes as many operations as all products.
    """

    def __init__(self, even_tokens: float = math.inf) -> None:
        self._even_tokens = even_tokens
        self._tokens_per_s = _FIRST_GUESS  # at position 0
        self._is_measured = False

    def observe(self, first_token: float, num_tokens: int, seconds: float) -> None:
        """Take note of a step that did hardly anything but run this part of prompts."""
        if num_tokens < _MIN_TOKENS or seconds <= 0:
            return
        rate = self._work(first_token, num_tokens) / seconds
        weight = _WEIGHT if self._is_measured else 1.0
        self._tokens_per_s += weight * (rate - self._tokens_per_s)
        self._is_measured = True

    def seconds(self, first_token: float, num_tokens: float) -> float:
        """How long [first_token, first_token + num_tokens) of a sequence takes to compute."""
        return self._work(first_token, num_tokens) / self._tokens_per_s

    def _work(self, first_token: float, num_tokens: float) -> float:
        """In tokens at position 0."""
        return num_tokens * (1 + (first_token + num_tokens / 2) / self._even_tokens)
