"""Parameters of a decoder, and the stored tensors that fill them.

The Q, K and V projections are one matrix, the gate and up projections another: fewer and larger
products. Stored tensors are read straight into their rows, so fusing costs nothing at load time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from aquifer.cache.base import StateLayout
from aquifer.models.base import num_elements
from aquifer.models.decoder import Decoder
from aquifer.models.spec import (
    Attention,
    DecoderSpec,
    ExpertNames,
    Experts,
    HeadNorm,
    HeadSpan,
    LatentAttention,
    Layer,
    Mlp,
    Norm,
)
from aquifer.weights.checkpoint import Checkpoint, are_equal, stored_dtype
from aquifer.weights.forms import RowOrder
from aquifer.weights.parameters import Parameter, Source


class DecoderPlan:
    """`ModelPlan` of a decoder.

    Args:
        spec: the decoder.
        checkpoint: the opened checkpoint that it was read from.
        dtype: dtype of weights and KV; None means the checkpoint's own.
    """

    def __init__(
        self, spec: DecoderSpec, checkpoint: Checkpoint, dtype: torch.dtype | None
    ) -> None:
        self._prefix = _stored_prefix(spec, checkpoint)
        self._stored = checkpoint.tensors
        spec = self.spec = self._as_stored(spec)
        self.vocab_size = spec.vocab_size
        self.max_model_len = spec.max_model_len
        self.kv_limits = spec.kv_limits
        self.has_reusable_kv = spec.has_reusable_kv
        self.kv_layout = spec.kv_layout(dtype or stored_dtype(checkpoint))
        self.parameters = list(self._parameters())
        self.num_parameters = num_elements(self.parameters)

    def state_layout(self, dtype: torch.dtype | None = None) -> StateLayout | None:
        """See `ModelPlan.state_layout`."""
        return self.spec.state_layout(self.kv_layout.dtype, dtype or self.kv_layout.dtype)

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Decoder:
        """See `ModelPlan.build`."""
        return Decoder(self.spec, self.kv_layout, tensors)

    def _as_stored(self, spec: DecoderSpec) -> DecoderSpec:
        """The same decoder; its head is not tied if another weight is stored for it.

        The tensors count more than the configuration, as in Transformers 5.
        """
        embed = self._stored.get(f"{self._prefix}{spec.names.embed}.weight")
        head = self._stored.get(f"{spec.names.head}.weight")
        if not spec.head.is_tied or embed is None or head is None or are_equal(embed, head):
            return spec
        # A tied weight has the factor of the head, which the scale of the embeddings takes back.
        embed_scale = spec.embed_scale * spec.factors.head
        return replace(spec, head=replace(spec.head, is_tied=False), embed_scale=embed_scale)

    def _parameters(self) -> Iterator[Parameter]:
        spec, names, factors = self.spec, self.spec.names, self.spec.factors
        hidden, rows = spec.hidden_size, spec.vocab_size
        embed_factor = factors.head if spec.head.is_tied else factors.embed
        stored = f"{self._prefix}{names.embed}.weight"
        if (
            spec.head.is_tied
            and stored not in self._stored
            and f"{names.head}.weight" in self._stored
        ):
            stored = f"{names.head}.weight"
        yield self._scaled("embed", (rows, hidden), stored, [(rows, embed_factor)])
        yield from self._norm(
            "embed_norm", f"{self._prefix}{names.embed_norm}", spec.embed_norm, hidden
        )
        if spec.positions is not None:
            stored = f"{self._prefix}{names.positions}.weight"
            yield self._one("positions", (spec.positions.num_rows, hidden), stored)
        for index, layer in enumerate(spec.layers):
            stored = f"{self._prefix}{names.layer.format(index)}."
            if layer.shared_use is not None:
                stored += names.with_shared
            yield from self._layer(f"layers.{index}.", stored, layer)
        if spec.shared is not None:
            stored = f"{self._prefix}{names.layer}."
            dtype = self.kv_layout.dtype
            yield from spec.shared.parameters(stored, self._stored, hidden, dtype)
        yield from self._norm("norm", f"{self._prefix}{names.norm}", spec.norm, hidden)
        if not spec.head.is_tied:
            stored, head_rows = f"{names.head}.weight", [(rows, factors.head)]
            yield self._scaled("head", (rows, hidden), stored, head_rows)
        if spec.head.has_bias:
            yield self._one("head_bias", (spec.vocab_size,), f"{names.head}.bias")

    def _layer(self, name: str, stored: str, layer: Layer) -> Iterator[Parameter]:
        spec, names, block = self.spec, self.spec.names, self.spec.block
        mixes = layer.has_attention or layer.has_mixer
        places = {
            "before_attention": mixes,
            "after_attention": mixes,
            "before_mlp": layer.has_mlp,
            "after_mlp": layer.has_mlp,
        }
        for place in filter(places.get, places):
            norm: Norm | None = getattr(block, place)
            stored_norm = stored + getattr(names, place)
            yield from self._norm(name + place, stored_norm, norm, spec.hidden_size)
        attention = list(self._attention(name, stored)) if layer.has_attention else []
        mixer: list[Parameter] = []
        if layer.has_mixer:
            assert spec.mixer is not None
            dtype = self.kv_layout.dtype
            place, stored_mixer = f"{name}mixer.", f"{stored}{names.mixer}."
            mixer += spec.mixer.parameters(place, stored_mixer, spec.hidden_size, dtype)
        yield from _with_one_product(name, [*attention, *mixer])
        if layer.has_experts:
            yield from self._experts(name, stored)
        elif layer.has_mlp:
            assert spec.mlp is not None
            yield from self._mlp(name, stored, spec.mlp)

    def _attention(self, name: str, stored: str) -> Iterator[Parameter]:
        spec, names, factors = self.spec, self.spec.names, self.spec.factors
        attention, hidden = spec.attention, spec.hidden_size
        assert attention is not None
        keys = (1.0, factors.key, 1.0)[: len(attention.qkv_rows)]
        order, rows = None, list(attention.qkv_rows)
        if isinstance(attention, Attention) and attention.has_gate:
            order = RowOrder(attention.num_heads, (attention.head_dim,) * 2, (1, 0))
            rows[0] = order.num_rows
        for parameter in self._linear(
            f"{name}qkv",
            [stored + part for part in names.qkv],
            rows,
            hidden,
            attention.qkv_bias,
            [factor * factors.attention_in for factor in keys],
            keys,
        ):
            first, *others = parameter.sources
            yield replace(parameter, sources=(replace(first, order=order), *others))
        if isinstance(attention, LatentAttention):
            yield from self._latent(name, stored, attention)
        else:
            yield from self._head_norms(name, stored, attention)
            if attention.has_sinks:
                yield self._one(f"{name}sinks", (attention.num_heads,), stored + names.sinks)
        yield from self._linear(
            f"{name}out",
            [stored + names.out],
            (hidden,),
            attention.out_columns,
            attention.out_bias,
            [factors.attention_out],
        )

    def _mlp(self, name: str, stored: str, mlp: Mlp) -> Iterator[Parameter]:
        names, factors, hidden = self.spec.names, self.spec.factors, self.spec.hidden_size
        widths = (mlp.width,) * (2 if mlp.is_gated else 1)
        ups = [stored + part for part in names.up]
        gates = (factors.gate, 1.0)[: len(widths)]
        yield from self._linear(f"{name}up", ups, widths, hidden, mlp.has_bias, gates)
        downs = [stored + names.down]
        yield from self._linear(
            f"{name}down", downs, (hidden,), mlp.width, mlp.has_bias, [factors.down]
        )

    def _latent(self, name: str, stored: str, of: LatentAttention) -> Iterator[Parameter]:
        names = self.spec.names
        if of.q_rank is not None:
            yield from self._norm(f"{name}q_a_norm", stored + names.q_a_norm, of.norm, of.q_rank)
            q_b = [stored + names.q_b]
            yield from self._linear(f"{name}q_b", q_b, (of.q_rows,), of.q_rank, has_bias=False)
        yield from self._norm(f"{name}kv_a_norm", stored + names.kv_a_norm, of.norm, of.kv_rank)
        rows = of.num_heads * (of.nope_dim + of.value_dim)
        kv_b = [stored + names.kv_b]
        yield from self._linear(f"{name}kv_b", kv_b, (rows,), of.kv_rank, has_bias=False)

    def _experts(self, name: str, stored: str) -> Iterator[Parameter]:
        experts, hidden = self.spec.experts, self.spec.hidden_size
        assert experts is not None, "a layer has them"
        names = self._expert_names(experts, stored)
        count, width, dtype = experts.count, experts.width, self.kv_layout.dtype
        yield self._one(f"{name}router", (count, hidden), f"{stored}{names.router}.weight")
        if experts.has_choice_bias:
            bias = (Source(stored + self.spec.names.choice_bias),)
            yield Parameter(f"{name}choice_bias", (count,), torch.float32, bias)
        if "{}" in names.down:
            halves = (slice(0, width), slice(width, 2 * width))[: len(names.up)]  # gate, up
            up = [
                Source(f"{stored}{part.format(i)}.weight", (i, half))
                for i in range(count)
                for part, half in zip(names.up, halves, strict=True)
            ]
            down = [Source(f"{stored}{names.down.format(i)}.weight", (i,)) for i in range(count)]
        else:
            up, down = (
                [Source(f"{stored}{part}{suffix}", form=form) for suffix, form in names.forms]
                for part in (names.up[0], names.down)
            )
        share = experts.top_k / count
        rows = 2 * width if experts.is_gated else width
        yield Parameter(f"{name}experts_up", (count, rows, hidden), dtype, tuple(up), share)
        yield Parameter(f"{name}experts_down", (count, hidden, width), dtype, tuple(down), share)
        if experts.has_bias:
            yield self._one(f"{name}router_bias", (count,), f"{stored}{names.router}.bias")
            up_bias, down_bias = f"{stored}{names.up[0]}_bias", f"{stored}{names.down}_bias"
            yield self._one(f"{name}experts_up_bias", (count, rows), up_bias)
            yield self._one(f"{name}experts_down_bias", (count, hidden), down_bias)
        if experts.shared_width:
            yield from self._shared_expert(name, stored, experts)

    def _shared_expert(self, name: str, stored: str, experts: Experts) -> Iterator[Parameter]:
        names, hidden, width = self.spec.names, self.spec.hidden_size, experts.shared_width
        ups, downs = [stored + part for part in names.shared_up], [stored + names.shared_down]
        widths = (width,) * (2 if experts.is_gated else 1)
        has_bias = experts.shared_bias
        yield from self._linear(f"{name}up", ups, widths, hidden, has_bias)
        yield from self._linear(f"{name}down", downs, (hidden,), width, has_bias)
        if experts.is_shared_gated:
            gate = f"{stored}{names.shared_gate}.weight"
            yield self._one(f"{name}shared_gate", (1, hidden), gate)

    def _expert_names(self, experts: Experts, stored: str) -> ExpertNames:
        """The way in which the checkpoint stores the experts of a layer."""
        for names in experts.names:
            suffix = ".weight" if "{}" in names.down else names.forms[0][0]
            if f"{stored}{names.down.format(0)}{suffix}" in self._stored:
                return names
        return experts.names[0]

    def _linear(
        self,
        name: str,
        stored: Sequence[str],
        rows: Sequence[int],
        columns: int,
        has_bias: bool,
        factors: Sequence[float] | None = None,
        bias_factors: Sequence[float] | None = None,
    ) -> Iterator[Parameter]:
        """A matrix of several stored ones, one below the other, or one that is stored as it is.

        Args:
            name: of the matrix.
            stored: names of the stored matrices.
            rows: rows of each part.
            columns: of all of them.
            has_bias: whether there is a bias.
            factors: constant factors on the parts; None for none.
            bias_factors: those on the parts of the bias; None for the same.
        """
        num_rows = sum(rows)
        shape = (columns, num_rows) if self.spec.names.are_transposed else (num_rows, columns)
        own = factors or (1.0,) * len(rows)
        yield self._rows(f"{name}.weight", shape, stored, rows, "weight", own)
        if has_bias:
            of_bias = bias_factors or own
            yield self._rows(f"{name}.bias", (num_rows,), stored, rows, "bias", of_bias)

    def _rows(
        self,
        name: str,
        shape: tuple[int, ...],
        stored: Sequence[str],
        rows: Sequence[int],
        kind: str,
        factors: Sequence[float],
    ) -> Parameter:
        parts = list(zip(rows, factors, strict=True))
        if len(stored) == 1:
            return self._scaled(name, shape, f"{stored[0]}.{kind}", parts)
        sources, row = [], 0
        for place, part in zip(stored, parts, strict=True):
            index = (slice(row, row + part[0]),)
            sources.append(Source.of(f"{place}.{kind}", [part], index))
            row += part[0]
        return Parameter(name, shape, self.kv_layout.dtype, tuple(sources))

    def _norm(self, name: str, stored: str, norm: Norm | None, width: int) -> Iterator[Parameter]:
        if norm is None:
            return
        yield self._one(f"{name}.weight", (width,), f"{stored}.weight")
        if norm.has_bias:
            yield self._one(f"{name}.bias", (width,), f"{stored}.bias")

    def _head_norms(self, name: str, stored: str, of: Attention) -> Iterator[Parameter]:
        if of.head_norm is None:
            return
        for kind, num_heads in (("q", of.num_heads), ("k", of.num_kv_heads)):
            yield from self._head_norm(
                f"{name}{kind}_norm",
                stored + getattr(self.spec.names, f"{kind}_norm"),
                of.head_norm,
                num_heads,
                of.head_dim,
            )

    def _head_norm(
        self, name: str, stored: str, head_norm: HeadNorm, num_heads: int, dim: int
    ) -> Iterator[Parameter]:
        if head_norm.span is HeadSpan.HEAD:
            yield from self._norm(name, stored, head_norm.norm, dim)
        elif head_norm.span is HeadSpan.ALL_HEADS:
            yield from self._norm(name, stored, head_norm.norm, num_heads * dim)
        elif "{}" in stored:  # a tensor for each head
            sources = tuple(Source(f"{stored.format(i)}.weight", (i,)) for i in range(num_heads))
            yield Parameter(f"{name}.weight", (num_heads, dim), self.kv_layout.dtype, sources)
        else:
            yield self._one(f"{name}.weight", (num_heads, dim), f"{stored}.weight")

    def _one(self, name: str, shape: tuple[int, ...], stored: str) -> Parameter:
        return Parameter(name, shape, self.kv_layout.dtype, (Source(stored),))

    def _scaled(
        self,
        name: str,
        shape: tuple[int, ...],
        stored: str,
        factors: Sequence[tuple[int, float]],
    ) -> Parameter:
        """A parameter that is stored as it is, but for constant factors on its rows."""
        return Parameter(name, shape, self.kv_layout.dtype, (Source.of(stored, factors),))


def _with_one_product(name: str, parameters: Sequence[Parameter]) -> Iterator[Parameter]:
    """The same parameters, but the first products of attention and mixer of a layer as one.

    Only where neither has a bias.
    """
    places = f"{name}qkv", f"{name}mixer.in_proj"
    found = [each for each in parameters if each.name.removesuffix(".weight") in places]
    if len(found) < len(places) or any(
        f"{place}.bias" == p.name for place in places for p in parameters
    ):
        yield from parameters
        return
    sources: list[Source] = []
    first = 0
    for each in found:
        for source in each.sources:
            (rows,) = source.index or (slice(0, each.shape[0]),)
            assert isinstance(rows, slice)
            moved = slice(first + rows.start, first + rows.stop)
            sources.append(replace(source, index=(moved,)))
        first += each.shape[0]
    weight = f"{name}qkv_in_proj.weight"
    yield Parameter(weight, (first, found[0].shape[1]), found[0].dtype, tuple(sources))
    yield from (each for each in parameters if each not in found)


def _stored_prefix(spec: DecoderSpec, checkpoint: Checkpoint) -> str:
    """The prefix of names in a checkpoint: that of a base model, saved without its head, lacks the
    first parts."""
    for whole in (spec.names.prefix, *spec.names.other_prefixes):
        prefix = whole
        while prefix and f"{prefix}{spec.names.embed}.weight" not in checkpoint.tensors:
            prefix = prefix.partition(".")[2]
        if f"{prefix}{spec.names.embed}.weight" in checkpoint.tensors:
            return prefix
    return spec.names.prefix
