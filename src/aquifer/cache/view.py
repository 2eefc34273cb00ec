"""View of the KV of one step: its addresses, and attention over them, for both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

import torch

from aquifer.cache.spans import Rows
from aquifer.kernels import Recording
from aquifer.kernels.decode_attention import DecodeWorkspaces, decode_attention
from aquifer.kernels.prefill_attention import prefill_attention


class _Arguments(TypedDict):
    scale: float
    window_tokens: int | None
    softcap: float | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends.

    Options are equal if they need the same kernels: they may have different sinks.

    Args:
        scale: factor on the dot products.
        window_tokens: attend only to this many latest tokens, the row's own included; None for all.
        softcap: squash scores to (-softcap, softcap) with tanh before the softmax; None for not.
        sinks: [heads], contiguous, see `kernels/sinks.py`; None for none.

    Attributes:
        has_sinks: whether there are sinks.
    """

    scale: float
    window_tokens: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    has_sinks: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_sinks", self.sinks is not None)

    def arguments(self) -> _Arguments:
        """Arguments of the attention kernels."""
        return {
            "scale": self.scale,
            "window_tokens": self.window_tokens,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }


class KVView(Protocol):
    """The addresses of one step's KV, with attention over them. Made by `KVTensors.view`.

    For each layer, first this step's K and V are written, by `write` or by a kernel that gets
    `destination`; then `attend` reads all KV of the layer.
    """

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Destination of this step's K and V of one layer: (keys, values, first, second).

        Row i belongs at `keys[first[i], second[i]]` and `values[first[i], second[i]]`; nowhere if
        `first[i]` is negative. `keys` is [slots or blocks, tokens, kv_heads, key_dim].
        """

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write this step's K and V of one layer.

        Args:
            layer: index into `KVLayout.layers`.
            key: [tokens, kv_heads, key_dim], rotated already.
            value: [tokens, kv_heads, value_dim].
        """

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        """Attend causally over all KV of one layer, this step's included.

        Args:
            layer: index into `KVLayout.layers`.
            query: [tokens, heads, key_dim], rotated already.
            how: scale, window and the like.

        Returns:
            [tokens, heads, value_dim].
        """


class LaunchView(KVView, Protocol):
    """A `KVView` that can also attend between the pieces of a captured step."""

    def attend_into(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, how: AttentionOptions
    ) -> None:
        """The same as `attend`, with less work on the host from the second layer on.

        Args:
            layer: as in `attend`.
            query: [at least tokens, heads, key_dim].
            out: [at least tokens, heads, value_dim]; its first rows are overwritten.
            how: as in `attend`.
        """


class KVSource(Protocol):
    """Gives the addresses of a step's KV: `KVTensors`, or a `KVFollower` of another process."""

    def view(self, rows: Rows) -> LaunchView:
        """The addresses of one step. Pre-condition: room was reserved for it."""

    def rehearse(self) -> None:
        """Launch the kernels that change KV or tables over nothing, to compile or load them."""


class StepView:
    """The `KVView` of both layouts, which differ only in whether a token is found by a table.

    Args:
        layers: K and V of each layer, [slots, max_tokens, kv_heads, dim], or for a paged cache
            [blocks, block_size, kv_heads, dim].
        rows: the step's tokens.
        tables: [slots, max_blocks], the blocks of each slot; None where a slot is contiguous.
        workspaces: workspaces of the decode kernel, kept from step to step.
    """

    def __init__(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: Rows,
        tables: torch.Tensor | None,
        workspaces: DecodeWorkspaces,
    ) -> None:
        self._layers = layers
        self._rows = rows
        self._tables = tables
        self._workspaces = workspaces
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self._recordings: dict[AttentionOptions, Recording] = {}

    @property
    def _row_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and second index of each row's KV; see `destination`."""
        if self._places is None:
            rows = self._rows
            if self._tables is None:
                self._places = rows.slots, rows.positions
            else:
                block_size = self._layers[0][0].shape[1]
                blocks = self._tables[rows.slots, rows.positions // block_size].long()
                self._places = (
                    torch.where(rows.slots < 0, -1, blocks),
                    rows.positions % block_size,
                )
        return self._places

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `KVView.destination`."""
        return *self._layers[layer], *self._row_places

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `KVView.write`. Not for padded rows."""
        keys, values = self._layers[layer]
        keys[self._row_places] = key
        values[self._row_places] = value

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        """See `KVView.attend`."""
        keys, values = self._layers[layer]
        num_decodes, chunks = self._rows.num_decodes, self._rows.chunks
        out: torch.Tensor | None = None
        if num_decodes:
            out = query.new_empty(*query.shape[:2], values.shape[-1])
            self._attend_decodes(query, keys, values, out, how)
        if chunks is None:
            assert out is not None, "a step has rows"
            return out
        return prefill_attention(query, keys, values, self._tables, chunks, out, **how.arguments())

    def attend_into(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, how: AttentionOptions
    ) -> None:
        """See `LaunchView.attend_into`."""
        keys, values = self._layers[layer]
        tensors = [query, keys, values, out]
        if how.sinks is not None:
            tensors.append(how.sinks)
        recording = self._recordings.get(how)
        if recording is not None and recording.fits(*tensors):
            recording.repeat(*tensors)
            return
        num_tokens = len(self._rows.slots)
        query, out = query[:num_tokens], out[:num_tokens]
        with Recording(*tensors) as recording:
            if self._rows.num_decodes:
                self._attend_decodes(query, keys, values, out, how)
            if self._rows.chunks is not None:
                prefill_attention(
                    query, keys, values, self._tables, self._rows.chunks, out, **how.arguments()
                )
        self._recordings[how] = recording

    def _attend_decodes(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        how: AttentionOptions,
    ) -> None:
        """Write the rows of `out` that decode."""
        num_decodes = self._rows.num_decodes
        workspace, config = self._workspaces.get(
            query[:num_decodes], values, paged=self._tables is not None
        )
        decode_attention(
            query[:num_decodes],
            keys,
            values,
            self._tables,
            self._rows.slots[:num_decodes],
            self._rows.decode_lengths,
            out[:num_decodes],
            workspace,
            config=config,
            **how.arguments(),
        )


class GroupedView:
    """The `KVView` of a model whose layers lie in several caches.

    Args:
        views: of each cache.
        places: for each layer, the index of its cache, and its own index in that cache.
    """

    def __init__(self, views: Sequence[StepView], places: Sequence[tuple[int, int]]) -> None:
        self._views = views
        self._places = places

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `KVView.destination`."""
        part, index = self._places[layer]
        return self._views[part].destination(index)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `KVView.write`. Not for padded rows."""
        part, index = self._places[layer]
        self._views[part].write(index, key, value)

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        """See `KVView.attend`."""
        part, index = self._places[layer]
        return self._views[part].attend(index, query, how)

    def attend_into(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, how: AttentionOptions
    ) -> None:
        """See `LaunchView.attend_into`."""
        part, index = self._places[layer]
        self._views[part].attend_into(index, query, out, how)
