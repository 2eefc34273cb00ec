"""View of the recurrent state of one step, and what runs over it in layers that have any."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from aquifer.cache.spans import Rows
from aquifer.errors import InvariantError
from aquifer.kernels import Recording


class Recurrence(Protocol):
    """The part of a layer that reads and writes recurrent state: convolution and recurrence.

    It runs between the pieces of a captured step, as attention does (`engine.chunk_graphs`), and
    within the graphs of steps that decode. So the shapes of its launches depend on the rows alone,
    and it never waits for the device.
    """

    @property
    def out_columns(self) -> int:
        """Columns of the result."""

    @property
    def kind(self) -> Hashable:
        """Equal for layers that launch the same kernels, for tensors of the same shapes."""

    @property
    def weights(self) -> Sequence[torch.Tensor] | None:
        """The layer's own tensors that its kernels read, in an order that is that of all layers of
        its kind; None if it launches more than our own kernels, and so cannot be repeated."""

    def run(
        self,
        inputs: torch.Tensor,
        out: torch.Tensor,
        states: Sequence[torch.Tensor],
        rows: Rows,
    ) -> None:
        """Update the state of each sequence by its rows.

        A sequence begins with state 0: where a row's position, or the start of a chunk, is 0, the
        state is not read. Rows with slot -1 are padding: they change no state.

        Args:
            inputs: [at least rows, columns], results of the layer's first product.
            out: [at least rows, out_columns]; the rows that are no padding are written.
            states: the layer's tensors of `StateLayout`, [slots, *shape] each, of which the first
                stride is any; in and out.
            rows: the step's tokens. The first `rows.num_decodes` are one token each; the others are
                `rows.chunks`.
        """


class StateView:
    """The recurrent state of one step's sequences.

    Args:
        layers: the tensors of each layer, [slots, *shape].
        rows: the step's tokens.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], rows: Rows) -> None:
        self._layers = layers
        self._rows = rows
        self._recordings: dict[Hashable, Recording] = {}

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        """See `KVView.recur`."""
        out = inputs.new_empty(len(inputs), recurrence.out_columns)
        self._run(layer, inputs, out, recurrence)
        return out

    def recur_into(
        self, layer: int, inputs: torch.Tensor, out: torch.Tensor, recurrence: Recurrence
    ) -> None:
        """See `LaunchView.recur_into`. Layers of a kind repeat the launches of the first one."""
        weights = recurrence.weights
        if weights is None:
            self._run(layer, inputs, out, recurrence)
            return
        tensors = inputs, out, *self._layers[layer], *weights
        recording = self._recordings.get(recurrence.kind)
        if recording is not None and recording.fits(*tensors):
            recording.repeat(*tensors)
            return
        with Recording(*tensors) as recording:
            self._run(layer, inputs, out, recurrence)
        self._recordings[recurrence.kind] = recording

    def _run(
        self, layer: int, inputs: torch.Tensor, out: torch.Tensor, recurrence: Recurrence
    ) -> None:
        num_tokens = len(self._rows.slots)
        recurrence.run(inputs[:num_tokens], out[:num_tokens], self._layers[layer], self._rows)


class WithoutState:
    """The methods of a `KVView` for state, where no layer has any."""

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        """See `KVView.recur`."""
        raise InvariantError("no layer of this cache has recurrent state")

    def recur_into(
        self, layer: int, inputs: torch.Tensor, out: torch.Tensor, recurrence: Recurrence
    ) -> None:
        """See `LaunchView.recur_into`."""
        raise InvariantError("no layer of this cache has recurrent state")
