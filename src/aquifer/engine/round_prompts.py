"""What cuDNN's attention computes of prompts: calls of the shapes that it was prepared for.

cuDNN builds a plan for each new shape, for tens of milliseconds, and half a second for the first.
So plans for a few shapes are built while a model is loaded (`aquifer.kernels.cudnn_attention`), and
all else is left to our own kernel.
"""

from __future__ import annotations

import numpy as np

from aquifer.cache.spans import IntArray, Spans
from aquifer.kernels.cudnn_attention import (
    CALL_KEYS,
    MAX_MERGED,
    MIN_COUNT,
    is_round,
    keys_of,
)

_LEAST_TOKENS = 2048
"""Our own kernel is about as fast for shorter prompts."""


class RoundPrompts:
    """The shapes that a model's steps hand to cuDNN.

    These are whole prompts of 2048 tokens, 4096, and so on up to the largest step, several of a
    length in one step too; chunks of these lengths after a prefix; and long prefixes of any chunk.

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
        self._counts = [count for count in counts if is_round(count)]
        self._later = self._chunks_after_prefixes(max_tokens) if self._counts else []

    def _chunks_after_prefixes(self, max_tokens: int) -> list[tuple[int, int]]:
        """Chunks, (start, count), that together have all calls of chunks after a prefix."""
        large = max(CALL_KEYS)
        least_keys = min(CALL_KEYS[large])
        # A chunk over itself is a call of another shape than a whole prompt: its log-sum-exp is
        # needed.
        chunks = {(least_keys, count) for count in self._counts}
        for rows, all_keys in CALL_KEYS.items():
            chunks |= {(keys, rows) for keys in all_keys if keys_of(keys, rows)}
        # Short pieces have few keys only in chunks that have long pieces too.
        chunks.add((least_keys, large + 1))
        # The most results in memory at once: of this chunk and of four parts.
        part = CALL_KEYS[large][1]
        chunks.add(((MAX_MERGED - 2) * part + least_keys, self._counts[-1]))
        return sorted(
            (start, count)
            for start, count in chunks
            if count <= self._largest and start + count <= max_tokens
        )

    def lengths(self) -> list[int]:
        """Tokens of KV that sequences in slots 1, 2, ... need for all of `steps`."""
        steps = self.steps()
        most = [0] * max((len(spans.slots) for spans in steps), default=0)
        for spans in steps:
            ends = (spans.starts + spans.counts).tolist()
            for index, end in enumerate(ends):
                most[index] = max(most[index], end)
        return most

    def steps(self) -> list[Spans]:
        """A step for each shape: equal chunks in consecutive slots."""
        shapes = [
            (0, count, number)
            for count in self._counts
            for number in range(1, self._largest // count + 1)
        ]
        shapes += [(start, count, 1) for start, count in self._later]
        return [
            Spans.make(np.arange(1, number + 1), np.full(number, start), np.full(number, count))
            for start, count, number in shapes
        ]

    def keys(self, spans: Spans) -> IntArray:
        """Keys of each sequence's chunk that cuDNN attends to, see `keys_of`; [num_seqs]."""
        keys = np.zeros(len(spans.slots), np.int64)
        if self._counts:
            for index in (spans.counts >= MIN_COUNT).nonzero()[0].tolist():
                start, count = int(spans.starts[index]), int(spans.counts[index])
                keys[index] = keys_of(start, count, self._counts)
        return keys
