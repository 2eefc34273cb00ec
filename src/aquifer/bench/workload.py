"""Prompts and output lengths to measure with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aquifer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths in tokens, drawn evenly from [lowest, highest]."""

    lowest: int
    highest: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """From "128" or "16-256".

        Raises:
            ConfigError: it is neither.
        """
        lowest, _, highest = text.partition("-")
        try:
            result = cls(int(lowest), int(highest or lowest))
        except ValueError:
            raise ConfigError(f"{text!r} is no length; write 128 or 16-256") from None
        if not 1 <= result.lowest <= result.highest:
            raise ConfigError(f"{text!r} is no range of lengths from 1 up")
        return result

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths."""
        return [int(n) for n in rng.integers(self.lowest, self.highest + 1, count)]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of random tokens, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lengths: list[int]

    @classmethod
    def random(
        cls, count: int, inputs: LengthRange, outputs: LengthRange, vocab_size: int, seed: int
    ) -> Workload:
        """The same workload for the same arguments."""
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, vocab_size, n).tolist() for n in inputs.draw(rng, count)]
        return cls(prompts, outputs.draw(rng, count))

    @property
    def num_input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens to be generated."""
        return sum(self.output_lengths)
