"""Interfaces between the engine and a model: plan, model, and the input of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from aquifer.cache.base import KVLayout, KVView, StateLayout
from aquifer.weights.parameters import Parameter


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows of a step of which hidden states are wanted: the last ones of some of its chunks.

    All others are there for their KV, so the last layer does not have to compute more than that.
    """

    rows: torch.Tensor  # [n] int64
    kv: KVView  # of these rows alone, each as the only token of its sequence


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Tokens of one step: those of all its sequences, one sequence after the other."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    # The context length that the rotary embedding of a token is computed for, where it depends on
    # one ("dynamic" scaling, longrope): the prompt's length, or position + 1 beyond the prompt. In
    # a sequence that has outgrown one of `ModelPlan.kv_limits` it is more than that limit. 0 for
    # rows of padding, the results of which are of no use.
    context_lengths: torch.Tensor  # [tokens] int64
    wanted: Wanted | None = None  # None for all rows

    def of_wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        """The wanted rows of hidden states of all tokens."""
        return hidden if self.wanted is None else hidden[self.wanted.rows]


class Model(Protocol):
    """A decoder-only language model whose KV is stored outside of it, in a cache."""

    @property
    def kv_layout(self) -> KVLayout:
        """Its plan's `ModelPlan.kv_layout`."""

    @property
    def vocab_size(self) -> int:
        """Its plan's `ModelPlan.vocab_size`."""

    @property
    def is_capturable(self) -> bool:
        """Whether every step of the same shape launches the same kernels.

        If so, a CUDA graph can capture it. It does not change once the model is built.
        """

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        """Compute hidden states after the final norm; write KV through `kv`.

        A layer without KV has no entry in the layout, and one without recurrent state none in the
        layout of the state. So a model maps its own layers to indices of `KVLayout.layers` and
        `StateLayout.layers`.

        Returns:
            [tokens, hidden], or of the rows that `ModelInput.wanted` names, in their order.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: [n, hidden] -> [n, vocab_size], in the model's dtype.

        On a rank of a group, those of its own tokens alone: [n, columns], as many on each rank. The
        tokens of rank r begin at r * columns; columns from `vocab_size` on are padding.
        """

    def rehearsal(self) -> Model:
        """The same model with as few layers as launch every kernel that all of them do.

        To compile the kernels; its results are of no use. It may be the model itself.
        """


class ModelPlan(Protocol):
    """Everything about a model that is known before any of its weights is read.

    A plan comes from the configuration of a checkpoint, and from the headers of its tensors if it
    has any. It takes no memory of the device.
    """

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Parameters to load, and the stored tensors that each is made of."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; every token id is below it."""

    @property
    def max_model_len(self) -> int:
        """Longest context that the configuration allows, in tokens."""

    @property
    def kv_limits(self) -> tuple[int, ...]:
        """Lengths in tokens, ascending, where the KV of a sequence changes; none for most models.

        When a sequence gets longer than one of them, all of its KV is computed again.
        """

    @property
    def has_reusable_kv(self) -> bool:
        """Whether the KV of tokens that two prompts begin with is the same in both.

        It is not where the rotary embedding depends on the length of the prompt.
        """

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of one token's KV: an entry for each layer that has KV, none if no layer has."""

    def state_layout(self, dtype: torch.dtype | None = None) -> StateLayout | None:
        """Layout of one sequence's recurrent state; None for a model without any.

        Args:
            dtype: dtype of what the recurrences accumulate; None for that of the weights. What
                convolutions keep has the dtype of the weights.
        """

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Model:
        """Make the model over loaded parameters, given by name; it keeps references, no copies.

        Raises:
            UnsupportedModelError: running the model has shown that it cannot be served.
        """


def num_elements(parameters: Iterable[Parameter]) -> int:
    """Number of elements of all these parameters."""
    return sum(math.prod(parameter.shape) for parameter in parameters)
