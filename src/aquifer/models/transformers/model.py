"""A model of Transformers whose attention is ours, and whose KV lives elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from aquifer.cache.base import KVLayout, KVView
from aquifer.models.base import ModelInput

SERVE = "aquifer"
"""Our name in the attention registry. It has none in the mask registry: no masks are built."""


class TransformersModel:
    """A model of Transformers that keeps its KV with us. Made by `TransformersPlan.build`.

    Args:
        model: the model, parameters in place.
        kv_layout: what one token's KV looks like.
        windows_tokens: the sliding window of each layer, None where it attends to everything.
    """

    # Other people's code may look at values on the way, as mixtures of experts do.
    is_capturable = False

    def __init__(
        self, model: Any, kv_layout: KVLayout, windows_tokens: tuple[int | None, ...]
    ) -> None:
        self.kv_layout = kv_layout
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._decoder = getattr(model, _decoder_name(model))
        self._head = _without_decoder(model)
        self._windows_tokens = windows_tokens

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, hidden]; writes KV through `kv`."""
        token = _STEP.set(_Step(kv, self._windows_tokens))
        try:
            output = self._decoder(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False
            )
        finally:
            _STEP.reset(token)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: [n, hidden] -> [n, vocab_size].

        Runs the model's own code beyond its decoder, with whatever scaling or capping it does.
        """
        output = type(self._head).forward(
            self._head, inputs_embeds=hidden[None], use_cache=False, return_dict=True
        )
        scores: torch.Tensor = output.logits[0]
        return scores


@dataclass(frozen=True, slots=True)
class _Step:
    """What attention needs while one `forward` runs."""

    kv: KVView
    windows_tokens: Sequence[int | None]


_STEP: ContextVar[_Step] = ContextVar("aquifer_step")


def _serve_attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, key_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, key_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers calls it; returns [1, tokens, heads, value_dim]."""
    step = _STEP.get()
    step.kv.write(module.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
    attended = step.kv.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_tokens=step.windows_tokens[module.layer_idx],
        softcap=softcap,
    )
    return attended[None], None


AttentionInterface.register(SERVE, _serve_attention)


class _DecoderOutput:
    """Hidden states, and None for whatever else a head passes on (losses of a router, caches)."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _PassThrough(nn.Module):
    """Stands where the decoder was: what goes in as embeddings comes out as hidden states."""

    @property
    def decoder(self) -> _PassThrough:
        """Itself: OPT calls the decoder inside of its decoder."""
        return self

    def forward(self, *_args: None, inputs_embeds: torch.Tensor, **_: Any) -> _DecoderOutput:
        """What a decoder returns, around [1, n, hidden]."""
        return _DecoderOutput(inputs_embeds)


def _decoder_name(model: Any) -> str:
    """The child of a causal language model that turns token ids into hidden states."""
    embeddings = model.get_input_embeddings()
    children: Iterator[tuple[str, nn.Module]] = model.named_children()
    return next(name for name, child in children if embeddings in child.modules())


def _without_decoder(model: Any) -> Any:
    """The same model, sharing its head, with nothing where its decoder was."""
    head = copy.copy(model)
    head._modules = {**model._modules, _decoder_name(model): _PassThrough()}
    return head
