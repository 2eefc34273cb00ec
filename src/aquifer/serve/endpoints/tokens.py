"""Endpoints that encode and decode text."""

from __future__ import annotations

from aquifer.serve.models import check_token_ids
from aquifer.serve.protocol.requests import DetokenizeRequest, TokenizeRequest
from aquifer.serve.protocol.responses import DetokenizeResponse, TokenizeResponse
from aquifer.serve.service import Served, off_loop


async def tokenize(body: TokenizeRequest, service: Served) -> TokenizeResponse:
    """Encode a text or a conversation as token ids."""
    model = service.model(body.model)
    tokenizer = model.text.need_tokenizer()
    conversation = body.conversation()
    if conversation is not None:
        token_ids = await service.conversation(model, conversation)
    else:
        text = body.prompt or ""
        add_special_tokens = body.add_special_tokens is not False
        token_ids = await off_loop(len(text), lambda: model.text.encode(text, add_special_tokens))
    token_strs = None
    if body.return_token_strs:
        token_strs = [tokenizer.decode([i], skip_special_tokens=False) for i in token_ids]
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=model.info.max_model_len,
        tokens=token_ids,
        token_strs=token_strs,
    )


async def detokenize(body: DetokenizeRequest, service: Served) -> DetokenizeResponse:
    """Decode token ids to text."""
    model = service.model(body.model)
    tokenizer = model.text.need_tokenizer()
    if body.tokens:
        check_token_ids(body.tokens, model.info.vocab_size, "tokens")
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))
