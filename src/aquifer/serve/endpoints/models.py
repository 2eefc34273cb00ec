"""Endpoints for the life of models: registered, loaded, unloaded, pinned and removed."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, get_args

from fastapi import Request, Response

from aquifer.engine.reports import MemoryReport, ModelMemory, ModelState
from aquifer.errors import EngineError, RequestError
from aquifer.serve.http import error_response, json_response
from aquifer.serve.messages import ModelVerb
from aquifer.serve.protocol.requests import ModelRequest
from aquifer.serve.protocol.responses import ModelRemoved
from aquifer.serve.service import Served, parsed
from aquifer.serve.snapshots import model_dict, models_dict
from aquifer.serve.supervisor import out_of_service

_PAUSE_S = 0.05
"""How long to wait before asking again whether a model is loaded."""

_LOADING: tuple[ModelVerb, ...] = ("load", "pin")


_OTHER_SITE = "pages of other sites may not manage models"
_NOT_HERE = (
    "this server neither adds nor removes models: anyone who reaches it could. Start it with "
    "--api-key, or with --host 127.0.0.1"
)


async def add(
    request: Request, body: Annotated[ModelRequest, parsed(ModelRequest)], service: Served
) -> Response | dict[str, Any]:
    """Register a model while others are served."""
    if _is_of_other_site(request):
        return error_response(403, _OTHER_SITE)
    if not service.may_change_models:
        return error_response(403, _NOT_HERE)
    name = await service.backend.register(body.model)
    try:
        report = await service.backend.memory()
    except EngineError as error:
        raise EngineError(
            f"model {name!r} is registered; its state is not known: {error}"
        ) from error
    return model_dict(name, report, service.model(name).info)


async def remove(request: Request, model_id: str, service: Served) -> Response:
    """Remove a model; its requests end with an error."""
    if _is_of_other_site(request):
        return error_response(403, _OTHER_SITE)
    if not service.may_change_models:
        return error_response(403, _NOT_HERE)
    name = service.model(model_id).info.name
    await service.backend.remove(name)
    return json_response(ModelRemoved(id=name))


async def list_states(service: Served) -> dict[str, Any]:
    """List the models with their states, the bytes of their weights, and how long these stay."""
    infos = {name: model.info for name, model in service.models.items()}
    return models_dict(await service.backend.memory(), infos)


async def manage(
    request: Request, model_id: str, verb: str, service: Served
) -> Response | dict[str, Any]:
    """Load, unload, pin or unpin a model; a load is answered when it has ended."""
    if _is_of_other_site(request):
        return error_response(403, _OTHER_SITE)
    known = {name: name for name in get_args(ModelVerb)}
    if verb not in known:
        return error_response(404, f"{verb!r} is none of {', '.join(known)}")
    model = service.model(model_id)
    name, backend = model.info.name, service.backend
    num_loads = _memory_of(name, await backend.memory(), service).status.num_loads
    await backend.manage(verb, name)  # type: ignore[arg-type]
    while True:
        report = await backend.memory()
        status = _memory_of(name, report, service).status
        has_ended = status.state == ModelState.RESIDENT or status.num_loads > num_loads
        if verb not in _LOADING or has_ended:
            return model_dict(name, report, model.info)
        if status.error is not None:
            raise RequestError(f"model {name!r} could not be loaded: {status.error}")
        if await request.is_disconnected():
            return Response(status_code=499)
        await asyncio.sleep(_PAUSE_S)


def _memory_of(name: str, report: MemoryReport, service: Served) -> ModelMemory:
    """What a report says of a model.

    Raises:
        UnavailableError: no engine has it.
    """
    if name not in report.models:
        reasons = service.backend.availability.out_of_service
        raise out_of_service(name, reasons.get(name, "no device serves it"))
    return report.models[name]


def _is_of_other_site(request: Request) -> bool:
    """Whether a browser sends a request from a page of another site."""
    return request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
