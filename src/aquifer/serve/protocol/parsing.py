"""From the bytes of a body to its model, with errors that name the field at fault."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from aquifer.errors import MalformedBodyError, RequestError
from aquifer.serve.protocol.requests import UNSUPPORTED_FIELDS

_MAX_MESSAGE_CHARS = 1000
_TYPE_NAMES = re.compile(r"(str|int|float|bool|(list|dict|literal|function-|nullable)\W.*)$")
"""What pydantic puts into the path of an error for the types of a union."""

Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], content: bytes) -> Body:
    """Parse and validate a body.

    Args:
        kind: the model of the body.
        content: JSON.

    Raises:
        RequestError: it is no JSON object, a field is unknown or not supported, or has a value
            that it does not allow.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedBodyError(f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return kind.model_validate(_known_fields(kind, values))
    except ValidationError as error:
        raise _request_error(error) from None


def _known_fields(kind: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the model has; the others are refused unless they are not set.

    Raises:
        RequestError: a field is unknown or not supported.
    """
    known = {}
    for name, value in values.items():
        if name in kind.model_fields:
            known[name] = value
        elif name in UNSUPPORTED_FIELDS:
            if value not in UNSUPPORTED_FIELDS[name]:
                raise RequestError(f"{name} is not supported; leave it out", param=name)
        elif value is not None:
            raise RequestError(f"there is no field {_shown(name)}{_hint(name, kind)}", param=name)
    return known


def _hint(name: str, kind: type[BaseModel]) -> str:
    near = difflib.get_close_matches(name[:100], kind.model_fields, n=1)
    return f"; do you mean {near[0]!r}?" if near else "; leave it out"


def _shown(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:100] + "...")


def _request_error(error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_input=False)
    # A union reports an error for each of its types. That a list is too long says most.
    chosen = next((one for one in errors if one["type"] == "too_long"), errors[0])
    field, *path = (str(part) for part in chosen["loc"])
    name = ".".join([field, *(part for part in path if not _TYPE_NAMES.match(part))])
    message = chosen["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return RequestError(f"{name}: {message}"[:_MAX_MESSAGE_CHARS], param=field)
