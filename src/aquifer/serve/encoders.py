"""Worker processes that encode texts with unusual tokenizers, within limits of time and memory."""

from __future__ import annotations

import os
from functools import partial

from aquifer.serve.sandbox import Sandbox
from aquifer.text import Tokenizer

_MOST_WAITING = 256

_installed: list[Tokenizer] = []  # in a worker: its tokenizer


def encoder_of(tokenizer: Tokenizer | None, max_s: float = 10.0) -> Sandbox | None:
    """A worker that encodes with a tokenizer, by `encode_here`.

    Args:
        tokenizer: of a model.
        max_s: time that a text may take.

    Returns: None if the tokenizer is a usual one, which takes no long time for any short text.
    """
    if tokenizer is None or tokenizer.is_usual:
        return None
    prepare = partial(_install, tokenizer)
    return Sandbox((), max_s, max_waiting=_MOST_WAITING, niceness=0, prepare=prepare)


def encode_here(text: str, add_special_tokens: bool, max_tokens: int) -> list[int]:
    """Encode a text in a worker; see `Tokenizer.encode`."""
    (tokenizer,) = _installed
    return tokenizer.encode(text, add_special_tokens, max_tokens)


def _install(tokenizer: Tokenizer) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a text needs one thread, and has few bytes
    _installed.append(tokenizer)
