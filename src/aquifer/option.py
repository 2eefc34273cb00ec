"""One option: its name, type, default, bounds and help, and how its values are read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aquifer.durations import parse_duration
from aquifer.errors import ConfigError
from aquifer.sizes import exact_size, parse_size

Scope = Literal["serve", "run", "bench", "llm"]
"""An interface that has options: `aquifer serve`, `run`, `bench`, or `LLM(...)`."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Values of options that name a dtype."""

_TRUTH = {"true": True, "yes": True, "on": True, "1": True}
_TRUTH |= {"false": False, "no": False, "off": False, "0": False}
_NOUNS = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, type, default, unit, bounds and help.

    Args:
        name: name in Python and in YAML; the flag is `--name` with dashes.
        type: type of the value: bool, int, float, str or Path.
        default: the value if no source sets the option. None is a value where it is the default.
        help: what the option does, in a sentence or two.
        unit: numbers of "bytes" and "tokens" may be written like 4GiB and 32K, a "duration" in
            seconds like 5m, and a negative one is infinite. Text with the unit
            "file" is a path everywhere but in Python, and the value is the text of that file. Other
            units only describe.
        scopes: interfaces that have the option.
        field: field of `EngineConfig` or `ServerConfig`, or `models`; "" if its name is `name`.
        choices: values allowed, all if empty; N stands for a number.
        minimum: least value allowed.
        above: bound that the value must exceed.
        maximum: greatest value allowed.
        may_be_infinite: whether an infinite number is allowed.
        example: a value that works; "" for the default.
        unset: what None means, where it is the default.
        many: whether there may be several values; they make a tuple.
        is_argument: whether the command line takes it by position, without a flag.
        short: another flag for it on the command line; "" for none.
    """

    name: str
    type: type
    default: Any
    help: str
    unit: str = ""
    scopes: tuple[Scope, ...] = ()
    field: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    may_be_infinite: bool = False
    example: str = ""
    unset: str = ""
    many: bool = False
    is_argument: bool = False
    short: str = ""

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The option in the environment."""
        return "AQUIFER_" + self.name.upper()

    @property
    def field_name(self) -> str:
        """The field of `EngineConfig` or `ServerConfig` that has the value."""
        return self.field or self.name

    @property
    def metavar(self) -> str:
        """What stands for a value in the help of the command line."""
        if self.unit:
            return "SIZE" if self.unit == "bytes" else self.unit.upper()
        return "NAME" if self.choices else _METAVARS.get(self.type, "")

    @property
    def default_text(self) -> str:
        """The default as it would be written; "" if there is none."""
        if self.default is None or self.many:
            return ""
        if self.type is bool:
            return "true" if self.default else "false"
        return exact_size(self.default) if self.unit == "bytes" else str(self.default)

    @property
    def default_meaning(self) -> str:
        """The default for people: as it would be written, or what happens without a value."""
        return self.default_text or self.unset

    @property
    def advice(self) -> str:
        """Which values are allowed, with one that works."""
        if self.choices:
            *others, last = self.choices
            return "choose " + (f"{', '.join(others)} or {last}" if others else last)
        if self.type is bool:
            return "write true or false"
        nouns = {"bytes": "a size", "duration": "a duration"}
        noun = nouns.get(self.unit, _NOUNS[self.type])
        example = self.example or self.default_text
        return f"it must be {noun}{self._bounds}" + (f", such as {example}" if example else "")

    @property
    def _bounds(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f" from {self.minimum} to {self.maximum}"
        if self.above is not None and self.maximum is not None:
            return f" above {self.above} and at most {self.maximum}"
        if self.above is not None:
            return f" above {self.above}"
        return "" if self.minimum is None else f" of at least {self.minimum}"

    def parse(self, value: object, source: str = "") -> Any:
        """The value of the option, from text such as "4GiB" or from a value of its type.

        Args:
            value: what a user wrote.
            source: the flag, variable or file at fault if it is refused; "" for the name.

        Raises:
            ConfigError: the option does not allow it; says what it does allow.
        """
        if value is None and self.default is None:
            return None
        if self.many:
            values: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
            return tuple(self._parse_one(one, source) for one in values)
        return self._parse_one(value, source)

    def check(self, value: object) -> None:
        """Check a value that was set in Python: of the right type, within the bounds.

        Raises:
            ConfigError: the option does not allow it.
        """
        if self.parse(value) != value:
            raise self._refusal(value, "")

    def _parse_one(self, value: object, source: str) -> Any:
        parsed = self._convert(value)
        if parsed is None or not self._allows(parsed):
            raise self._refusal(value if parsed is None else parsed, source)
        return parsed

    def _convert(self, value: object) -> Any:
        """The value in the option's type; None if it has no such meaning."""
        if isinstance(value, bool) or self.type is bool:
            if self.type is not bool:
                return None
            return value if isinstance(value, bool) else _TRUTH.get(str(value).lower())
        try:
            if self.unit == "duration" and isinstance(value, (int, float, str)):
                return parse_duration(value)
            if isinstance(value, self.type):
                return value
            if self.type is int and isinstance(value, str):
                return parse_size(value) if self.unit in ("bytes", "tokens") else int(value)
            if self.type is float and isinstance(value, (int, str)):
                return float(value)
            if self.type is Path and isinstance(value, str):
                return Path(value)
        except (ValueError, OverflowError):  # also an integer that no float can hold
            pass
        return None

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return any(re.fullmatch(choice.replace("N", r"\d+"), value) for choice in self.choices)
        if isinstance(value, float) and not math.isfinite(value):
            return self.may_be_infinite and value > 0
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def _refusal(self, value: object, source: str) -> ConfigError:
        if self.type is str and not self.choices:  # may be a secret
            return ConfigError(f"{source or self.name} is not text; put the value in quotes")
        return ConfigError(f"{source or self.name} is {value!r}; {self.advice}")
