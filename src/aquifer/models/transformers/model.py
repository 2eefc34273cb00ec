"""A model of Transformers that uses our attention, over KV that is stored outside of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from aquifer.cache.base import AttentionOptions, KVLayout, KVView
from aquifer.models.base import ModelInput

SERVE = "aquifer"
"""Name of our entry in the attention registry.

The mask registry has no entry of that name, so Transformers builds no masks.
"""


class TransformersModel:
    """`Model` that runs a model of Transformers. Made by `TransformersPlan.build`.

    Args:
        model: the model, with its parameters.
        kv_layout: layout of one token's KV.
        vocab_size: rows of the embedding.
        windows_tokens: sliding window of each layer, None for a layer without one.

    Attributes:
        is_capturable: see `Model.is_capturable`. Its code may read values of tensors on the host,
            so this is false until a trial has shown otherwise.
    """

    def __init__(
        self,
        model: Any,
        kv_layout: KVLayout,
        vocab_size: int,
        windows_tokens: tuple[int | None, ...],
    ) -> None:
        self.is_capturable = False
        self.kv_layout = kv_layout
        self.vocab_size = vocab_size
        self._decoder = getattr(model, _decoder_name(model))
        self._head = _without_decoder(model)
        self._windows_tokens = windows_tokens

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        """See `Model.forward`."""
        token = _STEP.set(_Step(kv, self._windows_tokens))
        try:
            output = self._decoder(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False
            )
        finally:
            _STEP.reset(token)
        return batch.of_wanted(output.last_hidden_state[0])

    def rehearsal(self) -> TransformersModel:
        """See `Model.rehearsal`: itself, since its code alone knows how its layers differ."""
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`.

        Runs the model's own code after its decoder, including any scaling or capping of logits.
        """
        output = type(self._head).forward(
            self._head, inputs_embeds=hidden[None], use_cache=False, return_dict=True
        )
        scores: torch.Tensor = output.logits[0]
        return scores.contiguous()


@dataclass(frozen=True, slots=True)
class _Step:
    """Arguments of attention during one `forward`."""

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
    """Entry of the attention registry; returns [1, tokens, heads, value_dim]."""
    step = _STEP.get()
    step.kv.write(module.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
    attended = step.kv.attend(
        module.layer_idx,
        # The same strides for any number of tokens, so that the same kernels are compiled.
        query[0].transpose(0, 1).contiguous(),
        AttentionOptions(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window_tokens=step.windows_tokens[module.layer_idx],
            softcap=softcap,
        ),
    )
    return attended[None], None


AttentionInterface.register(SERVE, _serve_attention)


class _DecoderOutput:
    """Output of a decoder: hidden states, and None for every other field (caches, losses)."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _PassThrough(nn.Module):
    """Replacement of the decoder that returns its input embeddings as hidden states."""

    @property
    def decoder(self) -> _PassThrough:
        """This module: OPT calls the decoder inside of its decoder."""
        return self

    def forward(self, *_args: None, inputs_embeds: torch.Tensor, **_: Any) -> _DecoderOutput:
        """Return [1, n, hidden] embeddings as a decoder's output."""
        return _DecoderOutput(inputs_embeds)


def _decoder_name(model: Any) -> str:
    """Name of the child of a causal language model that computes hidden states from token ids."""
    embeddings = model.get_input_embeddings()
    children: Iterator[tuple[str, nn.Module]] = model.named_children()
    return next(name for name, child in children if embeddings in child.modules())


def _without_decoder(model: Any) -> Any:
    """Shallow copy of a model that shares its head and has a pass-through as its decoder."""
    head = copy.copy(model)
    # The copy shares its table of children with the model; setattr would change both.
    head._modules = {**model._modules, _decoder_name(model): _PassThrough()}
    return head
