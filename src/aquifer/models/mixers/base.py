"""Interfaces between a decoder and the mixers of its layers: description, and layer.

A mixer combines the tokens of a sequence, as attention does, and keeps a state of fixed size
instead of KV. A layer of it is

    product = in_proj(normed)
    mixed = recur(product): kv.recur(index, product or a part of it, self)
    result = out_proj(finish(mixed, product)): of the norm of mixed, gated by a part of the product

in which there is a product before and after `KVView.recur`: a captured step is cut there, and each
of its pieces launches something.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from aquifer.cache.base import KVView, StateTensor
from aquifer.models.collectives import ALONE, Collectives
from aquifer.models.tensors import Linear, Tensors
from aquifer.weights.parameters import Parameter


class Mixer(Protocol):
    """Description of a mixer, equal in all layers that have one: sizes and options."""

    def parameters(
        self, name: str, stored: str, hidden_size: int, dtype: torch.dtype
    ) -> Iterator[Parameter]:
        """The parameters of one layer.

        Args:
            name: begins the names of the parameters.
            stored: begins the names of the stored tensors.
            hidden_size: width of the hidden states.
            dtype: dtype of the weights. What is added to or multiplies the state is float32.
        """

    def state(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """What one layer keeps of a sequence.

        Args:
            dtype: dtype of the weights, and of what convolutions keep.
            state_dtype: dtype of what recurrences accumulate.
        """

    def layer(
        self, tensors: Tensors, name: str, index: int, collectives: Collectives = ALONE
    ) -> MixerLayer:
        """A layer over loaded parameters.

        Args:
            tensors: parameters, by name.
            name: begins the names of the layer's own.
            index: of the layer in the layout of the state.
            collectives: the ranks, of which each has some heads or channels of the layer.
        """


class MixerLayer(Protocol):
    """A mixer of one layer, over loaded parameters."""

    @property
    def in_proj(self) -> Linear:
        """The first product."""

    def recur(self, product: torch.Tensor, kv: KVView) -> torch.Tensor:
        """Run the convolution and the recurrence.

        Args:
            product: [tokens, rows of in_proj]; any row stride.
            kv: the step's KV and state.

        Returns:
            [tokens, columns of the recurrence].
        """

    def finish(self, mixed: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """What comes between the recurrence and the last product.

        Args:
            mixed: the result of `recur`.
            product: as for `recur`.

        Returns:
            [tokens, columns of out_proj].
        """

    @property
    def out_proj(self) -> Linear:
        """The last product, [tokens, hidden]; what the results of all ranks add up to."""
