"""Which prompts cuDNN's attention computes: those of shapes that it was prepared for.

cuDNN builds a plan for each new shape, for tens of milliseconds, and half a second for the first.
So plans for a few round shapes are built while a model is loaded, and steps with others use our own
kernel.
"""

from __future__ import annotations

import numpy as np

from aquifer.cache.spans import Spans
from aquifer.kernels.prefill_attention import is_round_span

_LEAST_TOKENS = 2048
"""Our own kernel is about as fast for shorter prompts."""

_FAR_TOKENS = 65536
"""A chunk after so many tokens takes much longer than its plan, which is built meanwhile."""


class RoundPrompts:
    """The shapes of chunks that a model's steps hand to cuDNN.

    These are whole prompts of 2048 tokens, 4096, and so on up to the largest step, several of a
    length in one step too; and chunks as long as the largest step, at multiples of their length.

    Args:
        max_batched_tokens: tokens of the largest step.
        max_tokens: length of the longest sequence.
    """

    def __init__(self, max_batched_tokens: int, max_tokens: int) -> None:
        self._largest = max_batched_tokens
        counts = []
        count = _LEAST_TOKENS
        while count < min(max_batched_tokens, max_tokens):
            counts.append(count)
            count *= 2
        if _LEAST_TOKENS <= max_batched_tokens <= max_tokens:
            counts.append(max_batched_tokens)
        self._counts = [count for count in counts if is_round_span(0, count)]
        near_tokens = min(max_tokens, _FAR_TOKENS)
        self._later_starts = (
            list(range(self._largest, near_tokens - self._largest + 1, self._largest))
            if self._largest in self._counts
            else []
        )

    def lengths(self) -> list[int]:
        """Tokens of KV that sequences in slots 1, 2, ... need for all of `steps`."""
        if not self._counts:
            return []
        most = [
            max((count for count in self._counts if self._largest // count >= number), default=0)
            for number in range(1, self._largest // self._counts[0] + 1)
        ]
        most[0] = max(most[0], *(start + self._largest for start in self._later_starts), 0)
        return most

    def steps(self) -> list[Spans]:
        """A step for each shape: equal chunks in consecutive slots."""
        shapes = [
            (0, count, number)
            for count in self._counts
            for number in range(1, self._largest // count + 1)
        ]
        shapes += [(start, self._largest, 1) for start in self._later_starts]
        return [
            Spans.make(np.arange(1, number + 1), np.full(number, start), np.full(number, count))
            for start, count, number in shapes
        ]

    def has_all(self, spans: Spans) -> bool:
        """Whether a step has round chunks, and cuDNN is prepared for all of these."""
        chunks = list(zip(spans.starts.tolist(), spans.counts.tolist(), strict=True))
        found = [chunk for chunk in chunks if is_round_span(*chunk)]
        return bool(found) and all(self._has(start, count) for start, count in found)

    def _has(self, start: int, count: int) -> bool:
        if start == 0:
            return count in self._counts
        is_regular = count == self._largest and start % count == 0
        return is_regular and (start in self._later_starts or start >= _FAR_TOKENS)
