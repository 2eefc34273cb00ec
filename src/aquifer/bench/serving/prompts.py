"""Requests of random prompts: token ids for completions, text for chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aquifer.bench.serving.load import is_chat
from aquifer.bench.workload import LengthRange, Workload
from aquifer.errors import ConfigError, one_line

if TYPE_CHECKING:
    from aquifer.text import Tokenizer

UNKNOWN_VOCAB_SIZE = 1 << 20
"""Stands for the vocabulary of a model that is not on this machine. Ids come from its first ten
thousand tokens anyway, and models with fewer are rare."""


class RequestMaker:
    """Maker of the requests of each pass.

    Args:
        workload: prompts and output lengths.
        vocab_size: the vocabulary from which the prompts were drawn.
        endpoint: the path that gets the requests.
        fields: fields that every request has, such as `model`.
        tokenizer: makes the text of chat prompts; not needed for completions.
    """

    def __init__(
        self,
        workload: Workload,
        vocab_size: int,
        endpoint: str,
        fields: dict[str, Any],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._workload = workload
        self._vocab_size = vocab_size
        self._is_chat = is_chat(endpoint)
        self._fields = fields
        self._tokenizer = tokenizer

    @property
    def guesses_vocabulary(self) -> bool:
        """Whether prompts are ids of a vocabulary of unknown size."""
        return self._vocab_size == UNKNOWN_VOCAB_SIZE and not self._is_chat

    def bodies(self, variant: int, count: int | None = None) -> list[bytes]:
        """JSON of the requests of one pass.

        Args:
            variant: 0 for the workload's own prompts. Every other number gives prompts of the same
                lengths with other tokens, which the server cannot have cached.
            count: how many; None for all. The workload is repeated if it has fewer.
        """
        workload = self._workload.shifted(variant, self._vocab_size)
        requests = list(zip(workload.prompts, workload.output_lengths, strict=True))
        wanted = len(requests) if count is None else count
        return [self._body(*requests[index % len(requests)]) for index in range(wanted)]

    def _body(self, prompt: list[int], num_tokens: int) -> bytes:
        fields: dict[str, Any]
        if self._is_chat:
            assert self._tokenizer is not None
            message = {"role": "user", "content": text_of(self._tokenizer, prompt)}
            fields = {"messages": [message], "max_completion_tokens": num_tokens}
        else:
            fields = {"prompt": prompt, "max_tokens": num_tokens}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**self._fields, **fields, **stream}).encode()


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Text that has about as many tokens: decoded, and cut if its own tokens are more."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    again = tokenizer.encode(text, add_special_tokens=False)
    if len(again) <= len(token_ids):
        return text
    return tokenizer.decode(again[: len(token_ids)], skip_special_tokens=True)


def vocab_size_of(folder: Path) -> int:
    """The vocabulary's size by a checkpoint's `config.json`.

    Raises:
        ConfigError: the file cannot be read, or does not say it.
    """
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content = {**content, **content.get("text_config", {})}
        size = int(content["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot read vocab_size from {file}: {one_line(error)}") from error
    if size < 1:
        raise ConfigError(f"{file}: vocab_size is {size}; it must be at least 1")
    return size


def spread(length: int, ratio: float) -> LengthRange:
    """The range of vLLM's `--random-range-ratio`: from length * (1 - ratio) to (1 + ratio)."""
    lowest, highest = int(length * (1 - ratio)), -int(-length * (1 + ratio) // 1)
    return LengthRange(max(lowest, 1), highest)
