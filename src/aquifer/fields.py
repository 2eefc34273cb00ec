"""Fields of a checkpoint's JSON files, each checked where it is read.

A file is refused as a whole if it is too large, is not valid JSON or holds no object. A field is
refused if its type or its value is not what its reader asks for. Every message names the file and
the field, and says what would be valid. No check takes longer for a larger value.

As in Transformers, a field that is null counts as absent, and a flag that is null is false.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquifer.errors import ConfigError, one_line
from aquifer.sizes import format_size

SETTINGS_BYTES = 4 << 20
"""Size of the largest `config.json`. Real ones have a few kilobytes; some list every layer."""

LIST_BYTES = 32 << 20
"""Size of the largest file with a list that grows with the model: at 100 bytes each, of 300 000
tensors in an index of weights, or of added tokens in a `tokenizer_config.json`."""

_MOST_DIGITS = 100
"""Digits of the longest whole number. Tokenizers without a limit have a `model_max_length` of 31;
Python needs time that is quadratic in the number of digits, and refuses more than 4300."""

_MOST_CHARACTERS = 200
"""Length of the longest name of an architecture, an activation or the like."""

_SHOWN_CHARACTERS = 60
"""Length to which a value is cut in a message."""


@dataclass(frozen=True, slots=True)
class _LongNumber:
    """A whole number with too many digits, which is not computed."""

    num_digits: int


def is_there(file: Path) -> bool:
    """Whether a checkpoint has an optional file.

    Raises:
        ConfigError: something else has its name, such as a folder or a link to a file that is
            missing, so that leaving it out would not be what the checkpoint means.
    """
    try:
        if file.is_file():
            return True
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {one_line(error)}") from error
    if os.path.lexists(file):
        raise ConfigError(
            f"cannot read {file}: it is no file, or a link to none; download it again, or remove it"
        )
    return False


def read_text(file: Path, most_bytes: int) -> str:
    """Read a text file in UTF-8.

    Raises:
        ConfigError: it has more than `most_bytes`, cannot be read, or is not UTF-8.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ConfigError(
                f"cannot read {file}: it has more than {format_size(most_bytes)}; download it again"
            )
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {one_line(error)}") from error


