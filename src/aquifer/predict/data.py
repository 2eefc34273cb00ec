"""Examples to train a length predictor on: requests, and the lengths that their outputs had."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from aquifer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Example:
    """A request that has been served.

    Args:
        output_tokens: length of its output.
        prompt: its text; "" if only the length is known.
        prompt_token_ids: its tokens, where they are recorded instead.
        prompt_tokens: their number, where nothing else is known; 0 if it is.
        model: name of the model that answered; "" if there is one.
        temperature: of its sampling.
        arrival_s: when it arrived; None if that is not known.
    """

    output_tokens: int
    prompt: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    model: str = ""
    temperature: float = 1.0
    arrival_s: float | None = None

    @property
    def has_prompt(self) -> bool:
        """Whether there is more than its length."""
        return bool(self.prompt or self.prompt_token_ids)


_MOST = 2**31 - 1
"""Token ids are numbers of 32 bits, and no prompt and no output is longer."""


def read_examples(file: Path, models: tuple[str, ...] = ()) -> list[Example]:
    """Read examples. Requests without output are left out.

    - `.jsonl`: objects with `output_tokens`, and one of `prompt`, `question` (texts),
      `prompt_token_ids` or `prompt_tokens` (a number); if known, `model`, `temperature` and
      `arrival` in seconds;
    - `.json`: AlpacaEval's `instructions`, and `output_tokens` by the name of the model;
    - `.csv`: Azure's `TIMESTAMP,ContextTokens,GeneratedTokens`.

    Any of them may be compressed (`.gz`).

    Args:
        file: the file.
        models: the models of which outputs are read, where there are several; all if empty.

    Raises:
        ConfigError: it cannot be read; the message names the line.
    """
    suffix = Path(file.name.removesuffix(".gz")).suffix
    readers = {".jsonl": _read_lines, ".json": _read_lists, ".csv": _read_table}
    if suffix not in readers:
        raise ConfigError(f"{file} is no format for examples; use .jsonl, .json or .csv, or .gz")
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8") as lines:
            examples = list(readers[suffix](lines, file))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    found = [
        example
        for example in examples
        if example.output_tokens and (not models or example.model in models)
    ]
    if not found:
        raise ConfigError(
            f"{file} has no examples" + (f" of {', '.join(models)}" if models else "")
        )
    return found


def _read_lines(lines: io.TextIOBase, file: Path) -> Iterator[Example]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
            prompt = entry.get("prompt", entry.get("question")) or ""
            arrival = entry.get("arrival")
            example = Example(
                _whole(entry["output_tokens"]),
                _text(prompt),
                tuple(map(_whole, entry.get("prompt_token_ids") or ())),
                _whole(entry.get("prompt_tokens", 0)),
                _text(entry.get("model") or ""),
                _finite(entry.get("temperature", 1.0)),
                None if arrival is None else _finite(arrival),
            )
            if example.temperature < 0:
                raise ValueError(f"temperature is {example.temperature}; it must be at least 0")
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number}: this is no example: {error!r}") from error
        if not (example.has_prompt or example.prompt_tokens):
            raise ConfigError(
                f"{file}, line {number}: an example needs prompt, prompt_token_ids or "
                "prompt_tokens of at least 1"
            )
        yield example


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r} must be a whole number of at least 0 and at most {_MOST}")
    return value


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} must be a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a text")
    value.encode()  # half of a surrogate pair is no text
    return value


def _read_lists(lines: io.TextIOBase, file: Path) -> Iterator[Example]:
    try:
        content = json.load(lines)
        prompts, outputs = content["instructions"], content["output_tokens"]
        for model, lengths in outputs.items():
            for prompt, length in zip(prompts, lengths, strict=True):
                yield Example(_whole(length), _text(prompt), model=str(model))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{file} must have a list `instructions`, and lists `output_tokens` of the same length "
            f"by the model: {error!r}"
        ) from error


def _read_table(lines: io.TextIOBase, file: Path) -> Iterator[Example]:
    rows = csv.DictReader(lines)
    for row in rows:
        try:
            # There are seven decimals; `datetime` accepts six.
            whole, _, decimals = row["TIMESTAMP"].strip().partition(".")
            begin_s = datetime.fromisoformat(f"{whole}+00:00").timestamp()
            arrival_s = begin_s + float(f"0.{decimals or 0}")
            yield Example(
                _whole(int(row["GeneratedTokens"])),
                prompt_tokens=_whole(int(row["ContextTokens"])),
                arrival_s=arrival_s,
            )
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise ConfigError(
                f"{file}, line {rows.line_num}: it needs TIMESTAMP, ContextTokens and "
                f"GeneratedTokens: {error!r}"
            ) from error
