"""How a decoder is split over the ranks of a group: the spec of one rank, and its parameters.

As in Megatron-LM (Shoeybi et al., 2019, section 3): the first product of attention and of an MLP is
split by columns of its result, so that each rank has some heads and some of the width; the second
one by columns of its weight, so that the ranks' results add up to the whole. The vocabulary is
split for embeddings and logits. Norms, routers of experts and what latent attention compresses are
whole on each rank. KV heads are divided, or repeated where they are fewer than the ranks.

A bias of a second product is rank 0's; the others have zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aquifer.models.mixers.base import Mixer
from aquifer.models.mixers.mamba2 import Mamba2
from aquifer.models.spec import (
    Attention,
    DecoderSpec,
    Experts,
    HeadSpan,
    LatentAttention,
    Mlp,
)
from aquifer.weights.mxfp4 import BLOCK_VALUES
from aquifer.weights.parameters import Parameter
from aquifer.weights.shards import Shard

_Range = tuple[int, int]


class CannotSplitError(ValueError):
    """A decoder cannot be split over so many ranks; the message says why."""


class DecoderSplit:
    """What one rank has of a decoder.

    Args:
        spec: the whole decoder.
        rank: the rank.
        size: number of ranks.

    Attributes:
        spec: the decoder as the rank computes it: with its heads and widths.

    Raises:
        CannotSplitError: it cannot be split so.
    """

    def __init__(self, spec: DecoderSpec, rank: int, size: int) -> None:
        self._whole = spec
        self._rank = rank
        self._size = size
        if spec.shared is not None:
            raise CannotSplitError("its layers share blocks, which are not split")
        self.spec = replace(
            spec,
            attention=self._attention(spec.attention),
            mlp=self._mlp(spec.mlp),
            experts=self._experts(spec.experts),
            mixer=self._mixer(spec.mixer),
        )

    def shard(self, parameter: Parameter) -> Parameter:
        """The rank's part of a parameter of `DecoderPlan`; the parameter itself if it has all.

        Raises:
            CannotSplitError: the checkpoint stores it in a way that cannot be split so.
        """
        name = parameter.name
        if name.startswith("layers."):
            of_layer = self._whole.layers[int(name.split(".")[1])]
            place = name.split(".", 2)[2]
            is_of_experts = of_layer.has_experts
        else:
            place, is_of_experts = name, False
        if place in ("embed", "head", "head_bias"):
            return parameter.sharded(self._vocabulary())
        if place.startswith("mixer."):
            return self._of_mixer(parameter, place.removeprefix("mixer."))
        part, _, kind = place.partition(".")
        dims = (1, 0) if kind == "weight" and self._whole.names.are_transposed else (0, 1)
        match part:
            case "qkv_in_proj":
                ranges = self._qkv_rows()
                mixer = self._whole.mixer
                assert isinstance(mixer, Mamba2)
                assert self._whole.attention is not None
                first = sum(self._whole.attention.qkv_rows)
                ranges += [(first + start, first + stop) for start, stop in self._in_rows(mixer)]
                return _of(parameter, 0, ranges)
            case "qkv":
                return _of(parameter, dims[0], self._qkv_rows())
            case "q_b" | "kv_b" | "sinks":
                return _of(parameter, 0, [self._even(parameter.shape[0])])
            case "q_norm" | "k_norm":
                return self._of_head_norm(parameter, part)
            case "up":
                mlp = self._whole.experts if is_of_experts else self._whole.mlp
                assert mlp is not None
                return _of(parameter, dims[0], self._halves(parameter.shape[dims[0]], mlp))
            case "out" | "down" if kind == "bias":
                return self._of_rank_0(parameter, 0)
            case "out" | "down":
                return _of(parameter, dims[1], [self._even(parameter.shape[dims[1]])])
            case "experts_up" | "experts_up_bias":
                experts = self._whole.experts
                assert experts is not None
                return _of(parameter, 1, self._halves(parameter.shape[1], experts))
            case "experts_down":
                start, stop = self._even(parameter.shape[2])
                is_mxfp4 = any(source.form.is_mxfp4 for source in parameter.sources)
                if is_mxfp4 and (stop - start) % BLOCK_VALUES:
                    raise CannotSplitError(
                        f"intermediate size of experts: {parameter.shape[2]}, stored in blocks of "
                        f"{BLOCK_VALUES} numbers"
                    )
                return _of(parameter, 2, [(start, stop)])
            case "experts_down_bias":
                return self._of_rank_0(parameter, 1)
        return parameter

    # --- the spec of one rank ------------------------------------------------------------------

    def _attention(
        self, whole: Attention | LatentAttention | None
    ) -> Attention | LatentAttention | None:
        if whole is None:
            return None
        num_heads = self._share(whole.num_heads, "attention heads")
        if isinstance(whole, LatentAttention):
            return replace(whole, num_heads=num_heads)
        num_kv_heads = self._share_or_repeat(whole.num_kv_heads, "KV heads")
        heads = whole.head_norm
        if heads is not None and heads.span is HeadSpan.ALL_HEADS and heads.norm.centred:
            raise CannotSplitError("a norm with a mean covers all of its heads")
        return replace(whole, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def _mlp(self, whole: Mlp | None) -> Mlp | None:
        if whole is None:
            return None
        return replace(whole, width=self._share(whole.width, "intermediate size"))

    def _experts(self, whole: Experts | None) -> Experts | None:
        if whole is None:
            return None
        width = self._share(whole.width, "intermediate size of experts")
        shared_width = self._share(whole.shared_width, "intermediate size of the shared expert")
        return replace(whole, width=width, shared_width=shared_width)

    def _mixer(self, whole: Mixer | None) -> Mixer | None:
        if whole is None:
            return None
        if not isinstance(whole, Mamba2):
            raise CannotSplitError(
                f"layers of the kind {type(whole).__name__} are not split, only Mamba2"
            )
        num_groups = self._share_or_repeat(whole.num_groups, "groups of Mamba heads")
        if whole.norm_eps is not None and whole.num_groups % self._size:
            raise CannotSplitError(
                f"the norm of its Mamba layers covers {whole.num_groups} groups of heads"
            )
        num_heads = self._share(whole.num_heads, "Mamba heads")
        return replace(whole, num_heads=num_heads, num_groups=num_groups)

    def _share(self, count: int, what: str) -> int:
        if count % self._size:
            raise CannotSplitError(f"{what}: {count}")
        return count // self._size

    def _share_or_repeat(self, count: int, what: str) -> int:
        if count % self._size and self._size % count:
            raise CannotSplitError(f"{what}: {count}")
        return max(count // self._size, 1)

    # --- what one rank has of a parameter ------------------------------------------------------

    def _even(self, whole: int, begin: int = 0) -> _Range:
        """The rank's share of so many neighbouring indices."""
        share = whole // self._size
        return begin + self._rank * share, begin + (self._rank + 1) * share

    def _some(self, count: int, width: int, begin: int) -> _Range:
        """The rank's share of some heads of a width, which may be fewer than the ranks."""
        share = max(count // self._size, 1)
        first = self._rank * count // self._size
        return begin + first * width, begin + (first + share) * width

    def _vocabulary(self) -> Shard:
        whole = self._whole.vocab_size
        size = -(-whole // self._size)
        start = min(self._rank * size, whole)
        stop = min(start + size, whole)
        return Shard(0, whole, ((start, stop),) if start < stop else (), size)

    def _halves(self, num_rows: int, of: Mlp | Experts) -> list[_Range]:
        """Rows of gate and up, one below the other; or of up alone, or both in turn."""
        is_interleaved = isinstance(of, Experts) and of.is_interleaved
        if not of.is_gated or is_interleaved:
            return [self._even(num_rows)]
        half = num_rows // 2
        return [self._even(half), self._even(half, half)]

    def _qkv_rows(self) -> list[_Range]:
        """Rows of the fused projection of attention."""
        of = self._whole.attention
        if isinstance(of, LatentAttention):
            q_rows, kv_rows = of.qkv_rows
            compressed = (q_rows, q_rows + kv_rows)
            return [(0, q_rows) if of.q_rank else self._even(q_rows), compressed]
        assert of is not None
        q_rows, k_rows, _ = of.qkv_rows
        if of.is_grouped:
            return self._grouped_rows(of)
        gates = [self._even(q_rows)] if of.has_gate else []
        first = q_rows * len(gates)
        return [
            *gates,
            self._even(q_rows, first),
            self._some(of.num_kv_heads, of.head_dim, first + q_rows),
            self._some(of.num_kv_heads, of.head_dim, first + q_rows + k_rows),
        ]

    def _grouped_rows(self, of: Attention) -> list[_Range]:
        """The same where each KV head's queries, key and value are neighbours."""
        num_queries = of.num_heads // of.num_kv_heads
        group_rows = (num_queries + 2) * of.head_dim
        start, stop = self._some(of.num_kv_heads, group_rows, 0)
        if of.num_kv_heads >= self._size:
            return [(start, stop)]
        own_rows = of.num_heads // self._size * of.head_dim
        first = self._rank * own_rows % (num_queries * of.head_dim)
        return [(start + first, start + first + own_rows), (stop - 2 * of.head_dim, stop)]

    def _of_head_norm(self, parameter: Parameter, part: str) -> Parameter:
        """A norm of queries or keys, of which each head or each column may have weights."""
        of = self._whole.attention
        assert isinstance(of, Attention)
        assert of.head_norm is not None
        if of.head_norm.span is HeadSpan.HEAD:
            return parameter
        width = of.head_dim if of.head_norm.span is HeadSpan.ALL_HEADS else 1
        num_heads = of.num_heads if part == "q_norm" else of.num_kv_heads
        return _of(parameter, 0, [self._some(num_heads, width, 0)])

    def _in_rows(self, of: Mamba2) -> list[_Range]:
        """Rows of the first product of Mamba-2: gate, x, b, c and dt."""
        width = of.width
        gate, x = self._even(width), self._even(width, width)
        b, c = (
            self._some(of.num_groups, of.state_size, begin)
            for begin in (2 * width, 2 * width + of.group_columns)
        )
        return [gate, x, b, c, self._even(of.num_heads, 2 * width + 2 * of.group_columns)]

    def _of_mixer(self, parameter: Parameter, place: str) -> Parameter:
        of = self._whole.mixer
        assert isinstance(of, Mamba2)
        match place:
            case "in_proj.weight" | "in_proj.bias":
                return _of(parameter, 0, self._in_rows(of))
            case "conv1d.weight" | "conv1d.bias":
                _, *columns, _ = self._in_rows(of)
                ranges = [(start - of.width, stop - of.width) for start, stop in columns]
                return _of(parameter, 0, ranges)
            case "out_proj.weight":
                return _of(parameter, 1, [self._even(of.width)])
            case "out_proj.bias":
                return self._of_rank_0(parameter, 0)
        return _of(parameter, 0, [self._even(parameter.shape[0])])

    def _of_rank_0(self, parameter: Parameter, dim: int) -> Parameter:
        """What rank 0 adds for all: all of it there, and zeros on the other ranks."""
        if self._rank == 0:
            return parameter
        size = parameter.shape[dim]
        return parameter.sharded(Shard(dim, size, (), size))


def _of(parameter: Parameter, dim: int, ranges: Sequence[_Range]) -> Parameter:
    """The part of a parameter with these indices of a dimension."""
    size = sum(stop - start for start, stop in ranges)
    return parameter.sharded(Shard(dim, parameter.shape[dim], tuple(ranges), size))
