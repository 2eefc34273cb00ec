"""Types of fields, with the limits that are checked while a body is parsed."""

from __future__ import annotations

from collections.abc import Callable, ValuesView
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import core_schema

from aquifer.engine.params import MAX_STOP_STRINGS, MAX_TOKENS_NAMED

MAX_PROMPTS = 1 << 16
"""The most prompts of a body; a server accepts fewer, as many as may wait."""
MAX_PROMPT_TOKENS = 1 << 21
MAX_SALT_CHARS = 256


@dataclass(frozen=True)
class AtMost:
    """Limit of a list's length; the first wrong element ends its validation."""

    num_items: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Add the limit to the list's schema."""
        schema = handler(source)
        assert schema["type"] == "list"
        return {**schema, "max_length": self.num_items, "fail_fast": True}


def _check_prompt(value: Any, _: ValidatorFunctionWrapHandler) -> Any:
    """Check the type at once; pydantic would try each type, and report an error per token."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        most = MAX_PROMPT_TOKENS if value and isinstance(value[0], int) else MAX_PROMPTS
        if len(value) > most:
            raise ValueError(f"has {len(value)} entries; it may have at most {most}")
        types = set(map(type, value))
        if len(types) <= 1 and types <= {str, int}:
            return value
        if types == {list} and {type(i) for token_ids in value for i in token_ids} <= {int}:
            return value
    raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")


def limited(max_values: int) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """A validator that refuses a value made of too many JSON values, before it is looked at."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not _is_small(value, max_values):
            raise ValueError(f"has more than {max_values} values in all; send fewer")
        return handler(value)

    return check


def _is_small(value: object, max_values: int) -> bool:
    """Whether a JSON value consists of at most so many values, itself and containers included."""
    num_values, rest = 1, [value]
    while rest:
        container = rest.pop()
        parts = container.values() if isinstance(container, dict) else container
        if isinstance(parts, (list, ValuesView)):
            num_values += len(parts)
            if num_values > max_values:
                return False
            rest += [part for part in parts if isinstance(part, (dict, list))]
    return True


def _check_one_prompt(value: Any, _: ValidatorFunctionWrapHandler) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return value
    raise ValueError("must be a text or a list of token ids")


PromptField = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_check_prompt)]
OnePromptField = Annotated[str | list[int] | None, WrapValidator(_check_one_prompt)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None
"""A request finds retained prefixes only of requests with the same salt."""
StopStrings = Annotated[list[str], AtMost(MAX_STOP_STRINGS)]
TokenIds = Annotated[list[int], AtMost(MAX_TOKENS_NAMED)]
Biases = Annotated[dict[int, float], Field(max_length=MAX_TOKENS_NAMED)]
