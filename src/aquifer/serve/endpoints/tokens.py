"""Endpoints that encode and decode text, and describe the tokenizer."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Response

from aquifer.serve.http import json_response
from aquifer.serve.models import check_token_ids
from aquifer.serve.protocol.requests import DetokenizeRequest, TokenizeRequest
from aquifer.serve.protocol.responses import DetokenizeResponse, TokenizeResponse, TokenizerInfo
from aquifer.serve.service import Served, encode, parsed


async def tokenize(
    body: Annotated[TokenizeRequest, parsed(TokenizeRequest)], service: Served
) -> TokenizeResponse:
    """Encode a text or a conversation as token ids."""
    model = service.model(body.model)
    conversation = body.conversation()
    if conversation is not None:
        token_ids = await service.conversation(model, conversation)
    else:
        token_ids = await encode(model, body.prompt or "", body.add_special_tokens is not False)
    token_strs = None
    if body.return_token_strs:
        decode = partial(model.text.need_tokenizer().decode, skip_special_tokens=False)
        token_strs = await model.off_loop.run(
            len(token_ids), lambda: [decode([i]) for i in token_ids]
        )
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=model.info.max_model_len,
        tokens=token_ids,
        token_strs=token_strs,
    )


async def detokenize(
    body: Annotated[DetokenizeRequest, parsed(DetokenizeRequest)], service: Served
) -> DetokenizeResponse:
    """Decode token ids to text."""
    model = service.model(body.model)
    tokenizer = model.text.need_tokenizer()
    if body.tokens:
        check_token_ids(body.tokens, model.info.vocab_size, "tokens")
    decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=await model.off_loop.run(len(body.tokens), decode))


async def tokenizer_info(service: Served, model: str | None = None) -> Response:
    """Describe a model's tokenizer; `model` may be left out if there is only one."""
    tokenizer = service.model(model).text.need_tokenizer()
    return json_response(TokenizerInfo(tokenizer.info()))
