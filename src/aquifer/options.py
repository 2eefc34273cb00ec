"""Every option, in one table: `OPTIONS`.

The command line, `LLM(...)`, the keys of a YAML file, environment variables, the fields of
`EngineConfig` and `ServerConfig`, and README's table are made from it or compared with it.

A new option is an entry of the table, a field of `EngineConfig` or `ServerConfig`, a key of
`LLMOptions` if `LLM` has it, and a run of tools/options_table.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aquifer.errors import ConfigError
from aquifer.sizes import exact_size, parse_size

Scope = Literal["serve", "run", "bench", "llm"]
"""An interface that has options: `aquifer serve`, `run`, `bench`, or `LLM(...)`."""

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
        unit: numbers of "bytes" and "tokens" may be written like 4GiB and 32K. Text with the unit
            "file" is a path everywhere but in Python, and the value is the text of that file. Other
            units only describe.
        scopes: interfaces that have the option.
        field: field of `EngineConfig` or `ServerConfig`, or `models`; "" if its name is `name`.
        choices: values allowed, all if empty; N stands for a number.
        minimum: least value allowed.
        above: bound that the value must exceed.
        maximum: greatest value allowed.
        example: a value that works; "" for the default.
        unset: what None means, where it is the default.
        many: whether there may be several values; they make a tuple.
        is_argument: whether the command line takes it by position, without a flag.
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
    example: str = ""
    unset: str = ""
    many: bool = False
    is_argument: bool = False

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
            return "choose " + " or ".join([", ".join(self.choices[:-1]), self.choices[-1]])
        if self.type is bool:
            return "write true or false"
        noun = "a size" if self.unit == "bytes" else _NOUNS[self.type]
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
        if isinstance(value, self.type):
            return value
        try:
            if self.type is int and isinstance(value, str):
                return parse_size(value) if self.unit in ("bytes", "tokens") else int(value)
            if self.type is float and isinstance(value, (int, str)):
                return float(value)
            if self.type is Path and isinstance(value, str):
                return Path(value)
        except ValueError:
            pass
        return None

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return any(re.fullmatch(choice.replace("N", r"\d+"), value) for choice in self.choices)
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def _refusal(self, value: object, source: str) -> ConfigError:
        if self.type is str and not self.choices:  # may be a secret
            return ConfigError(f"{source or self.name} is not text; put the value in quotes")
        return ConfigError(f"{source or self.name} is {value!r}; {self.advice}")


OPTIONS: tuple[Option, ...] = (
    Option(
        "models",
        str,
        (),
        "Models to serve: PATH, NAME=PATH, ORG/NAME of the Hugging Face hub, or 'demo'.",
        unit="model",
        scopes=("serve",),
        many=True,
        is_argument=True,
    ),
    Option(
        "served_model_name",
        str,
        (),
        "Name of the only model in the API; repeat it for further names of the same model.",
        scopes=("serve",),
        field="models",
        unset="its path, or the last part of it",
        many=True,
    ),
    Option(
        "revision",
        str,
        None,
        "Branch, tag or commit of the model, if it is from the Hugging Face hub.",
        scopes=("serve", "run", "bench", "llm"),
        field="models",
        unset="its default branch",
    ),
    Option("host", str, "127.0.0.1", "Address to listen on.", unit="address", scopes=("serve",)),
    Option(
        "port",
        int,
        8000,
        "Port to listen on; 0 for a free one.",
        scopes=("serve",),
        minimum=0,
        maximum=65535,
    ),
    Option(
        "api_key",
        str,
        None,
        "Bearer token that clients must send: one key, or several separated by commas.",
        scopes=("serve",),
        unset="clients need none",
    ),
    Option(
        "api_key_for_all",
        bool,
        False,
        "Require the API key for /metrics, /version and the API's documents too, not for /health.",
        scopes=("serve",),
    ),
    Option(
        "device",
        str,
        "auto",
        "auto (a GPU if there is one, else the CPU), cpu, cuda (the first GPU) or cuda:N.",
        scopes=("serve", "run", "bench", "llm"),
        choices=("auto", "cpu", "cuda", "cuda:N"),
    ),
    Option(
        "load_format",
        str,
        "auto",
        "auto (the checkpoint's weights) or dummy (random ones; config.json is enough).",
        scopes=("serve", "run", "bench", "llm"),
        choices=("auto", "dummy"),
    ),
    Option(
        "dtype",
        str,
        "auto",
        "auto (the checkpoint's own), float32, bfloat16 or float16.",
        scopes=("serve", "run", "bench", "llm"),
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    Option(
        "threads",
        int,
        None,
        "CPU threads that run each step; on a GPU, what the GPU leaves to the CPU.",
        scopes=("serve", "run", "bench", "llm"),
        minimum=1,
        example="4",
        unset="OMP_NUM_THREADS, or else by the size of each step, up to the CPUs of the process",
    ),
    Option(
        "max_model_len",
        int,
        None,
        "Longest context: prompt and output of one sequence.",
        unit="tokens",
        scopes=("serve", "run", "llm"),
        minimum=1,
        example="32K",
        unset="what the model allows",
    ),
    Option(
        "max_num_seqs",
        int,
        256,
        "Sequences of one model that run at once.",
        scopes=("serve", "llm"),
        minimum=1,
    ),
    Option(
        "max_num_batched_tokens",
        int,
        None,
        "Tokens of one step, prompts and outputs together; longer prompts are read in chunks.",
        unit="tokens",
        scopes=("serve", "run", "bench", "llm"),
        minimum=1,
        example="2048",
        unset="2048, or 8192 on a GPU",
    ),
    Option(
        "max_num_waiting",
        int,
        1024,
        "Requests that may wait; more are refused with status 429.",
        scopes=("serve",),
        minimum=1,
    ),
    Option(
        "memory",
        int,
        None,
        "Budget of the pool, weights included, and on a GPU all else that the process holds there.",
        unit="bytes",
        scopes=("serve", "run", "bench", "llm"),
        field="memory_bytes",
        minimum=1,
        example="4GiB",
        unset="a share of the GPU, or on a CPU the weights plus a quarter of free memory",
    ),
    Option(
        "gpu_memory_utilization",
        float,
        0.9,
        "Share of the GPU's memory to use if no memory budget is set.",
        unit="fraction",
        scopes=("serve", "run", "llm"),
        above=0,
        maximum=1,
    ),
    Option(
        "kv_cache",
        str,
        "virtual",
        "virtual (contiguous addresses) or paged (blocks and block tables).",
        scopes=("serve", "run", "bench", "llm"),
        choices=("virtual", "paged"),
    ),
    Option(
        "page_size",
        int,
        None,
        "Size of a physical page.",
        unit="bytes",
        scopes=("serve", "run", "llm"),
        field="page_bytes",
        minimum=1,
        example="2MiB",
        unset="the device's own, or larger for a large budget",
    ),
    Option(
        "block_size",
        int,
        16,
        "Tokens in a block of the paged cache.",
        unit="tokens",
        scopes=("serve", "run", "llm"),
        minimum=1,
    ),
    Option(
        "enable_prefix_caching",
        bool,
        True,
        "Keep computed KV, while memory is free, for prompts that begin with the same tokens.",
        scopes=("serve", "llm"),
    ),
    Option(
        "prefix_cache_salt_by_key",
        bool,
        None,
        "Share cached prefixes only between requests with the same API key.",
        scopes=("serve",),
        unset="on with several keys",
    ),
    Option(
        "swap_space",
        int,
        4 << 30,
        "Host memory for the KV of preempted sequences; 0 for none.",
        unit="bytes",
        scopes=("serve", "llm"),
        field="swap_space_bytes",
        minimum=0,
    ),
    Option(
        "preemption_mode",
        str,
        "auto",
        "What to do with preempted KV: swap (to the host), recompute, or auto (the cheaper one).",
        scopes=("serve", "llm"),
        choices=("auto", "swap", "recompute"),
    ),
    Option(
        "chat_template",
        str,
        None,
        "Jinja template used in place of the model's own: a file, or in Python its text.",
        unit="file",
        scopes=("serve", "run", "llm"),
        unset="the model's own",
    ),
    Option(
        "trust_request_chat_template",
        bool,
        False,
        "Accept chat templates from clients; they are rendered in a process of their own.",
        scopes=("serve",),
    ),
    Option(
        "seed",
        int,
        None,
        "Seed for requests that have none.",
        scopes=("serve", "run", "llm"),
        example="0",
        unset="a different one at each start",
    ),
    Option(
        "shutdown_timeout",
        float,
        10.0,
        "Time for running requests to finish after the signal to stop.",
        unit="seconds",
        scopes=("serve",),
        field="shutdown_timeout_s",
        minimum=0,
    ),
)
"""The table. Its order is that of the help, of `LLM`'s signature and of README."""


def options_of(scope: Scope) -> tuple[Option, ...]:
    """The options that an interface has."""
    return tuple(option for option in OPTIONS if scope in option.scopes)


def find_option(name: str) -> Option:
    """The option of that name."""
    return next(option for option in OPTIONS if option.name == name)


def default_of(name: str) -> Any:
    """The default of the option of that name."""
    return find_option(name).default