def read_fields(file: Path, most_bytes: int = SETTINGS_BYTES) -> Fields:
    """Read a file that holds a JSON object.

    Raises:
        ConfigError: it has more than `most_bytes`, is not valid JSON, holds no object, or holds a
            number of more than 100 digits or text that is not valid Unicode.
    """
    text = read_text(file, most_bytes)
    try:
        content = json.loads(text, parse_int=_whole_number)
        flaw = _flaw(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: no valid JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cannot read {file}: it holds no JSON object")
    if flaw is not None:
        name, reason = flaw
        raise ConfigError(f"{file}: {name.removeprefix('.')} is {reason}")
    return Fields(file, content)


class Fields:
    """The fields of a JSON object, checked as they are read.

    Args:
        file: the file that holds the object, for messages.
        values: the object.
        prefix: name of the object in the file, with a dot behind it; empty for the outermost one.

    Attributes:
        file: as given.
        values: as given.
    """

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file = file
        self.values = values
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.values if name in self)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same fields, and defaults for those that are absent; a flag that is null is not."""
        given = {
            name: value
            for name, value in self.values.items()
            if value is not None or isinstance(defaults.get(name), bool | None)
        }
        return Fields(self.file, {**defaults, **given}, self._prefix)

    def replaced(self, values: Mapping[str, Any]) -> Fields:
        """The same fields, but for those of which the values are given."""
        return Fields(self.file, {**self.values, **values}, self._prefix)

    def error(self, name: str, valid: str) -> ConfigError:
        """The error that refuses a field.

        Args:
            name: the field.
            valid: what it must be.
        """
        if name not in self.values:
            return ConfigError(f"{self.file} lacks {self._named(name)}, which must be {valid}")
        found = _shown(self.values[name])
        return ConfigError(f"{self.file}: {self._named(name)} is {found}; it must be {valid}")

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number; required without a default.

        Raises:
            ConfigError: it is missing, no whole number, or out of bounds.
        """
        if default is not None and name not in self:
            return default
        value: Any = self.values.get(name)
        if not _is_within(value, least, most):
            raise self.error(name, f"a whole number from {least} to {most}")
        return int(value)

    def integers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        """A whole number or a list of them; none if it is absent.

        Raises:
            ConfigError: it is neither, or one of them is out of bounds.
        """
        value = self.values.get(name, [])
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_within(entry, least, most) for entry in values):
            wrong = next(entry for entry in values if not _is_within(entry, least, most))
            found = f"has {_shown(wrong)}" if isinstance(value, list) else f"is {_shown(wrong)}"
            raise ConfigError(
                f"{self.file}: {self._named(name)} {found}; it must be a whole number from "
                f"{least} to {most}, or a list of these"
            )
        return tuple(values)

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """A number, whole or not; required without a default.

        Raises:
            ConfigError: it is missing, no number, or out of bounds, as NaN and infinity are.
        """
        if default is not None and name not in self:
            return default
        value: Any = self.values.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and least <= value <= most):
            raise self.error(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def numbers(self, name: str, least: float, most: float, count: int) -> tuple[float, ...]:
        """A list of that many numbers.

        Raises:
            ConfigError: it is missing or something else, or one of them is out of bounds.
        """
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self.error(name, f"a list of {count} numbers")
        for entry in value:
            is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
            if not (is_number and least <= entry <= most):
                raise self.error(name, f"a list of numbers from {least:g} to {most:g}")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool) -> bool:
        """True or false; false if it is null.

        Raises:
            ConfigError: it is something else.
        """
        value = self.values.get(name, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A short text of printable characters; required without a default.

        Raises:
            ConfigError: it is missing, or something else.
        """
        if default is not None and name not in self:
            return default
        value = self.values.get(name)
        if not _is_name(value):
            raise self.error(name, f"a text of 1 to {_MOST_CHARACTERS} printable characters")
        return str(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts as `text` returns them; none if it is absent.

        Raises:
            ConfigError: it is something else.
        """
        value = self.values[name] if name in self else []
        if not isinstance(value, list) or not all(map(_is_name, value)):
            raise self.error(
                name, f"a list of texts of 1 to {_MOST_CHARACTERS} printable characters"
            )
        return tuple(value)

    def section(self, name: str) -> Fields:
        """The fields of an object within this one; without any if it is absent.

        Raises:
            ConfigError: it is something else.
        """
        value = self.values[name] if name in self else {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(self.file, value, f"{self._prefix}{name}.")

    def _named(self, name: str) -> str:
        """A field's name in the file, as messages show it."""
        return self._prefix + _printable(name)


def _whole_number(digits: str) -> int | _LongNumber:
    """Convert a literal, unless it is too long."""
    count = len(digits.removeprefix("-"))
    return int(digits) if count <= _MOST_DIGITS else _LongNumber(count)


def _flaw(value: Any) -> tuple[str, str] | None:
    """(path within the value, reason) of the first number or text that is refused in any field."""
    if isinstance(value, dict):
        for key, entry in value.items():
            found = _flaw(key) or _flaw(entry)
            if found is not None:
                path, reason = found
                return f".{_printable(key)}{path}", reason
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            found = _flaw(entry)
            if found is not None:
                path, reason = found
                return f"[{i}]{path}", reason
    elif isinstance(value, _LongNumber):
        return "", f"a number of {value.num_digits} digits; it must have at most {_MOST_DIGITS}"
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can express one half of a surrogate pair
            return "", "no valid Unicode; download the file again"
    return None


def _is_within(value: Any, least: int, most: int) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and least <= value <= most


def _is_name(value: Any) -> bool:
    """Whether a value is a text that messages and reports can show as it is."""
    return isinstance(value, str) and 0 < len(value) <= _MOST_CHARACTERS and value.isprintable()


def _printable(name: str) -> str:
    return name if _is_name(name) else _shown(name)


def _shown(value: Any) -> str:
    """A value as messages show it: as in JSON, and short."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
