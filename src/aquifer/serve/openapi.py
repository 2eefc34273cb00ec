"""The OpenAPI document: what each operation takes, and every answer that it may give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from aquifer.serve.protocol.responses import ErrorResponse

_REF = "#/components/schemas/{model}"
_REASONS = {
    400: "The request is not valid; `param` names the field at fault.",
    401: "The API key is wrong or missing.",
    403: "This client, or a page of another site, may not do this.",
    404: "There is no such model or object.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    429: "Too many requests are waiting; try again later.",
    503: "The server starts, stops, is too busy, or has lost the request.",
}
_OF_BODIES = (400, 404, 408, 413, 429, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operation takes and answers.

    Args:
        answer: the body of the answer, or None if it is not JSON.
        body: the body that it takes.
        stream: the events of the answer if the body asks for a stream.
        statuses: of errors, beside those of every body.
        media_type: type of an answer that is not JSON; "" for an empty one.
        is_guarded: whether an API key is needed if the server has keys.
    """

    answer: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    stream: type[BaseModel] | None = None
    statuses: tuple[int, ...] = (503,)
    media_type: str = ""
    is_guarded: bool = True

    @property
    def models(self) -> list[type[BaseModel]]:
        """The models of all bodies."""
        return [kind for kind in (self.answer, self.body, self.stream) if kind is not None]

    def describe(self, description: dict[str, Any]) -> None:
        """Add the bodies and answers to the description of the operation."""
        content: dict[str, Any] = {}
        if self.answer is not None:
            content["application/json"] = {"schema": _ref(self.answer)}
        if self.stream is not None:
            content["text/event-stream"] = {"schema": _ref(self.stream)}
        if self.media_type:
            content[self.media_type] = {"schema": {"type": "string"}}
        responses: dict[str, Any] = {"200": {"description": "The answer."}}
        if content:
            responses["200"]["content"] = content
        if self.body is not None:
            description["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": _ref(self.body)}},
            }
        statuses = {*self.statuses, *(_OF_BODIES if self.body is not None else ())}
        for status in sorted(statuses | ({401} if self.is_guarded else set())):
            responses[str(status)] = {
                "description": _REASONS[status],
                "content": {"application/json": {"schema": _ref(ErrorResponse)}},
            }
        description["responses"] = responses


def document(app: FastAPI, operations: Sequence[tuple[str, str, Operation]]) -> dict[str, Any]:
    """The OpenAPI document of an application.

    Args:
        app: the application.
        operations: each as path, method and description.
    """
    result = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models: list[type[BaseModel]] = [ErrorResponse]
    models += [kind for *_, operation in operations for kind in operation.models]
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in dict.fromkeys(models)], ref_template=_REF
    )
    result["components"] = {"schemas": schemas["$defs"]}
    for path, method, operation in operations:
        # What follows a colon in a path is its convertor, which is no part of the parameter's name.
        operation.describe(result["paths"][path.replace(":path", "")][method.lower()])
    return result


def _ref(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=kind.__name__)}
