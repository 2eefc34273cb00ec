"""Tokenizer and sampling defaults of a served model, for the web process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquifer.config import ModelSpec
from aquifer.engine.params import SamplingParams
from aquifer.errors import ConfigError, RequestError
from aquifer.fields import is_there, read_fields
from aquifer.text import Tokenizer

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MESSAGE_CHARS = 300  # length to which a message that quotes a value is cut


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of a served model: tokenizer and sampling defaults.

    Args:
        name: the served name.
        path: the checkpoint.
        tokenizer: None if the checkpoint has none; then prompts must be token ids.
        defaults: sampling values of its `generation_config.json`, for requests that do not set
            them.
    """

    name: str
    path: Path
    tokenizer: Tokenizer | None
    defaults: Mapping[str, Any]

    @classmethod
    def load(cls, spec: ModelSpec, chat_template: str | None = None) -> TextModel:
        """Load tokenizer and defaults.

        Raises:
            ConfigError: a file cannot be read, or the tokenizer could hold up other models.
        """
        tokenizer = Tokenizer.load(spec.path, chat_template)
        if tokenizer is not None:
            try:
                tokenizer.check_decoder()
            except ConfigError as error:
                raise ConfigError(f"cannot use {spec.path}: {error}") from error
        return cls(spec.name, spec.path, tokenizer, sampling_defaults(spec.path))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be sent to it."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

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
    """Read the sampling values recommended by a checkpoint's `generation_config.json`.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid.
    """
    file = folder / "generation_config.json"
    if not is_there(file):
        return {}
    fields = read_fields(file)
    defaults = {name: fields.values[name] for name in _DEFAULTS if name in fields}
    try:
        SamplingParams(**defaults)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"cannot use {file}: {str(error)[:_MESSAGE_CHARS]}") from error
    return defaults


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Check that there are token ids and that all are in the vocabulary.

    Raises:
        RequestError: there are none, or one is not in the vocabulary.
    """
    if not token_ids:
        raise RequestError(f"{param} is empty; it must have at least one token", param=param)
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} contains token id {token_id}; token ids of this model are from 0 to "
                f"{vocab_size - 1}",
                param=param,
            )
