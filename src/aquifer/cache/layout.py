"""The bytes of one token's KV, and those of one sequence's recurrent state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from aquifer.errors import ConfigError

_ALIGNMENT_BYTES = 256
"""Alignment of a sequence's state, and of each tensor in it, for wide loads."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV of one token in one layer.

    Args:
        num_kv_heads: heads of keys and values.
        key_dim: elements of a head's key.
        value_dim: elements of a head's value.
        window_tokens: the layer attends only to this many latest tokens, the row's own included, so
            that older KV need not be kept; None for a layer that attends to all.
        is_latent: whether a value is the first `value_dim` elements of its key, without bytes of
            its own: the compressed KV of multi-head latent attention, one row for all heads.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None = None
    is_latent: bool = False

    def __post_init__(self) -> None:
        assert not self.is_latent or self.num_kv_heads == 1
        assert not self.is_latent or self.value_dim < self.key_dim

    @property
    def key_elements(self) -> int:
        """Elements of the keys of all heads."""
        return self.num_kv_heads * self.key_dim

    @property
    def num_elements(self) -> int:
        """Elements of K and V together."""
        return self.key_elements + (0 if self.is_latent else self.num_kv_heads * self.value_dim)

    @property
    def value_start(self) -> int:
        """Elements before the first value."""
        return 0 if self.is_latent else self.key_elements


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the KV of the same tokens of a sequence.

    Attributes:
        layout: layout of one token's KV in these layers.
        layers: their indices in the layout of all layers.
        window_tokens: the widest window of these layers; None if they attend to all tokens.
    """

    layout: KVLayout
    layers: tuple[int, ...]
    window_tokens: int | None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of one token's KV: `[layer][K, V][kv_head][head_dim]`.

    Token-major, all layers of a token are neighbours, so that one page holds whole tokens and a
    sequence grows by one mapping. Layer-major, as in vAttention (section 5.1), K and V of each
    layer have a buffer of their own, and a sequence grows by a page in each. A layer of latent
    attention has `[latent, rotated key]`, and no V.

    A model without KV has no layers, and its tokens no bytes.
    """

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    # One token over all layers; computed once, since it is read often.
    token_elements: int = field(init=False)  # the stride from token to token
    token_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        token_elements = sum(layer.num_elements for layer in self.layers)
        object.__setattr__(self, "token_elements", token_elements)
        object.__setattr__(self, "token_bytes", token_elements * self.dtype.itemsize)

    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers that attend to all tokens, and those that have a window; neither is empty.

        Layers of different windows are one group, which keeps what the widest one needs. A layout
        without windows is one group, also if it has no layers.
        """
        found: list[LayerGroup] = []
        for has_window in (False, True):
            layers = tuple(
                i for i, layer in enumerate(self.layers) if bool(layer.window_tokens) == has_window
            )
            if layers or not (self.layers or has_window):
                members = tuple(self.layers[i] for i in layers)
                window = max((layer.window_tokens or 0 for layer in members), default=0) or None
                found.append(LayerGroup(KVLayout(members, self.dtype), layers, window))
        return tuple(found)

    def attention_operations(self, num_heads: int | None) -> float:
        """Operations of one token's attention to one other token, over all layers.

        Each query head multiplies and adds once with every element of its K and V.

        Args:
            num_heads: query heads of each layer; None for as many as KV heads.
        """
        return sum(
            2.0 * (num_heads or layer.num_kv_heads) * (layer.key_dim + layer.value_dim)
            for layer in self.layers
        )

    def alignments(self, num_bytes: int) -> list[tuple[int, int]]:
        """The byte offsets of each layer's K and V in its group's token, modulo `num_bytes`."""
        found: dict[int, tuple[int, int]] = {}
        for group in self.groups():
            offset = 0
            for index in group.layers:
                layer = self.layers[index]
                places = (offset, offset + layer.value_start)
                key, value = (place * self.dtype.itemsize % num_bytes for place in places)
                found[index] = (key, value)
                offset += layer.num_elements
        return [found[index] for index in range(len(self.layers))]

    @property
    def num_buffers(self) -> int:
        """Buffers of layer-major KV: for K and for V of each layer, and one where KV is latent.

        Raises:
            ConfigError: these are not of equal size.
        """
        if len({layer.num_elements // _num_buffers(layer) for layer in self.layers}) > 1 or any(
            layer.key_dim != layer.value_dim for layer in self.layers if not layer.is_latent
        ):
            raise ConfigError(
                "kv_layout layer-major needs keys and values of the same size in all layers, which "
                "this model does not have; use token-major"
            )
        return max(sum(map(_num_buffers, self.layers)), 1)

    def split_buffers(self, buffers: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of K and V for each layer of layer-major KV.

        Args:
            buffers: [num_buffers, ..., token_elements / num_buffers] of `dtype`.

        Returns: as `split`.
        """
        views = []
        index = 0
        for layer in self.layers:
            shape = (layer.num_kv_heads, layer.key_dim)
            keys = buffers[index].unflatten(-1, shape)
            if layer.is_latent:
                values = keys[..., : layer.value_dim]
            else:
                values = buffers[index + 1].unflatten(-1, shape)
            views.append((keys, values))
            index += _num_buffers(layer)
        return views

    def split(self, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of K and V for each layer.

        Args:
            tokens: [..., token_elements] of `dtype`.

        Returns:
            For each layer, K as [..., kv_heads, key_dim] and V as [..., kv_heads, value_dim], which
            is a part of K where KV is latent.
        """
        views = []
        offset = 0
        for layer in self.layers:
            middle = offset + layer.key_elements
            end = offset + layer.num_elements
            keys = tokens[..., offset:middle].unflatten(-1, (layer.num_kv_heads, layer.key_dim))
            if layer.is_latent:
                values = keys[..., : layer.value_dim]
            else:
                shape = (layer.num_kv_heads, layer.value_dim)
                values = tokens[..., middle:end].unflatten(-1, shape)
            views.append((keys, values))
            offset = end
        return views


def _num_buffers(layer: LayerKV) -> int:
    return 1 if layer.is_latent else 2


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the recurrent state that a layer keeps of a sequence."""

    name: str
    shape: tuple[int, ...]  # without the dimension of sequences
    dtype: torch.dtype
    traffic: float = 2.0  # bytes that a token which decodes reads and writes, by the tensor's size

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor for one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Recurrent state of one sequence: `[layer][tensor]`, however many tokens the sequence has.

    Tensors begin at multiples of 256 bytes.

    Attributes:
        layers: the tensors of each layer that has state.
        num_bytes: bytes of one sequence's state, a multiple of 256.
    """

    layers: tuple[tuple[StateTensor, ...], ...]
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        num_bytes = sum(_aligned(each.num_bytes) for layer in self.layers for each in layer)
        object.__setattr__(self, "num_bytes", num_bytes)

    @property
    def traffic_bytes(self) -> int:
        """Bytes that a token which decodes reads and writes, the mean over tokens."""
        return round(sum(each.traffic * each.num_bytes for layer in self.layers for each in layer))

    def offsets(self) -> list[list[int]]:
        """Offset in bytes of each layer's tensors in a sequence's state."""
        offsets, end = [], 0
        for layer in self.layers:
            of_layer = []
            for each in layer:
                of_layer.append(end)
                end += _aligned(each.num_bytes)
            offsets.append(of_layer)
        return offsets


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
