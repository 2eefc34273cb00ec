"""Decoder of the families that `aquifer.models.families` describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aquifer.cache.base import AttentionOptions, KVLayout, KVView
from aquifer.kernels import KERNEL_ALIGNMENT_BYTES
from aquifer.kernels.activation import activate
from aquifer.kernels.alibi import alibi_slopes
from aquifer.kernels.experts import experts, route
from aquifer.kernels.linear import linear, norm_linear, silu_linear
from aquifer.kernels.norm import NormWeights, add_norm, norm_heads
from aquifer.kernels.rotary import qk_norm_rope_write
from aquifer.models.base import ModelInput
from aquifer.models.latent import LatentLayer
from aquifer.models.rope import RotaryAngles
from aquifer.models.spec import Attention, DecoderSpec, HeadSpan, LatentAttention, Layer, Norm

_Tensors = Mapping[str, torch.Tensor]
_Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [tokens, rotated dims / 2]


def _norm_weights(tensors: _Tensors, name: str, norm: Norm | None) -> NormWeights | None:
    if norm is None:
        return None
    bias = tensors.get(f"{name}.bias")
    return NormWeights(tensors[f"{name}.weight"], bias, norm.eps, norm.centred, norm.plus_one)


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]

    @classmethod
    def of(cls, tensors: _Tensors, name: str, *, is_transposed: bool) -> _Linear:
        weight = tensors[f"{name}.weight"]
        return cls(weight.T if is_transposed else weight, tensors.get(f"{name}.bias"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _ExpertWeights:
    """The weights of a mixture of experts."""

    router: torch.Tensor  # [experts, hidden]
    choice_bias: torch.Tensor | None  # [experts] float32
    up: torch.Tensor  # [experts, 2 * width, hidden], gate and up
    down: torch.Tensor  # [experts, hidden, width]
    router_bias: torch.Tensor | None  # [experts]
    up_bias: torch.Tensor | None  # [experts, 2 * width]
    down_bias: torch.Tensor | None  # [experts, hidden]
    shared_gate: torch.Tensor | None  # [1, hidden]


def _rounded(number: float, dtype: torch.dtype) -> float:
    """A factor in a dtype, to which Transformers rounds it too."""
    return float(torch.tensor(number, dtype=dtype, device="cpu").item())


class _LayerWeights:
    """The weights of one layer; None for those that the decoder has not."""

    def __init__(
        self, spec: DecoderSpec, tensors: _Tensors, index: int, slopes: torch.Tensor | None
    ) -> None:
        name, block = f"layers.{index}.", spec.block
        heads = spec.attention if isinstance(spec.attention, Attention) else None
        head_norm = None if heads is None else heads.head_norm

        def norm(place: str, of: Norm | None) -> NormWeights | None:
            return _norm_weights(tensors, name + place, of)

        def matrix(place: str) -> _Linear:
            is_transposed = spec.names.are_transposed
            return _Linear.of(tensors, name + place, is_transposed=is_transposed)

        self.index = index
        self.layer: Layer = spec.layers[index]
        self.how = AttentionOptions(
            self.layer.scale,
            self.layer.window_tokens,
            None if heads is None else heads.softcap,
            tensors.get(f"{name}sinks"),
            slopes,
        )
        self.before_attention = norm("before_attention", block.before_attention)
        self.after_attention = norm("after_attention", block.after_attention)
        self.before_mlp = norm("before_mlp", block.before_mlp)
        self.after_mlp = norm("after_mlp", block.after_mlp)
        self.q_norm = None if head_norm is None else norm("q_norm", head_norm.norm)
        self.k_norm = None if head_norm is None else norm("k_norm", head_norm.norm)
        self.latent = None
        if isinstance(spec.attention, LatentAttention):
            self.latent = LatentLayer(spec.attention, tensors, index, self.how)
        self.qkv, self.out = matrix("qkv"), matrix("out")
        # Of the MLP, or of the shared expert.
        self.mlp = (matrix("up"), matrix("down")) if f"{name}up.weight" in tensors else None
        self.experts = None
        if self.layer.has_experts:
            self.experts = _ExpertWeights(
                tensors[f"{name}router"],
                tensors.get(f"{name}choice_bias"),
                tensors[f"{name}experts_up"],
                tensors[f"{name}experts_down"],
                tensors.get(f"{name}router_bias"),
                tensors.get(f"{name}experts_up_bias"),
                tensors.get(f"{name}experts_down_bias"),
                tensors.get(f"{name}shared_gate"),
            )


@dataclass(slots=True)
class _Stream:
    """The residual stream, and what is still to be added to it.

    Adding is left to the next norm, which does both in one pass.
    """

    residual: torch.Tensor  # [tokens, hidden]
    context_lengths: torch.Tensor  # [tokens], see `ModelInput`
    deltas: tuple[torch.Tensor, ...] = ()  # [tokens, hidden] each
    after: NormWeights | None = None  # norm of the only delta
    scale: float = 1.0  # factor on the deltas


class Decoder:
    """`Model` of a `DecoderSpec`.

    Args:
        spec: the decoder.
        kv_layout: layout of one token's KV.
        tensors: parameters of `DecoderPlan`, by name.
        layers: the layers to run; None for all.
    """

    is_capturable = True

    def __init__(
        self,
        spec: DecoderSpec,
        kv_layout: KVLayout,
        tensors: _Tensors,
        layers: Sequence[int] | None = None,
    ) -> None:
        self._spec = spec
        self._tensors = tensors
        self.kv_layout = kv_layout
        self.vocab_size = spec.vocab_size
        self._embed = tensors["embed"]
        self._embed_scale = _rounded(spec.embed_scale, self._embed.dtype)
        self._embed_norm = _norm_weights(tensors, "embed_norm", spec.embed_norm)
        self._positions = tensors.get("positions")
        self._ropes = [RotaryAngles(rope, self._embed.device) for rope in spec.ropes]
        numbers = range(len(spec.layers)) if layers is None else layers
        # Attention of heads with keys and values of their own; None for latent attention.
        self._heads = spec.attention if isinstance(spec.attention, Attention) else None
        heads = None if self._heads is None else self._heads.head_norm
        slopes = None
        if self._heads is not None and self._heads.has_alibi:
            slopes = alibi_slopes(self._heads.num_heads, self._embed.device)
        self._layers = [_LayerWeights(spec, tensors, index, slopes) for index in numbers]
        # Whether queries and keys are normalised by the kernel that rotates them.
        self._norms_in_place = (
            heads is not None and heads.span is HeadSpan.HEAD and not heads.norm.centred
        )
        self._norm = _norm_weights(tensors, "norm", spec.norm)
        self._head = tensors.get("head", self._embed)
        self._head_bias = tensors.get("head_bias")

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        """See `Model.forward`."""
        angles = [rope(batch.positions, batch.context_lengths) for rope in self._ropes]
        stream = _Stream(self._embedding(batch), batch.context_lengths)
        is_parallel = self._spec.block.is_parallel
        for layer in self._layers:
            run = self._parallel if is_parallel else self._serial
            run(stream, layer, angles, kv)
        return self._normed(stream, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        head = self._spec.head
        logits = linear(hidden, self._head, self._head_bias)
        if head.scale != 1.0:
            logits = logits * head.scale
        if head.softcap is not None:
            logits = torch.tanh(logits / head.softcap) * head.softcap
        return logits

    def rehearsal(self) -> Decoder:
        """The first layer, before which nothing is added to the residual, and one of each kind."""
        # A kernel is compiled for aligned addresses and for others.
        alignments = self.kv_layout.alignments(KERNEL_ALIGNMENT_BYTES)
        kinds = [
            (layer.window_tokens, layer.rope, layer.has_experts, alignment)
            for layer, alignment in zip(self._spec.layers, alignments, strict=True)
        ]
        layers = [0, *(i for i, kind in enumerate(kinds) if i and kind not in kinds[1:i])]
        return Decoder(self._spec, self.kv_layout, self._tensors, layers)

    # --- parts of a step ---------------------------------------------------------------------

    def _embedding(self, batch: ModelInput) -> torch.Tensor:
        """The stream before the first layer, [tokens, hidden]."""
        spec = self._spec
        hidden = F.embedding(batch.token_ids, self._embed)
        if self._embed_scale != 1.0:
            hidden = hidden * self._embed_scale
        if self._embed_norm is not None:
            hidden, _ = add_norm(hidden, (), None, self._embed_norm, 1.0)
        if self._positions is not None and spec.positions is not None:
            rows = (batch.positions + spec.positions.offset).clamp(max=spec.positions.num_rows - 1)
            hidden = hidden + F.embedding(rows, self._positions)
        return hidden

    def _serial(
        self, stream: _Stream, layer: _LayerWeights, angles: Sequence[_Angles], kv: KVView
    ) -> None:
        """Attention, and then the MLP of what it has changed."""
        qkv = self._norm_linear(stream, layer.before_attention, layer.qkv)
        attended = self._attention(layer, qkv, angles, kv)
        self._add(stream, layer.after_attention, layer.out(attended))
        if layer.experts is not None:
            normed = self._normed(stream, layer.before_mlp)
            self._add(stream, layer.after_mlp, *self._mixture(layer, layer.experts, normed, stream))
            return
        assert layer.mlp is not None, "a layer has an MLP or experts"
        up, down = layer.mlp
        product = self._norm_linear(stream, layer.before_mlp, up)
        self._add(stream, layer.after_mlp, self._down(down, product))

    def _parallel(
        self, stream: _Stream, layer: _LayerWeights, angles: Sequence[_Angles], kv: KVView
    ) -> None:
        """Attention and MLP of the same stream."""
        normed = self._normed(stream, layer.before_attention)
        own = normed if layer.before_mlp is None else self._normed(stream, layer.before_mlp)
        attended = layer.out(self._attention(layer, layer.qkv(normed), angles, kv))
        assert layer.mlp is not None, "no family has experts beside attention"
        up, down = layer.mlp
        self._add(stream, None, attended, self._down(down, up(own)))

    def _attention(
        self, layer: _LayerWeights, qkv: torch.Tensor, angles: Sequence[_Angles], kv: KVView
    ) -> torch.Tensor:
        """Write KV to the cache and attend: [tokens, rows of the projection] -> [tokens, columns of
        the output projection]."""
        cos, sin = (None, None) if layer.layer.rope is None else angles[layer.layer.rope]
        if layer.latent is not None:
            assert cos is not None, "latent attention is rotated"
            assert sin is not None
            return layer.latent.attend(qkv, cos, sin, kv)
        of = self._heads
        assert of is not None
        query = qkv.new_empty(len(qkv), of.num_heads, of.head_dim)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if q_norm is not None and k_norm is not None and not self._norms_in_place:
            self._norm_heads(of, qkv, q_norm, k_norm)
            q_norm = k_norm = None
        qk_norm_rope_write(
            qkv,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            cos,
            sin,
            query,
            *kv.destination(layer.index),
            eps=0.0 if q_norm is None else q_norm.eps,
            plus_one=q_norm is not None and q_norm.plus_one,
            is_interleaved=of.is_interleaved,
            is_grouped=of.is_grouped,
        )
        return kv.attend(layer.index, query, layer.how).flatten(1)

    def _norm_heads(
        self, of: Attention, qkv: torch.Tensor, q_norm: NormWeights, k_norm: NormWeights
    ) -> None:
        """Normalise queries and keys in place."""
        q_rows, k_rows, _ = of.qkv_rows
        heads = of.head_norm
        is_one_row = heads is not None and heads.span is HeadSpan.ALL_HEADS
        for rows, norm in (
            (qkv[:, :q_rows], q_norm),
            (qkv[:, q_rows : q_rows + k_rows], k_norm),
        ):
            width = rows.shape[1] if is_one_row else of.head_dim
            norm_heads(rows.unflatten(1, (-1, width)), norm)

    def _down(self, down: _Linear, up: torch.Tensor) -> torch.Tensor:
        """The second half of the MLP: activation and the last product."""
        mlp = self._spec.mlp
        if mlp.activation == "silu" and mlp.is_gated:
            return silu_linear(up, down.weight, down.bias)
        return down(activate(up, mlp.activation, is_gated=mlp.is_gated))

    def _mixture(
        self, layer: _LayerWeights, weights: _ExpertWeights, x: torch.Tensor, stream: _Stream
    ) -> tuple[torch.Tensor, ...]:
        """What the experts of each token and the shared expert add to the stream."""
        of = self._spec.experts
        assert of is not None
        out_dtype = torch.float32 if of.routes_in_float32 else None
        logits = linear(x, weights.router, weights.router_bias, out_dtype=out_dtype)
        ids, factors = route(
            logits, of.top_k, of.routing, weights.choice_bias, lengths=stream.context_lengths
        )
        own = experts(
            x,
            weights.up,
            weights.down,
            ids,
            factors,
            of.activation,
            weights.up_bias,
            weights.down_bias,
            interleaved=of.is_interleaved,
        )
        if layer.mlp is None:
            return (own,)
        up, down = layer.mlp
        shared = self._down(down, up(x))
        if weights.shared_gate is not None:
            shared = torch.sigmoid(linear(x, weights.shared_gate, None)) * shared
        return own, shared

    # --- the residual stream -----------------------------------------------------------------

    def _add(self, stream: _Stream, after: NormWeights | None, *deltas: torch.Tensor) -> None:
        """Note what the next norm adds to the stream."""
        stream.deltas, stream.after = deltas, after
        stream.scale = self._spec.block.residual_scale

    def _normed(self, stream: _Stream, norm: NormWeights | None) -> torch.Tensor:
        """Add what is to be added; the norm of the stream, or without a norm the stream itself."""
        normed, stream.residual = add_norm(
            stream.residual, stream.deltas, stream.after, norm, stream.scale
        )
        stream.deltas, stream.after = (), None
        return normed

    def _norm_linear(
        self, stream: _Stream, norm: NormWeights | None, matrix: _Linear
    ) -> torch.Tensor:
        """The product of the normed stream and a matrix."""
        is_plain = norm is not None and norm.is_plain_rms and len(stream.deltas) <= 1
        if not is_plain or stream.after is not None or stream.scale != 1.0:
            return matrix(self._normed(stream, norm))
        assert norm is not None
        delta = stream.deltas[0] if stream.deltas else None
        product, stream.residual = norm_linear(
            delta, stream.residual, norm.weight, norm.eps, matrix.weight, matrix.bias
        )
        stream.deltas = ()
        return product
