"""Random workloads: prompts and output lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from aquifer.errors import ConfigError

_TOKEN_LIMIT = 10_000
"""Token ids are drawn from [0, _TOKEN_LIMIT], or from the vocabulary if that is smaller."""


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Range of lengths in tokens, drawn uniformly from [lowest, highest]."""

    lowest: int
    highest: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """Parse "128" or "16-256".

        Raises:
            ConfigError: the text is neither.
        """
        lowest, _, highest = text.partition("-")
        try:
            result = cls(int(lowest), int(highest or lowest))
        except ValueError:
            raise ConfigError(f"{text!r} is not a length; write 128 or 16-256") from None
        if not 1 <= result.lowest <= result.highest:
            raise ConfigError(f"{text!r} is not a range of lengths from 1 up; write 16-256")
        return result

    def draw(self, rng: random.Random) -> int:
        """Draw one length."""
        return rng.randint(self.lowest, self.highest)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of random tokens, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lengths: list[int]

    @classmethod
    def random(
        cls, count: int, inputs: LengthRange, outputs: LengthRange, vocab_size: int, seed: int
    ) -> Workload:
        """Generate a random workload, the same for the same arguments.

        Python's generator draws each prompt's length, then its tokens; after all prompts the
        output lengths. Other engines' benchmarks draw in this order, so with the same seed they
        get the same requests.
        """
        rng = random.Random(seed)
        last_token = min(_TOKEN_LIMIT, vocab_size - 1)
        prompts = [
            [rng.randint(0, last_token) for _ in range(inputs.draw(rng))] for _ in range(count)
        ]
        return cls(prompts, [outputs.draw(rng) for _ in range(count)])

    def shifted(self, by: int, vocab_size: int) -> Workload:
        """The same lengths with other tokens, so that no prompt of this workload is found cached.

        Args:
            by: what is added to each token id; 0 gives this workload.
            vocab_size: that of `random`.
        """
        num_tokens = min(_TOKEN_LIMIT, vocab_size - 1) + 1
        prompts = [[(token + by) % num_tokens for token in prompt] for prompt in self.prompts]
        return Workload(prompts, self.output_lengths)

    @property
    def num_input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens to be generated."""
        return sum(self.output_lengths)

    @property
    def num_attended_tokens(self) -> int:
        """Number of tokens that decode steps attend to, summed over steps and requests.

        Prefill of a prompt of p tokens yields the first of o output tokens. The steps of the
        others attend to p + 1, ..., p + o - 1 tokens, the step's own included.
        """
        return sum(
            (o - 1) * len(prompt) + (o - 1) * o // 2
            for prompt, o in zip(self.prompts, self.output_lengths, strict=True)
        )
