"""View of the KV and state of one step of a model whose layers lie in several caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aquifer.cache.state_view import Recurrence, StateView, WithoutState
from aquifer.cache.view import AttentionOptions, DecodingView, StepView
from aquifer.kernels.prefill_attention import PrefillSpans


class GroupedView:
    """The `KVView` of a model whose layers lie in several caches.

    Args:
        views: of each cache of KV.
        places: for each layer with KV, the index of its cache, and its own index in that cache.
        state: the state of layers that have any; None if none has.
    """

    def __init__(
        self,
        views: Sequence[StepView],
        places: Sequence[tuple[int, int]],
        state: StateView | None = None,
    ) -> None:
        self._views = views
        self._places = places
        self._state = state or WithoutState()

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `KVView.destination`."""
        part, index = self._places[layer]
        return self._views[part].destination(index)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `KVView.write`."""
        part, index = self._places[layer]
        self._views[part].write(index, key, value)

    @property
    def decoding(self) -> DecodingView | None:
        """See `KVView.decoding`."""
        return None if self._views[0].decoding is None else self

    def attend_beside(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, how: AttentionOptions
    ) -> None:
        """See `DecodingView.attend_beside`."""
        part, index = self._places[layer]
        decoding = self._views[part].decoding
        assert decoding is not None, "some rows do not decode"
        decoding.attend_beside(index, query, out, how)

    def whole_prompts(self) -> PrefillSpans | None:
        """See `KVView.whole_prompts`."""
        return self._views[0].whole_prompts()

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        """See `KVView.attend`."""
        part, index = self._places[layer]
        return self._views[part].attend(index, query, how)

    def attend_into(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        how: AttentionOptions,
    ) -> None:
        """See `LaunchView.attend_into`."""
        part, index = self._places[layer]
        self._views[part].attend_into(index, query, out, how)

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        """See `KVView.recur`."""
        return self._state.recur(layer, inputs, recurrence)

    def recur_into(
        self, layer: int, inputs: torch.Tensor, out: torch.Tensor, recurrence: Recurrence
    ) -> None:
        """See `LaunchView.recur_into`."""
        self._state.recur_into(layer, inputs, out, recurrence)
