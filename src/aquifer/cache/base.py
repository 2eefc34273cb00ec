"""What a sequence keeps while it runs: one protocol, whatever the layout behind it.

A sequence is named by its slot, its place in the arrays of running sequences. The scheduler is
the only writer of progress; a manager derives pages from the token counts it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from aquifer.memory.pool import Owner, PagePool

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV of one token in one layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        """Elements of K and V together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token's KV looks like, token-major: `[layer][K, V][kv_head][head_dim]`.

    Token-major means that all layers of a token are neighbours, so that one page holds whole
    tokens and a sequence grows by one mapping, where the layout of vAttention (section 5) needs
    two a layer.
    """

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype

    @property
    def token_elements(self) -> int:
        """Elements of one token over all layers; the stride from token to token."""
        return sum(layer.num_elements for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.token_elements * self.dtype.itemsize

    def split(self, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of K and V for each layer.

        Args:
            tokens: [..., token_elements] of `dtype`.

        Returns:
            For each layer, K as [..., kv_heads, key_dim] and V as [..., kv_heads, value_dim].
        """
        views = []
        offset = 0
        for layer in self.layers:
            middle = offset + layer.num_kv_heads * layer.key_dim
            end = offset + layer.num_elements
            keys = tokens[..., offset:middle].unflatten(-1, (layer.num_kv_heads, layer.key_dim))
            values = tokens[..., middle:end].unflatten(-1, (layer.num_kv_heads, layer.value_dim))
            views.append((keys, values))
            offset = end
        return views


@dataclass(frozen=True, slots=True)
class Spans:
    """The tokens of one step: for each sequence the stretch [starts, starts + counts) of it.

    The tokens of sequence i occupy rows [offsets[i], offsets[i + 1]) of the step's flat tensors.
    """

    slots: IntArray  # [num_seqs]
    starts: IntArray  # [num_seqs], tokens already in the cache
    counts: IntArray  # [num_seqs], tokens to be written in this step, at least 1 each
    offsets: IntArray  # [num_seqs + 1]

    @classmethod
    def make(cls, slots: IntArray, starts: IntArray, counts: IntArray) -> Spans:
        """Spans in the order given."""
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return cls(slots, starts, counts, offsets)

    @property
    def num_tokens(self) -> int:
        """Rows of the step's flat tensors."""
        return int(self.offsets[-1])

    def rows(self) -> tuple[IntArray, IntArray]:
        """(slot, position) of every token of the step, each [num_tokens]."""
        first = np.repeat(self.starts - self.offsets[:-1], self.counts)
        return np.repeat(self.slots, self.counts), first + np.arange(self.num_tokens)


class KVView(Protocol):
    """The addresses of one step's KV, with attention over them. Made by `SequenceCache.view`."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window_tokens: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write this step's K and V of one layer, then attend causally over all there is.

        Args:
            layer: index into `KVLayout.layers`.
            query: [tokens, heads, key_dim], rotated already.
            key: [tokens, kv_heads, key_dim], rotated already.
            value: [tokens, kv_heads, value_dim].
            scale: factor on the dot products.
            window_tokens: attend to that many of the latest tokens only, the own one included.
            softcap: squash scores to (-softcap, softcap) with tanh before the softmax.

        Returns:
            [tokens, heads, value_dim].
        """


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a manager holds. `mapped_bytes == written_bytes + wasted_bytes`."""

    written_tokens: int
    written_bytes: int
    mapped_bytes: int

    @property
    def wasted_bytes(self) -> int:
        """Bytes mapped without a written token in them."""
        return self.mapped_bytes - self.written_bytes


class SequenceCache(Protocol):
    """Gives sequences room for tokens. Knows the layout, not the policy."""

    @property
    def layout(self) -> KVLayout:
        """What one token looks like."""

    def bytes_needed(self, num_tokens: int) -> int:
        """Pool bytes that a sequence of that length takes, page rounding included."""

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Make sure that each sequence has room for that many tokens in all.

        All or nothing: False means that the pool is short, and nothing has changed. Asking for
        less than a sequence has is no change.
        """

    def release(self, slot: int) -> None:
        """Forget a sequence and give back what it held."""

    def view(self, spans: Spans) -> KVView:
        """The addresses of one step. Pre-condition: room was reserved for it."""

    def stats(self, written_tokens: int) -> CacheStats:
        """What is held, given how many tokens the scheduler knows to be written."""

    def close(self) -> None:
        """Release all sequences and the addresses."""


CacheFactory = Callable[[PagePool, Owner, KVLayout, int, int], SequenceCache]
"""Builds a manager from (pool, owner, layout, max_seqs, max_tokens of one sequence)."""
