"""A served model as the web process knows it: its tokenizer and its sampling defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquifer.config import ModelSpec
from aquifer.engine.request import SamplingParams
from aquifer.engine.text import Tokenizer
from aquifer.errors import ConfigError, RequestError

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class TextModel:
    """What is needed to turn text into tokens and back.

    Args:
        name: what clients call it.
        path: its checkpoint.
        tokenizer: None if the checkpoint has none; then prompts must be token ids.
        defaults: sampling values of its `generation_config.json`, for requests without their own.
    """

    name: str
    path: Path
    tokenizer: Tokenizer | None
    defaults: Mapping[str, Any]

    @classmethod
    def load(cls, spec: ModelSpec, chat_template: str | None = None) -> TextModel:
        """Read tokenizer and defaults.

        Raises:
            ConfigError: a file is damaged.
        """
        tokenizer = Tokenizer.load(spec.path, chat_template)
        return cls(spec.name, spec.path, tokenizer, sampling_defaults(spec.path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            RequestError: there is no tokenizer, or the text is no Unicode.
        """
        return self.need_tokenizer().encode(text, add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        chat_template: str | None,
        template_args: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a conversation.

        Raises:
            RequestError: there is no tokenizer or template, or it refuses these messages.
        """
        return self.need_tokenizer().encode_chat(
            messages, add_generation_prompt, chat_template, **template_args
        )

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: the checkpoint has none.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"model {self.name!r} has no tokenizer; send the prompt as token ids to "
                "/v1/completions",
                param="prompt",
            )
        return self.tokenizer


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling values that a checkpoint's `generation_config.json` recommends.

    Raises:
        ConfigError: the file is damaged, or a value impossible.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        defaults = {name: content[name] for name in _DEFAULTS if content.get(name) is not None}
        SamplingParams(**defaults)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot use {file}: {error}") from error
    return defaults


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Every id must be one of the vocabulary.

    Raises:
        RequestError: one is not, or there is none at all.
    """
    if not token_ids:
        raise RequestError(f"{param} is empty; it must have at least one token", param=param)
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds token id {token_id}; the vocabulary goes from 0 to "
                f"{vocab_size - 1}",
                param=param,
            )
