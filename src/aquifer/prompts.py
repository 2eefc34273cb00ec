"""Prompts and conversations as programs give them to `LLM`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from numbers import Integral
from typing import Any, TypeAlias

from aquifer.errors import RequestError

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt_token_ids": [...]} or {"prompt": "..."}.

A mapping may also have a "cache_salt": retained prefixes are found only by prompts with the same.
"""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, ...]."""

_KEYS = ("prompt_token_ids", "prompt", "cache_salt")


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt (text, a mapping, token ids), not a list of prompts.

    What is neither is one prompt, so that `check_prompt` says what is wrong with it.
    """
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return True
    if not isinstance(prompts, Sized):  # to look at what a generator yields would use it up
        return False
    return len(prompts) > 0 and all(isinstance(token_id, Integral) for token_id in prompts)


def is_one_conversation(messages: Any) -> bool:
    """Whether this is one conversation, not a list of them and not a prompt."""
    return (
        not isinstance(messages, (str, Mapping))
        and len(messages) > 0
        and isinstance(messages[0], Mapping)
        and "role" in messages[0]
    )


def check_prompt(prompt: Any) -> None:
    """Check that a prompt is text, a list, or a mapping with keys that have a meaning.

    Raises:
        RequestError: it is not.
    """
    value = prompt
    if isinstance(prompt, Mapping):
        if unknown := sorted(map(repr, prompt.keys() - set(_KEYS))):
            raise RequestError(
                f"a prompt given as a mapping has {unknown[0]}, which is not read; there is "
                + ", ".join(_KEYS),
                param="prompt",
            )
        value = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if value is None:
            raise RequestError(
                "a prompt given as a mapping needs 'prompt_token_ids' or 'prompt'", param="prompt"
            )
    if not isinstance(value, Iterable):
        raise RequestError(
            f"a prompt is of type {type(value).__name__}; write text or a list of token ids",
            param="prompt",
        )
