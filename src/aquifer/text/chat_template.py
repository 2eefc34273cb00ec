"""Chat templates: from a conversation to the text of a prompt.

Templates are written for Transformers, and get the same functions, filters and syntax here. Its own
renderer is not used, since importing it takes a second, most of the start of a process that serves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from aquifer.errors import RequestError

_MAX_MESSAGE_CHARS = 1000

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, of which templates read the first or the second."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template with the variables that a tokenizer gives it.

    Args:
        source: Jinja.
        special_tokens: variables such as `bos_token`.
    """

    source: str
    special_tokens: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Render a conversation.

        Args:
            messages: the conversation.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            variables: further variables of the template.

        Raises:
            RequestError: the template refuses the messages. It runs methods and arithmetic on the
                client's values, so any exception can come from it.
            MemoryError: it needs more memory than the process may have.
        """
        try:
            return _compiled(self.source).render(
                {"tools": None, "documents": None, **self.special_tokens, **_plain(variables)},
                messages=[_with_reasoning(_plain(message)) for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise RequestError(
                f"the chat template refused the messages: {error}"[:_MAX_MESSAGE_CHARS],
                param="messages",
            ) from error


@lru_cache
def _compiled(source: str) -> Template:
    """Compile a template for a sandbox, in which it can reach and change nothing but its values."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        dict=_Dict(),
        namespace=_Namespace,
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
    )
    return environment.from_string(source)


class _Generation(Extension):
    """Syntax of `{% generation %}`, which marks what a model writes, for training."""

    tags = {"generation"}  # noqa: RUF012  # as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block; a scope of its own, as it is in Transformers."""
        scope = nodes.Scope(lineno=next(parser.stream).lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


class _Dict:
    """The functions of `dict`, without the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    fromkeys = staticmethod(dict.fromkeys)


class _Namespace(Namespace):
    """A namespace that keeps no names with an underscore first, which Python itself may use."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an item may be named `self`
        self, *items = args
        Namespace.__init__(self)
        for name, value in dict(*items, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models read it; Jinja's own filter escapes characters that HTML has a use for."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    """Refuse the conversation."""
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    """The local time, in the format of `strftime`."""
    return datetime.now().strftime(form)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's reasoning the names that templates read, whichever name it came with."""
    given = [message[name] for name in _REASONING_NAMES if message.get(name) is not None]
    return {"thinking": given[0], **message, "reasoning_content": given[0]} if given else message


def _plain(value: Any) -> Any:
    """A copy of JSON values in Python's own types, whose methods the sandbox knows.

    Raises:
        TypeError: a value is of another type.
    """
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case tuple():
            return tuple(_plain(item) for item in value)
        case _:
            raise TypeError(f"{type(value).__name__} is not a type of JSON")
