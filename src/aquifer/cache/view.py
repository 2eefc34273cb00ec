"""View of the KV of one step: its addresses, and attention over them, for both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

import torch

from aquifer.cache.layout import KVLayout, LayerKV
from aquifer.cache.spans import Rows
from aquifer.cache.state_view import Recurrence, WithoutState
from aquifer.kernels import Recording
from aquifer.kernels.decode_attention import DecodeWorkspaces, decode_attention
from aquifer.kernels.kv_write import kv_write
from aquifer.kernels.latent_attention import (
    LatentWorkspaces,
    latent_decode_attention,
    latent_prefill_attention,
    latent_prefill_attention_fixed,
)
from aquifer.kernels.prefill_attention import (
    PrefillSpans,
    prefill_attention,
    prefill_attention_fixed,
)
from aquifer.kernels.prefill_merge import DeviceSpans


class _Arguments(TypedDict):
    scale: float
    window_tokens: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends.

    Options are equal if they need the same kernels: they may have different sinks and slopes.

    Args:
        scale: factor on the dot products.
        window_tokens: attend only to this many latest tokens, the row's own included; None for all.
        softcap: squash scores to (-softcap, softcap) with tanh before the softmax; None for not.
        sinks: [heads], contiguous, see `kernels/sinks.py`; None for none.
        slopes: [heads] float32, contiguous, see `kernels/alibi.py`; None for none.

    Attributes:
        has_sinks: whether there are sinks.
        has_slopes: whether there are slopes.
    """

    scale: float
    window_tokens: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    slopes: torch.Tensor | None = field(default=None, compare=False)
    has_sinks: bool = field(init=False)
    has_slopes: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_sinks", self.sinks is not None)
        object.__setattr__(self, "has_slopes", self.slopes is not None)

    def arguments(self) -> _Arguments:
        """Arguments of the attention kernels."""
        return {
            "scale": self.scale,
            "window_tokens": self.window_tokens,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "slopes": self.slopes,
        }


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Workspaces of the kernels for rows that decode, kept from step to step."""

    heads: DecodeWorkspaces = field(default_factory=DecodeWorkspaces)
    latent: LatentWorkspaces = field(default_factory=LatentWorkspaces)


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
            value: [tokens, kv_heads, value_dim]; where KV is latent, the first part of the key.
        """

    @property
    def decoding(self) -> DecodingView | None:
        """The view if each row is the only token of its sequence, and all of a layer is launched at
        once, else None: a step that is captured in pieces ends one where it attends."""

    def whole_prompts(self) -> PrefillSpans | None:
        """The chunks of a step that has no other rows, and in which each begins its sequence.

        None for any other step, and for one whose sequences are not known while it is captured.
        """

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        """Attend causally over all KV of one layer, this step's included.

        Args:
            layer: index into `KVLayout.layers`.
            query: [tokens, heads, key_dim], rotated already; where KV is latent, multiplied by
                the matrix that a latent row would be expanded with.
            how: scale, window and the like.

        Returns:
            [tokens, heads, value_dim].
        """

    def recur(self, layer: int, inputs: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
        """Run a layer's recurrence over this step's tokens.

        Args:
            layer: index into `StateLayout.layers`.
            inputs: [tokens, columns]; any row stride.
            recurrence: what to run.

        Returns:
            [tokens, recurrence.out_columns].
        """


class DecodingView(Protocol):
    """What a `KVView` can also do where each row is the only token of its sequence."""

    def attend_beside(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, how: AttentionOptions
    ) -> None:
        """The same as `attend`, at the same time as the kernel launched before it.

        That kernel must be one that releases early, and `query` and KV must be written before it.

        Args:
            layer: as in `attend`, likewise `query` and `how`.
            out: [tokens, heads, value_dim], allocated before that kernel was launched; overwritten.
        """


class LaunchView(KVView, Protocol):
    """A `KVView` that can also attend between the pieces of a captured step."""

    def attend_into(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        how: AttentionOptions,
    ) -> None:
        """The same as `attend`, with less work on the host from the second layer on.

        Args:
            layer: as in `attend`.
            query: [at least tokens, heads, key_dim].
            out: [at least tokens, heads, value_dim]; its first rows are overwritten.
            how: as in `attend`.
        """

    def recur_into(
        self, layer: int, inputs: torch.Tensor, out: torch.Tensor, recurrence: Recurrence
    ) -> None:
        """The same as `recur`.

        Args:
            layer: as in `recur`.
            inputs: [at least tokens, columns].
            out: [at least tokens, recurrence.out_columns]; its first rows are overwritten.
            recurrence: as in `recur`.
        """


class KVSource(Protocol):
    """Gives the addresses of a step's KV: `KVTensors`, or a `KVFollower` of another process."""

    def view(self, rows: Rows) -> LaunchView:
        """The addresses of one step. Pre-condition: room was reserved for it."""

    def rehearse(self) -> None:
        """Launch the kernels that change KV or tables over nothing, to compile or load them."""


class StepView(WithoutState):
    """The `KVView` of both caches, which differ only in whether a token is found by a table.

    Layers with latent KV have kernels of their own.

    Args:
        layout: layout of one token's KV.
        layers: K and V of each layer, [slots, max_tokens, kv_heads, dim], or for a paged cache
            [blocks, block_size, kv_heads, dim].
        rows: the step's tokens.
        tables: [slots, max_blocks], the blocks of each slot; None where a slot is contiguous.
        workspaces: workspaces of the decode kernels.
    """

    def __init__(
        self,
        layout: KVLayout,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: Rows,
        tables: torch.Tensor | None,
        workspaces: Workspaces,
    ) -> None:
        self._layout = layout
        self._layers = layers
        self._rows = rows
        self._tables = tables
        self._workspaces = workspaces
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self._recordings: dict[tuple[LayerKV, AttentionOptions], Recording] = {}

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
        """See `KVView.write`."""
        if self._layout.layers[layer].is_latent:
            value = key[..., : value.shape[-1]]  # the same bytes
        kv_write(key, value, *self.destination(layer))

    @property
    def decoding(self) -> DecodingView | None:
        """See `KVView.decoding`."""
        rows = self._rows
        return self if rows.chunks is None and rows.fixed_chunks is None else None

    def attend_beside(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, how: AttentionOptions
    ) -> None:
        """See `DecodingView.attend_beside`."""
        self._attend_decodes(layer, query, out, how, beside=True)

    def whole_prompts(self) -> PrefillSpans | None:
        """See `KVView.whole_prompts`."""
        chunks = self._rows.chunks
        if chunks is None or self._rows.num_decodes or any(chunks.starts):
            return None
        return chunks

    def attend(self, layer: int, query: torch.Tensor, how: AttentionOptions) -> torch.Tensor:
        """See `KVView.attend`."""
        rows = self._rows
        if rows.chunks is not None and not rows.num_decodes:
            return self._attend_chunks(layer, query, None, how)
        out = query.new_empty(*query.shape[:2], self._layers[layer][1].shape[-1])
        if rows.num_decodes:
            self._attend_decodes(layer, query, out, how)
        if rows.chunks is not None:
            self._attend_chunks(layer, query, out, how)
        if rows.fixed_chunks is not None:
            self._attend_fixed(layer, query, out, rows.fixed_chunks, how)
        return out

    def attend_into(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        how: AttentionOptions,
    ) -> None:
        """See `LaunchView.attend_into`."""
        keys, values = self._layers[layer]
        tensors = [query, keys, out]
        if not self._layout.layers[layer].is_latent:
            tensors.append(values)
        tensors += [each for each in (how.sinks, how.slopes) if each is not None]
        key = (self._layout.layers[layer], how)
        recording = self._recordings.get(key)
        if recording is not None and recording.fits(*tensors):
            recording.repeat(*tensors)
            return
        rows = self._rows
        num_tokens = len(rows.slots)
        query, own = query[:num_tokens], out[:num_tokens]
        with Recording(*tensors) as recording:
            if rows.num_decodes:
                self._attend_decodes(layer, query, own, how)
            if rows.chunks is not None:
                self._attend_chunks(layer, query, own, how)
        self._recordings[key] = recording

    def _attend_chunks(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor | None,
        how: AttentionOptions,
    ) -> torch.Tensor:
        """Write the rows of `out` that are of chunks, or of a new tensor; returns it."""
        keys, values = self._layers[layer]
        chunks = self._rows.chunks
        assert chunks is not None
        if self._layout.layers[layer].is_latent:
            if out is None:
                out = query.new_empty(*query.shape[:2], values.shape[-1])
            latent_prefill_attention(query, keys, self._tables, chunks, out, scale=_only_scale(how))
            return out
        return prefill_attention(query, keys, values, self._tables, chunks, out, **how.arguments())

    def _attend_fixed(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        chunks: DeviceSpans,
        how: AttentionOptions,
    ) -> None:
        """Write the rows of `out` that are of chunks of a step that is captured whole."""
        keys, values = self._layers[layer]
        if self._layout.layers[layer].is_latent:
            latent_prefill_attention_fixed(
                query, keys, self._tables, chunks, out, scale=_only_scale(how)
            )
            return
        prefill_attention_fixed(query, keys, values, self._tables, chunks, out, **how.arguments())

    def _attend_decodes(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        how: AttentionOptions,
        *,
        beside: bool = False,
    ) -> None:
        """Write the rows of `out` that decode; `beside` is ignored where KV is latent."""
        keys, values = self._layers[layer]
        rows, tables = self._rows, self._tables
        num_decodes = rows.num_decodes
        query, out = query[:num_decodes], out[:num_decodes]
        slots, lengths = rows.slots[:num_decodes], rows.decode_lengths
        if self._layout.layers[layer].is_latent:
            found = self._workspaces.latent.get(query, values.shape[-1], paged=tables is not None)
            latent_decode_attention(
                query, keys, tables, slots, lengths, out, *found, scale=_only_scale(how)
            )
            return
        workspace, config = self._workspaces.heads.get(query, values, paged=tables is not None)
        decode_attention(
            query,
            keys,
            values,
            tables,
            slots,
            lengths,
            out,
            workspace,
            config=config,
            beside=beside,
            **how.arguments(),
        )


def _only_scale(how: AttentionOptions) -> float:
    """The scale of a layer with latent KV, whose kernels know no other option."""
    assert how == AttentionOptions(how.scale), "latent attention has neither window nor softcap"
    return how.scale
