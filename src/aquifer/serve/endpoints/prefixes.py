"""Endpoints for pinned prefixes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response

from aquifer.serve.http import error_response, json_response
from aquifer.serve.prefixes import PinnedPrefix
from aquifer.serve.protocol.requests import PrefixRequest
from aquifer.serve.protocol.responses import PrefixCard, PrefixDeleted, PrefixList
from aquifer.serve.service import Served, check_prompt, encode, parsed


async def pin_prefix(
    request: Request, body: Annotated[PrefixRequest, parsed(PrefixRequest)], service: Served
) -> PrefixCard:
    """Pin the KV of a common prefix."""
    model = service.model(body.model)
    conversation = body.conversation()
    if conversation is not None:
        token_ids, param = await service.conversation(model, conversation), "messages"
    elif isinstance(body.prompt, str):
        token_ids, param = await encode(model, body.prompt), "prompt"
    else:
        token_ids, param = body.prompt or [], "prompt"
    check_prompt(model, token_ids, param)
    prefix = await service.backend.pin(
        service.owner(request),
        service.client_name(request),
        model.info.name,
        token_ids,
        body.cache_salt,
    )
    return _prefix_card(prefix)


async def list_prefixes(request: Request, service: Served) -> PrefixList:
    """List the pinned prefixes."""
    prefixes = await service.backend.prefixes(service.owner(request))
    return PrefixList(data=[*map(_prefix_card, prefixes)])


async def unpin_prefix(request: Request, prefix_id: str, service: Served) -> Response:
    """Unpin a prefix."""
    if not await service.backend.unpin(service.owner(request), prefix_id):
        return error_response(404, f"no prefix {prefix_id!r} is pinned", "prefix_id")
    return json_response(PrefixDeleted(id=prefix_id))


def _prefix_card(prefix: PinnedPrefix) -> PrefixCard:
    return PrefixCard(
        id=prefix.prefix_id,
        created=prefix.created_s,
        model=prefix.model,
        num_tokens=prefix.num_tokens,
    )
