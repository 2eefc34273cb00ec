"""What a sequence keeps while it runs: one protocol, whatever the layout behind it.

A sequence is named by its slot, its place in the arrays of running sequences. The scheduler is
the only writer of progress; a manager derives pages from the token counts it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.footprint import Footprint
from aquifer.kernels.prefill_attention import PrefillSpans
from aquifer.memory.pool import Owner, PagePool
from aquifer.memory.transfer import upload

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
    # Of one token over all layers; asked for too often to be added up each time.
    token_elements: int = field(init=False)  # the stride from token to token
    token_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        token_elements = sum(layer.num_elements for layer in self.layers)
        object.__setattr__(self, "token_elements", token_elements)
        object.__setattr__(self, "token_bytes", token_elements * self.dtype.itemsize)

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


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one step, on the device of the KV. The rows that decode come first."""

    slots: torch.Tensor  # [tokens] int64; -1 for a row that only pads the batch
    positions: torch.Tensor  # [tokens] int64
    # [num_decodes], positions + 1, or 0 for padding: rows of one token each that attend to all KV
    # of their sequence.
    decode_lengths: torch.Tensor
    chunks: PrefillSpans | None  # all other rows: several tokens of a sequence each

    @classmethod
    def of(cls, spans: Spans, num_decodes: int, device: torch.device) -> Rows:
        """The rows of `spans`, of which the first `num_decodes` have one token each.

        On the host, rows that decode are chunks of one token: that is the fast way there.
        """
        if device.type == "cpu":
            num_decodes = 0
        slots, positions = spans.rows()
        chunks = slice(num_decodes, None)
        num_chunks = len(spans.slots) - num_decodes
        # One copy for all.
        packed = upload(
            np.concatenate(
                (slots, positions, spans.slots[chunks], spans.starts[chunks], spans.offsets[chunks])
            ),
            device,
        )
        sizes = (len(slots), len(slots), num_chunks, num_chunks, num_chunks + 1)
        row_slots, row_positions, chunk_slots, chunk_starts, chunk_offsets = packed.split(sizes)
        return cls(
            row_slots,
            row_positions,
            row_positions[:num_decodes] + 1,
            PrefillSpans(
                slots=spans.slots[chunks].tolist(),
                starts=spans.starts[chunks].tolist(),
                offsets=spans.offsets[chunks].tolist(),
                device_slots=chunk_slots,
                device_starts=chunk_starts,
                device_offsets=chunk_offsets,
            )
            if num_chunks
            else None,
        )

    @property
    def num_decodes(self) -> int:
        """How many rows, from the first, have a sequence to themselves."""
        return len(self.decode_lengths)


class KVView(Protocol):
    """The addresses of one step's KV, with attention over them. Made by `SequenceCache.view`.

    For each layer, first this step's K and V are written, by `write` or by a kernel that is given
    `destination`; then `attend` reads all there is.
    """

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where this step's K and V of one layer go: (keys, values, first, second).

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

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window_tokens: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attend causally over all KV of one layer, this step's included.

        Args:
            layer: index into `KVLayout.layers`.
            query: [tokens, heads, key_dim], rotated already.
            scale: factor on the dot products.
            window_tokens: attend to that many of the latest tokens only, the own one included.
            softcap: squash scores to (-softcap, softcap) with tanh before the softmax.

        Returns:
            [tokens, heads, value_dim].
        """


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a manager holds. `mapped_bytes + shared_bytes == written_bytes + wasted_bytes`."""

    written_tokens: int  # of all sequences: a token that several share counts for each
    written_bytes: int
    mapped_bytes: int  # of pages that sequences use, each counted once
    shared_bytes: int = 0  # what sharing saves: for each block, its size for every user but one

    @property
    def wasted_bytes(self) -> int:
        """Bytes mapped without a written token in them."""
        return self.mapped_bytes + self.shared_bytes - self.written_bytes


