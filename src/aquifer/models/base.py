"""What the engine asks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from aquifer.cache.base import KVLayout, KVView
from aquifer.weights.store import Parameter


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tokens of one step, of all its sequences one after the other."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    # The context that the rotary embedding of a token is computed for, where it depends on it
    # ("dynamic" scaling): the prompt's length, or position + 1 beyond the prompt.
    context_lengths: torch.Tensor  # [tokens] int64


class Model(Protocol):
    """A decoder-only language model whose KV lives elsewhere."""

    @property
    def kv_layout(self) -> KVLayout:
        """What one token's KV looks like."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids are below it."""

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, hidden]; writes KV through `kv`."""

    @property
    def is_capturable(self) -> bool:
        """Whether a step of it is the same kernels every time, so that a CUDA graph can hold it."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: [n, hidden] -> [n, vocab_size], in the model's dtype."""


class ModelPlan(Protocol):
    """A model known from its configuration, before any weight is read."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """What to load, and from which stored tensors."""

    @property
    def max_model_len(self) -> int:
        """The longest context that the configuration allows, in tokens."""

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Model:
        """Make the model over loaded parameters, by name; it keeps references, no copies.

        Raises:
            UnsupportedModelError: what it computes cannot be served after all.
        """
