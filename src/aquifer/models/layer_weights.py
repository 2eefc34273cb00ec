"""The loaded weights of one layer of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aquifer.cache.base import AttentionOptions
from aquifer.kernels.norm import NormWeights
from aquifer.models.collectives import Collectives
from aquifer.models.latent import LatentLayer
from aquifer.models.mixers.base import MixerLayer
from aquifer.models.parts import Attention, LatentAttention, Norm
from aquifer.models.shared_block import SharedLayer
from aquifer.models.spec import DecoderSpec, Layer
from aquifer.models.tensors import Linear, Tensors, norm_weights


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a mixture of experts."""

    router: torch.Tensor  # [experts, hidden]
    choice_bias: torch.Tensor | None  # [experts] float32
    up: torch.Tensor  # [experts, rows, hidden], gate and up, or up alone
    down: torch.Tensor  # [experts, hidden, width]
    router_bias: torch.Tensor | None  # [experts]
    up_bias: torch.Tensor | None  # [experts, rows]
    down_bias: torch.Tensor | None  # [experts, hidden]
    shared_gate: torch.Tensor | None  # [1, hidden]

    @classmethod
    def of(cls, tensors: Tensors, name: str) -> ExpertWeights:
        """The experts of the layer whose parameters have names that begin so."""
        return cls(
            tensors[f"{name}router"],
            tensors.get(f"{name}choice_bias"),
            tensors[f"{name}experts_up"],
            tensors[f"{name}experts_down"],
            tensors.get(f"{name}router_bias"),
            tensors.get(f"{name}experts_up_bias"),
            tensors.get(f"{name}experts_down_bias"),
            tensors.get(f"{name}shared_gate"),
        )


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of attention.

    Args:
        index: of the layer in the KV layout.
        how: how it attends.
        qkv: the fused projection.
        out: the output projection.
        q_norm: norm of queries; None for none.
        k_norm: norm of keys.
        latent: latent attention; None for heads with keys and values of their own.
    """

    index: int
    how: AttentionOptions
    qkv: Linear
    out: Linear
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    latent: LatentLayer | None

    @classmethod
    def of(
        cls, spec: DecoderSpec, tensors: Tensors, number: int, slopes: torch.Tensor | None
    ) -> AttentionWeights | None:
        """The attention of a layer; None for a layer without.

        Args:
            spec: the decoder.
            tensors: its parameters.
            number: the layer's.
            slopes: see `AttentionOptions`.
        """
        index, layer = spec.kv_indices[number], spec.layers[number]
        if index is None or not layer.has_attention:
            return None
        name, is_transposed = f"layers.{number}.", spec.names.are_transposed
        heads = spec.attention if isinstance(spec.attention, Attention) else None
        head_norm = None if heads is None or heads.head_norm is None else heads.head_norm.norm
        softcap = None if heads is None else heads.softcap
        sinks = tensors.get(f"{name}sinks")
        how = AttentionOptions(layer.scale, layer.window_tokens, softcap, sinks, slopes)
        latent = None
        if isinstance(spec.attention, LatentAttention):
            latent = LatentLayer(spec.attention, tensors, name, index, how)
        return cls(
            index,
            how,
            Linear.of(tensors, f"{name}qkv", is_transposed=is_transposed),
            Linear.of(tensors, f"{name}out", is_transposed=is_transposed),
            norm_weights(tensors, f"{name}q_norm", head_norm),
            norm_weights(tensors, f"{name}k_norm", head_norm),
            latent,
        )


class LayerWeights:
    """The weights of one layer; None for those that the decoder has not.

    Args:
        spec: the decoder.
        tensors: its parameters.
        number: the layer's.
        slopes: see `AttentionOptions`.
        collectives: the ranks.

    Attributes:
        qkv_in_proj: the first products of attention and mixer as one, where both have the same
            input; None for two products.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        tensors: Tensors,
        number: int,
        slopes: torch.Tensor | None,
        collectives: Collectives,
    ) -> None:
        name, block = f"layers.{number}.", spec.block
        both = tensors.get(f"{name}qkv_in_proj.weight")
        self.qkv_in_proj = None if both is None else Linear(both, None)
        if both is not None:
            assert spec.attention is not None
            num_rows = sum(spec.attention.qkv_rows)
            of_each = {"qkv.weight": both[:num_rows], "mixer.in_proj.weight": both[num_rows:]}
            tensors = {**tensors, **{name + place: part for place, part in of_each.items()}}

        def norm(place: str, of: Norm | None, *, is_there: bool) -> NormWeights | None:
            return norm_weights(tensors, name + place, of if is_there else None)

        def matrix(place: str) -> Linear:
            return Linear.of(tensors, name + place, is_transposed=spec.names.are_transposed)

        self.layer: Layer = spec.layers[number]
        has_mlp, mixes = self.layer.has_mlp, self.layer.has_attention or self.layer.has_mixer
        self.before_attention = norm("before_attention", block.before_attention, is_there=mixes)
        self.after_attention = norm("after_attention", block.after_attention, is_there=mixes)
        self.before_mlp = norm("before_mlp", block.before_mlp, is_there=has_mlp)
        self.after_mlp = norm("after_mlp", block.after_mlp, is_there=has_mlp)
        self.attention = AttentionWeights.of(spec, tensors, number, slopes)
        self.mixer: MixerLayer | None = None
        state_index = spec.state_indices[number]
        if state_index is not None:
            assert spec.mixer is not None
            self.mixer = spec.mixer.layer(tensors, f"{name}mixer.", state_index, collectives)
        self.shared: SharedLayer | None = None
        kv_index = spec.kv_indices[number]
        if self.layer.shared_use is not None:
            assert spec.shared is not None
            assert kv_index is not None
            use = self.layer.shared_use
            self.shared = spec.shared.use(tensors, use, kv_index, self.layer.scale, collectives)
        # Of the MLP, or of the shared expert.
        self.mlp = (matrix("up"), matrix("down")) if f"{name}up.weight" in tensors else None
        self.experts = ExpertWeights.of(tensors, name) if self.layer.has_experts else None
