"""How a decoder is split over the ranks of a group: the spec of one rank, and its parameters.

As in Megatron-LM (Shoeybi et al., 2019, section 3): the first product of attention and of an MLP is
split by columns of its result, so that each rank has some heads and some of the width; the second
one by columns of its weight, so that the ranks' results add up to the whole. The vocabulary is
split for embeddings and logits. Norms, routers of experts and what latent attention compresses are
whole on each rank. KV heads are divided, or repeated where they are fewer than the ranks.

A bias of a second product is rank 0's; the others have zeros.
"""

from __future__ import annotations

from dataclasses import replace

from aquifer.models.spec import (
    Attention,
    DecoderSpec,
    Experts,
    HeadSpan,
    LatentAttention,
    Mlp,
)
from aquifer.parallel.mixers import split_mixer
from aquifer.parallel.share import CannotSplitError, Range, Share, part_of
from aquifer.weights.mxfp4 import BLOCK_VALUES
from aquifer.weights.parameters import Parameter
from aquifer.weights.shards import Shard


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
        self._share = Share(rank, size)
        self._mixer = None if spec.mixer is None else split_mixer(spec.mixer, self._share)
        shared = spec.shared
        if shared is not None:
            attention = self._of_heads(shared.attention)
            shared = replace(shared, attention=attention, mlp=self._mlp(shared.mlp))
        self.spec = replace(
            spec,
            attention=None if spec.attention is None else self._attention(spec.attention),
            mlp=None if spec.mlp is None else self._mlp(spec.mlp),
            experts=None if spec.experts is None else self._experts(spec.experts),
            mixer=None if self._mixer is None else self._mixer.mixer,
            shared=shared,
        )

    def shard(self, parameter: Parameter) -> Parameter:
        """The rank's part of a parameter of `DecoderPlan`; the parameter itself if it has all.

        Raises:
            CannotSplitError: the checkpoint stores it in a way that cannot be split so.
        """
        whole, name = self._whole, parameter.name
        if name in ("embed", "head", "head_bias"):
            return parameter.sharded(self._vocabulary())
        where, *rest = name.split(".", 2)
        if where == "layers":
            layer = whole.layers[int(rest[0])]
            mlp = whole.experts if layer.has_experts else whole.mlp
            return self._of_block(parameter, rest[1], whole.attention, mlp)
        if where in ("shared", "shared_uses"):
            assert whole.shared is not None
            return self._of_block(parameter, rest[1], whole.shared.attention, whole.shared.mlp)
        return parameter

    def _of_block(
        self,
        parameter: Parameter,
        place: str,
        attention: Attention | LatentAttention | None,
        mlp: Mlp | Experts | None,
    ) -> Parameter:
        """The rank's part of a parameter of a layer, or of a shared block.

        Args:
            parameter: the whole one.
            place: its name there.
            attention: of the layer.
            mlp: its MLP or experts.
        """
        if place.startswith("mixer."):
            assert self._mixer is not None
            return self._mixer.shard(parameter, place.removeprefix("mixer."))
        part, _, kind = place.partition(".")
        dims = (1, 0) if kind == "weight" and self._whole.names.are_transposed else (0, 1)
        match part:
            case "qkv_in_proj":
                assert attention is not None
                assert self._mixer is not None
                first = sum(attention.qkv_rows)
                of_mixer = [(first + start, first + stop) for start, stop in self._mixer.in_rows]
                return part_of(parameter, 0, [*self._qkv_rows(attention), *of_mixer])
            case "qkv":
                assert attention is not None
                return part_of(parameter, dims[0], self._qkv_rows(attention))
            case "qkv_second":  # [3, rows of a head's q, k or v, rank]
                return part_of(parameter, 1, [self._share.even(parameter.shape[1])])
            case "q_b" | "kv_b" | "sinks":
                return part_of(parameter, 0, [self._share.even(parameter.shape[0])])
            case "q_norm" | "k_norm":
                assert isinstance(attention, Attention)
                return self._of_head_norm(parameter, attention, is_query=part == "q_norm")
            case "up" | "up_second":
                assert mlp is not None
                return part_of(parameter, dims[0], self._halves(parameter.shape[dims[0]], mlp))
            case "out" | "down" if kind == "bias":
                return self._share.of_rank_0(parameter, 0)
            case "out" | "down":
                return part_of(parameter, dims[1], [self._share.even(parameter.shape[dims[1]])])
            case "experts_up" | "experts_up_bias":
                assert mlp is not None
                return part_of(parameter, 1, self._halves(parameter.shape[1], mlp))
            case "experts_down":
                start, stop = self._share.even(parameter.shape[2])
                is_mxfp4 = any(source.form.is_mxfp4 for source in parameter.sources)
                if is_mxfp4 and (stop - start) % BLOCK_VALUES:
                    raise CannotSplitError(
                        f"intermediate size of experts: {parameter.shape[2]}, stored in blocks of "
                        f"{BLOCK_VALUES} numbers"
                    )
                return part_of(parameter, 2, [(start, stop)])
            case "experts_down_bias":
                return self._share.of_rank_0(parameter, 1)
        return parameter

    # --- the spec of one rank ------------------------------------------------------------------

    def _attention(self, whole: Attention | LatentAttention) -> Attention | LatentAttention:
        if isinstance(whole, Attention):
            return self._of_heads(whole)
        return replace(whole, num_heads=self._share.count(whole.num_heads, "attention heads"))

    def _of_heads(self, whole: Attention) -> Attention:
        num_heads = self._share.count(whole.num_heads, "attention heads")
        num_kv_heads = self._share.count_or_one(whole.num_kv_heads, "KV heads")
        heads = whole.head_norm
        if heads is not None and heads.span is HeadSpan.ALL_HEADS and heads.norm.centred:
            raise CannotSplitError("a norm with a mean covers all of its heads")
        return replace(whole, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def _mlp(self, whole: Mlp) -> Mlp:
        return replace(whole, width=self._share.count(whole.width, "intermediate size"))

    def _experts(self, whole: Experts) -> Experts:
        width = self._share.count(whole.width, "intermediate size of experts")
        shared_width = self._share.count(
            whole.shared_width, "intermediate size of the shared expert"
        )
        return replace(whole, width=width, shared_width=shared_width)

    # --- what one rank has of a parameter ------------------------------------------------------

    def _vocabulary(self) -> Shard:
        whole = self._whole.vocab_size
        size = -(-whole // self._share.size)
        start = min(self._share.rank * size, whole)
        stop = min(start + size, whole)
        return Shard(0, whole, ((start, stop),) if start < stop else (), size)

    def _halves(self, num_rows: int, of: Mlp | Experts) -> list[Range]:
        """Rows of gate and up, one below the other; or of up alone, or both in turn."""
        is_interleaved = isinstance(of, Experts) and of.is_interleaved
        if not of.is_gated or is_interleaved:
            return [self._share.even(num_rows)]
        half = num_rows // 2
        return [self._share.even(half), self._share.even(half, half)]

    def _qkv_rows(self, of: Attention | LatentAttention) -> list[Range]:
        """Rows of the fused projection of attention."""
        if isinstance(of, LatentAttention):
            q_rows, kv_rows = of.qkv_rows
            compressed = (q_rows, q_rows + kv_rows)
            return [(0, q_rows) if of.q_rank else self._share.even(q_rows), compressed]
        q_rows, k_rows, _ = of.qkv_rows
        if of.is_grouped:
            return self._grouped_rows(of)
        gates = [self._share.even(q_rows)] if of.has_gate else []
        first = q_rows * len(gates)
        return [
            *gates,
            self._share.even(q_rows, first),
            self._share.some(of.num_kv_heads, of.head_dim, first + q_rows),
            self._share.some(of.num_kv_heads, of.head_dim, first + q_rows + k_rows),
        ]

    def _grouped_rows(self, of: Attention) -> list[Range]:
        """The same where each KV head's queries, key and value are neighbours."""
        num_queries = of.num_heads // of.num_kv_heads
        group_rows = (num_queries + 2) * of.head_dim
        start, stop = self._share.some(of.num_kv_heads, group_rows, 0)
        if of.num_kv_heads >= self._share.size:
            return [(start, stop)]
        own_rows = of.num_heads // self._share.size * of.head_dim
        first = self._share.rank * own_rows % (num_queries * of.head_dim)
        return [(start + first, start + first + own_rows), (stop - 2 * of.head_dim, stop)]

    def _of_head_norm(self, parameter: Parameter, of: Attention, *, is_query: bool) -> Parameter:
        """A norm of queries or keys, of which each head or each column may have weights."""
        assert of.head_norm is not None
        if of.head_norm.span is HeadSpan.HEAD:
            return parameter
        width = of.head_dim if of.head_norm.span is HeadSpan.ALL_HEADS else 1
        num_heads = of.num_heads if is_query else of.num_kv_heads
        return part_of(parameter, 0, [self._share.some(num_heads, width, 0)])