class Blocks(Protocol):
    """What sequences share, and what is kept when they have ended: whole blocks of KV.

    Of a paged cache these are its blocks, of a virtual one its pages. A block has a number, which
    stays the same for as long as anybody uses or holds it. A block that is shared is never written
    to: a sequence writes only to blocks that it alone has.
    """

    @property
    def layout(self) -> KVLayout:
        """What one token looks like."""

    @property
    def block_bytes(self) -> int:
        """Size of a block."""

    @property
    def footprint(self) -> Footprint:
        """Pages and bytes that tokens take."""

    def tokens_in(self, num_blocks: int) -> int:
        """How many tokens lie in the first blocks of a sequence, the last whole one included."""

    def tokens_touching(self, num_blocks: int) -> int:
        """How many tokens have any byte in the first blocks: at least `tokens_in`.

        The contents of these blocks depend on so many tokens, and on nothing else.
        """

    def blocks(self, slot: int, num_tokens: int) -> list[int]:
        """The blocks that the first tokens of a sequence lie in, in order.

        Pre-condition: room was reserved for so many.
        """

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep blocks when no sequence uses them any more. Each must be dropped once.

        Pre-condition: no sequence will write to them any more. Of one that goes on, those are the
        blocks that lie before its next token.

        A held block that no sequence uses is accounted as a retained prefix (`Kind.PREFIX`).
        """

    def drop(self, blocks: Sequence[int]) -> None:
        """End what `hold` began; whatever nobody uses or holds any more is given back."""


class SequenceCache(Blocks, Protocol):
    """Gives sequences room for tokens. Knows the layout, not the policy.

    The verbs of PagedAttention (section 5.2) are `fork`, `reserve` (append) and `release` (free).
    """

    @property
    def can_share(self) -> bool:
        """Whether `adopt` and `fork` share blocks, and `hold` keeps them; else they copy all."""

    def bytes_needed(self, num_tokens: int) -> int:
        """Pool bytes that a sequence of that length takes, page rounding included."""

    def expect(self, slot: int, num_prompt: int, num_total: int) -> None:
        """Say how long the sequence of a slot is and may become; called before anything else of it.

        For managers that reserve all of it beforehand; others need not know.
        """

    def reserve(self, slots: IntArray, num_tokens: IntArray) -> bool:
        """Make sure that each sequence has room for that many tokens in all.

        All or nothing: False means that the pool is short, and nothing has changed. Asking for
        less than a sequence has is no change.
        """

    def release(self, slot: int) -> None:
        """Forget a sequence and give back what it held, but for what others use or hold."""

    def adopt(self, slot: int, blocks: Sequence[int], num_tokens: int) -> bool:
        """Begin a sequence in an empty slot with `num_tokens` tokens that are in `blocks` already.

        Blocks that end at or before the last of these tokens are shared. If the sequence's next
        token goes to the last block too, that one is copied: copy-on-write (section 4.4), done at
        once, because whoever adopts writes in its very next step. The copies of all calls between
        two `upload`s are one launch.

        All or nothing: False means that the pool is short, and nothing has changed.

        Args:
            slot: has no tokens yet.
            blocks: those that the tokens lie in, as `blocks` gives them; in use or held.
            num_tokens: at least 1.
        """

    def fork(self, parent: int, child: int, num_tokens: int) -> bool:
        """Let an empty slot share the first tokens of another one: `adopt` of the parent's blocks.

        Copies read what the steps launched so far have written.
        """

    def preferred_slot(self, blocks: Sequence[int], free_slots: Sequence[int]) -> int | None:
        """The free slot that could adopt these blocks at the least cost; None if all are alike."""

    def copy_out(self, slot: int, tokens: range, target: torch.Tensor) -> None:
        """Copy the KV of a stretch of tokens to host memory, after all that was launched so far.

        Args:
            slot: whose.
            tokens: which, all written or to be written by steps launched already.
            target: uint8, len(tokens) * layout.token_bytes, page-locked where that is faster.
        """

    def copy_in(self, slot: int, tokens: range, source: torch.Tensor) -> None:
        """The opposite of `copy_out`. Pre-condition: room was reserved, and shared with nobody."""

    def upload(self) -> None:
        """Let the device know of what was reserved, and make the copies that `adopt` asked for.

        To be called before each step, and before `copy_in` and `copy_out`.
        """

    def view(self, rows: Rows) -> KVView:
        """The addresses of one step. Pre-condition: room was reserved for it.

        It reads nothing but tensors, so that a captured step stays valid as its rows change.
        """

    def stats(self, written_tokens: int) -> CacheStats:
        """What is held, given how many tokens the scheduler knows to be written."""

    def close(self) -> None:
        """Release all sequences and the addresses. Pre-condition: no block is held."""


CacheFactory = Callable[[PagePool, Owner, KVLayout, int, int], SequenceCache]
"""Builds a manager from (pool, owner, layout, max_seqs, max_tokens of one sequence)."""
