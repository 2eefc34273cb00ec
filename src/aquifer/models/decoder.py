"""Decoder of the families that `aquifer.models.families` describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from aquifer.cache.base import KVLayout, KVView
from aquifer.kernels import KERNEL_ALIGNMENT_BYTES
from aquifer.kernels.activation import activate, sigmoid_mul
from aquifer.kernels.alibi import alibi_slopes
from aquifer.kernels.beside import at_once
from aquifer.kernels.experts import experts, route
from aquifer.kernels.linear import linear, silu_linear
from aquifer.kernels.norm import NormWeights, add_norm, norm_heads
from aquifer.kernels.rotary import qk_norm_rope_write
from aquifer.models.base import ModelInput, Wanted
from aquifer.models.collectives import ALONE, Collectives
from aquifer.models.layer_weights import AttentionWeights, ExpertWeights, LayerWeights
from aquifer.models.mixers.base import MixerLayer
from aquifer.models.rope import RotaryAngles
from aquifer.models.shared_block import SharedLayer
from aquifer.models.spec import (
    Attention,
    DecoderSpec,
    Experts,
    HeadSpan,
    Layer,
    Mlp,
    SharedUse,
)
from aquifer.models.stream import Stream
from aquifer.models.tensors import Linear, Tensors, added_products, norm_rows, norm_weights
from aquifer.models.vocabulary import Vocabulary

_AT_ONCE = range(2, 129)
"""Sequences of a step that decodes in which attention and a mixer of the same input run at the same
time. By measurement (benchmarks/gpu): fewer gain nothing, and more are bound by bandwidth."""

_Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [tokens, rotated dims / 2]


def _rounded(number: float, dtype: torch.dtype) -> float:
    """A factor in a dtype, to which Transformers rounds it too."""
    return float(torch.tensor(number, dtype=dtype, device="cpu").item())


def _is_silu_gated(of: Mlp | Experts | None) -> bool:
    """Whether the activation of an MLP is `silu_mul`, which is fused with a product."""
    return of is not None and of.activation == "silu" and of.is_gated


def _down(down: Linear, up: torch.Tensor, of: Mlp | Experts | None) -> torch.Tensor:
    """The second half of an MLP: activation and the last product."""
    assert of is not None
    if _is_silu_gated(of):
        return silu_linear(up, down.weight, down.bias)
    return down(activate(up, of.activation, is_gated=of.is_gated))


def _num_deltas(spec: DecoderSpec, layer: Layer) -> int:
    """How many results of its last part a layer leaves to be added to the stream."""
    if spec.block.is_parallel:
        return 2
    if layer.has_experts:
        return 2 if spec.experts is not None and spec.experts.shared_width else 1
    return 2 if layer.has_attention and layer.has_mixer and not layer.has_mlp else 1


class Decoder:
    """`Model` of a `DecoderSpec`.

    Args:
        spec: the decoder.
        kv_layout: layout of one token's KV.
        tensors: parameters of `DecoderPlan`, by name.
        layers: the layers to run; None for all.
        collectives: the other ranks that have parts of the parameters; `spec` then has the heads
            and widths of one rank.
    """

    is_capturable = True

    def __init__(
        self,
        spec: DecoderSpec,
        kv_layout: KVLayout,
        tensors: Tensors,
        layers: Sequence[int] | None = None,
        collectives: Collectives = ALONE,
    ) -> None:
        self._spec = spec
        self._tensors = tensors
        self._collectives = collectives
        self.kv_layout = kv_layout
        self.vocab_size = spec.vocab_size
        self._vocabulary = Vocabulary(spec.head, tensors, collectives)
        device = self._vocabulary.device
        self._embed_scale = _rounded(spec.embed_scale, self._vocabulary.dtype)
        self._embed_norm = norm_weights(tensors, "embed_norm", spec.embed_norm)
        self._positions = tensors.get("positions")
        self._ropes = [RotaryAngles(rope, device) for rope in spec.ropes]
        numbers = range(len(spec.layers)) if layers is None else layers
        # Attention of heads with keys and values of their own; None for latent attention.
        self._heads = spec.attention if isinstance(spec.attention, Attention) else None
        heads = None if self._heads is None else self._heads.head_norm
        slopes = None
        if self._heads is not None and self._heads.has_alibi:
            slopes = alibi_slopes(self._heads.num_heads * collectives.size, device)
            slopes = slopes.chunk(collectives.size)[collectives.rank]
        self._layers = [
            LayerWeights(spec, tensors, index, slopes, collectives) for index in numbers
        ]
        # Whether queries and keys are normalised by the kernel that rotates them.
        self._norms_in_place = (
            heads is not None and heads.span is HeadSpan.HEAD and not heads.norm.centred
        )
        self._norm = norm_weights(tensors, "norm", spec.norm)

    def forward(self, batch: ModelInput, kv: KVView) -> torch.Tensor:
        """See `Model.forward`."""
        angles = [rope(batch.positions, batch.context_lengths) for rope in self._ropes]
        block = self._spec.block
        hidden = self._embedding(batch)
        # The stream is added to in place.
        embedding = None if self._spec.shared is None else hidden.clone()
        stream = Stream(hidden, batch.context_lengths, block.residual_scale, embedding)
        for layer in self._layers:
            if layer is self._layers[-1] and self._can_narrow(layer):
                stream.wanted = batch.wanted
            run = self._parallel if block.is_parallel else self._serial
            run(stream, layer, angles, kv)
        hidden = stream.normed(self._norm)
        return hidden if stream.wanted is not None else batch.of_wanted(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self._vocabulary.logits(hidden)

    def rehearsal(self) -> Decoder:
        """The first layer, before which nothing is added to the residual, and one of each kind."""
        # A kernel is compiled for aligned addresses and for others.
        alignments = self.kv_layout.alignments(KERNEL_ALIGNMENT_BYTES)
        spec = self._spec
        counts = [1] * len(spec.layers)
        if self._collectives.size == 1:
            counts = [_num_deltas(spec, layer) for layer in spec.layers]
        kinds: set[tuple[object, ...]] = set()
        layers = [0]
        for i, layer in enumerate(spec.layers[1:], 1):
            index = spec.kv_indices[i]
            alignment = None if index is None else alignments[index]
            kind = self._kind(layer), alignment, counts[i - 1]
            if kind not in kinds:
                kinds.add(kind)
                layers += [i] if counts[layers[-1]] == counts[i - 1] else [i - 1, i]
        return Decoder(spec, self.kv_layout, self._tensors, layers, self._collectives)

    @staticmethod
    def _kind(layer: Layer) -> Layer:
        """A layer that launches the same kernels."""
        use = None if layer.shared_use is None else SharedUse(0, 0)
        return replace(layer, scale=1.0, shared_use=use)

    # --- parts of a step ---------------------------------------------------------------------

    def _embedding(self, batch: ModelInput) -> torch.Tensor:
        """The stream before the first layer, [tokens, hidden]."""
        spec = self._spec
        hidden = self._vocabulary.embed(batch.token_ids)
        if self._embed_scale != 1.0:
            hidden = hidden * self._embed_scale
        if self._embed_norm is not None:
            hidden, _ = add_norm(hidden, (), None, self._embed_norm, 1.0)
        if self._positions is not None and spec.positions is not None:
            rows = (batch.positions + spec.positions.offset).clamp(max=spec.positions.num_rows - 1)
            hidden = hidden + F.embedding(rows, self._positions)
        return hidden

    def _can_narrow(self, layer: LayerWeights) -> bool:
        """Whether the layer can go on with some rows only, once all have written their KV."""
        attention = layer.attention
        return (
            attention is not None
            and attention.latent is None
            and layer.mixer is None
            and not self._spec.block.is_parallel
        )

    def _serial(
        self, stream: Stream, layer: LayerWeights, angles: Sequence[_Angles], kv: KVView
    ) -> None:
        """Attention or a mixer, and then the MLP of what it has changed; or one of the two."""
        self._mix(stream, layer, angles, kv)
        if layer.experts is not None:
            normed = stream.normed(layer.before_mlp)
            self._add(stream, layer.after_mlp, self._mixture(layer, layer.experts, normed, stream))
        elif layer.mlp is not None:
            up, down = layer.mlp
            gated = _is_silu_gated(self._spec.mlp)
            product = stream.norm_linear(layer.before_mlp, up, gated=gated)
            result = down(product) if gated else _down(down, product, self._spec.mlp)
            self._add(stream, layer.after_mlp, [result])

    def _add(
        self, stream: Stream, after: NormWeights | None, partials: Sequence[torch.Tensor]
    ) -> None:
        """Add to the stream what the last products of all ranks add up to."""
        stream.add(after, *self._collectives.total(*partials))

    def _mix(
        self, stream: Stream, layer: LayerWeights, angles: Sequence[_Angles], kv: KVView
    ) -> None:
        """Attention, the mixer, or both of the same input."""
        before, after = layer.before_attention, layer.after_attention
        attention, mixer = layer.attention, layer.mixer
        if attention is not None and mixer is not None:
            if layer.qkv_in_proj is None:
                normed = stream.normed(before)
                qkv, product = attention.qkv(normed), mixer.in_proj(normed)
            else:
                both = stream.norm_linear(before, layer.qkv_in_proj)
                qkv, product = both.tensor_split((len(attention.qkv.weight),), dim=1)
            self._add(stream, after, self._both(layer, attention, mixer, qkv, product, angles, kv))
        elif attention is not None:
            qkv = stream.norm_linear(before, attention.qkv)
            attended = self._attention(layer, attention, qkv, angles, kv, stream.wanted)
            stream.narrow()
            self._add(stream, after, [attended])
        elif mixer is not None:
            if layer.shared is None:
                product = stream.norm_linear(before, mixer.in_proj)
            else:
                product = self._with_shared(stream, layer, layer.shared, angles, kv)
            mixed = mixer.finish(mixer.recur(product, kv), product)
            self._add(stream, after, [mixer.out_proj(mixed)])

    def _both(
        self,
        layer: LayerWeights,
        attention: AttentionWeights,
        mixer: MixerLayer,
        qkv: torch.Tensor,
        product: torch.Tensor,
        angles: Sequence[_Angles],
        kv: KVView,
    ) -> tuple[torch.Tensor, ...]:
        """Attention and a mixer of the same input, one after the other or at the same time."""
        decoding, count = kv.decoding, len(qkv)
        if decoding is not None and count == 1 and attention.latent is None:
            # The kernel of attention runs beside that of the recurrence. Two streams would take
            # longer to part and to meet.
            query, gate = self._heads_written(layer, attention, qkv, angles, kv)
            value_dim = kv.destination(attention.index)[1].shape[-1]
            out = query.new_empty(*query.shape[:2], value_dim)
            mixed = mixer.recur(product, kv)
            decoding.attend_beside(attention.index, query, out, attention.how)
            attended = out.flatten(1) if gate is None else sigmoid_mul(out.flatten(1), gate)
            mixed = mixer.finish(mixed, product)
            return added_products((mixer.out_proj, mixed), (attention.out, attended))

        def mix() -> torch.Tensor:
            return mixer.out_proj(mixer.finish(mixer.recur(product, kv), product))

        def attend() -> torch.Tensor:
            return self._attention(layer, attention, qkv, angles, kv)

        # Other ranks would wait for collectives in another order.
        if decoding is not None and count in _AT_ONCE and self._collectives.size == 1:
            return at_once(mix, attend, self._vocabulary.device)
        # Captured pieces end with a recurrence and with attention; in this order none is empty.
        return mix(), attend()

    def _with_shared(
        self,
        stream: Stream,
        layer: LayerWeights,
        shared: SharedLayer,
        angles: Sequence[_Angles],
        kv: KVView,
    ) -> torch.Tensor:
        """The first product of a mixer, the input of which a shared block adds to."""
        assert stream.embedding is not None
        assert layer.mixer is not None
        x = stream.normed(None)
        cos, sin = (None, None) if layer.layer.rope is None else angles[layer.layer.rope]
        added = x + shared(x, stream.embedding, cos, sin, kv)
        beside = Stream(added, stream.context_lengths, stream.scale)
        return beside.norm_linear(layer.before_attention, layer.mixer.in_proj)

    def _parallel(
        self, stream: Stream, layer: LayerWeights, angles: Sequence[_Angles], kv: KVView
    ) -> None:
        """Attention and MLP of the same stream."""
        attention = layer.attention
        assert attention is not None, "no family has mixers beside an MLP"
        assert layer.mlp is not None, "no family has experts beside attention"
        normed = stream.normed(layer.before_attention)
        own = normed if layer.before_mlp is None else stream.normed(layer.before_mlp)
        attended = self._attention(layer, attention, attention.qkv(normed), angles, kv)
        up, down = layer.mlp
        self._add(stream, None, [attended, _down(down, up(own), self._spec.mlp)])

    def _attention(
        self,
        layer: LayerWeights,
        weights: AttentionWeights,
        qkv: torch.Tensor,
        angles: Sequence[_Angles],
        kv: KVView,
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Write KV to the cache and attend: [tokens, rows of the projection] -> [tokens, hidden],
        or of the wanted rows."""
        if weights.latent is not None:
            cos, sin = (None, None) if layer.layer.rope is None else angles[layer.layer.rope]
            assert cos is not None, "latent attention is rotated"
            assert sin is not None
            return weights.out(weights.latent.attend(qkv, cos, sin, kv))
        query, gate = self._heads_written(layer, weights, qkv, angles, kv)
        if wanted is not None:
            query, kv = query[wanted.rows], wanted.kv
            gate = None if gate is None else gate[wanted.rows]
        attended = kv.attend(weights.index, query, weights.how).flatten(1)
        return weights.out(attended if gate is None else sigmoid_mul(attended, gate))

    def _heads_written(
        self,
        layer: LayerWeights,
        weights: AttentionWeights,
        qkv: torch.Tensor,
        angles: Sequence[_Angles],
        kv: KVView,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write KV to the cache; the queries [tokens, heads, dim], and the gate if there is one."""
        cos, sin = (None, None) if layer.layer.rope is None else angles[layer.layer.rope]
        of = self._heads
        assert of is not None
        gate = None
        if of.has_gate:
            gate, qkv = qkv.tensor_split((of.out_columns,), dim=1)
        query = qkv.new_empty(len(qkv), of.num_heads, of.head_dim)
        q_norm, k_norm = weights.q_norm, weights.k_norm
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
            *kv.destination(weights.index),
            eps=0.0 if q_norm is None else q_norm.eps,
            plus_one=q_norm is not None and q_norm.plus_one,
            is_interleaved=of.is_interleaved,
            is_grouped=of.is_grouped,
        )
        return query, gate

    def _norm_heads(
        self, of: Attention, qkv: torch.Tensor, q_norm: NormWeights, k_norm: NormWeights
    ) -> None:
        """Normalise queries and keys in place."""
        q_rows, k_rows, _ = of.qkv_rows
        heads = of.head_norm
        is_one_row = heads is not None and heads.span is HeadSpan.ALL_HEADS
        parts = (qkv[:, :q_rows], q_norm), (qkv[:, q_rows : q_rows + k_rows], k_norm)
        if is_one_row and self._collectives.size > 1:
            norm_rows(parts, self._collectives)
            return
        for rows, norm in parts:
            width = rows.shape[1] if is_one_row else of.head_dim
            norm_heads(rows.unflatten(1, (-1, width)), norm)

    def _mixture(
        self, layer: LayerWeights, weights: ExpertWeights, x: torch.Tensor, stream: Stream
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
        shared = _down(down, up(x), of)
        if weights.shared_gate is not None:
            shared = torch.sigmoid(linear(x, weights.shared_gate, None)) * shared
        return own, shared
