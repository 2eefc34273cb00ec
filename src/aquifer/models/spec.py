"""Description of a decoder-only transformer: what differs between families, as data.

A family (`aquifer.models.families`) reads a `config.json` into a `DecoderSpec`. `DecoderPlan`
derives the parameters from it, and `Decoder` the computation. Every layer is one of two sums:

    serial    x += scale * after_attention(attention(before_attention(x)))
              x += scale * after_mlp(mlp(before_mlp(x)))
    parallel  x += attention(before_attention(x)) + mlp(before_mlp(x))

in which any of the four norms may be absent. A parallel layer without `before_mlp` uses the result
of `before_attention` for both.

A layer of a serial decoder may have a mixer in place of attention. With both, they have the same
input, and the sum of their results is added. It may also lack one of the two lines. What a shared
block computes (`aquifer.models.shared_block`) is added to the input of a mixer's norm alone:

    x += mixer(before_attention(x + shared(x)))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from aquifer.cache.base import KVLayout, StateLayout
from aquifer.models.mixers.base import Mixer
from aquifer.models.parts import (
    Attention,
    ExpertNames,
    Experts,
    HeadNorm,
    HeadSpan,
    LatentAttention,
    Mlp,
    Norm,
)
from aquifer.models.rope import RotarySettings
from aquifer.models.shared_block import SharedBlocks, SharedUse

__all__ = [
    "Attention",
    "Block",
    "DecoderSpec",
    "ExpertNames",
    "Experts",
    "Factors",
    "Head",
    "HeadNorm",
    "HeadSpan",
    "LatentAttention",
    "Layer",
    "Mlp",
    "Names",
    "Norm",
    "Positions",
    "SharedBlocks",
    "SharedUse",
]


@dataclass(frozen=True, slots=True)
class Block:
    """The order of a layer's parts; see the module. A mixer has the norms of attention."""

    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """What differs from layer to layer.

    Args:
        scale: factor on the dot products of attention.
        window_tokens: sliding window; None for none.
        rope: index into `DecoderSpec.ropes`; None for a layer without rotary embedding.
        has_experts: whether it has the mixture of experts in place of the MLP.
        has_attention: whether it has attention.
        has_mixer: whether it has the mixer.
        has_mlp: whether it has the MLP or the experts.
        shared_use: of a shared block before the mixer; None for none. `scale` and `rope` are those
            of its attention.
    """

    scale: float = 1.0
    window_tokens: int | None = None
    rope: int | None = 0
    has_experts: bool = False
    has_attention: bool = True
    has_mixer: bool = False
    has_mlp: bool = True
    shared_use: SharedUse | None = None

    def __post_init__(self) -> None:
        if self.shared_use is not None:
            assert self.has_mixer
            assert not self.has_attention
            assert self.window_tokens is None
        assert self.has_attention or self.has_mixer or self.has_mlp
        assert self.has_mlp or not self.has_experts

    @property
    def has_kv(self) -> bool:
        """Whether it attends, itself or in a shared block."""
        return self.has_attention or self.shared_use is not None


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned embeddings of positions.

    Args:
        num_rows: rows that are stored.
        offset: row of position 0.
    """

    num_rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """From hidden states to logits.

    Args:
        is_tied: whether the weight is that of the embedding.
        has_bias: whether there is a bias.
        scale: factor on the logits.
        softcap: logits are squashed to (-softcap, softcap) with tanh; None for not.
    """

    is_tied: bool
    has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Factors:
    """Constant factors on inputs and results of products, multiplied into their weights and biases.

    Args:
        embed: on the embeddings; only if the head is not tied to them.
        attention_in: on the input of attention.
        key: on keys.
        attention_out: on the result of attention.
        gate: on the gate of the MLP.
        down: on the result of the MLP.
        head: on the logits; if the head is tied, the embeddings have it too.
    """

    embed: float = 1.0
    attention_in: float = 1.0
    key: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    head: float = 1.0


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the stored tensors, without `.weight` and `.bias`.

    `prefix` stands before all but `head`, or one of `other_prefixes`; it is absent in checkpoints
    of the base model. `{}` in `layer` is the layer's number; the names below are within it.
    """

    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ()
    embed: str = "embed_tokens"
    embed_norm: str = "embed_layernorm"
    positions: str = "embed_positions"
    layer: str = "layers.{}"
    before_attention: str = "input_layernorm"
    after_attention: str = "post_attention_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = "post_feedforward_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"  # this and the next three of latent attention
    q_b: str = "self_attn.q_b_proj"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # the tensor itself
    mixer: str = "mamba"
    with_shared: str = "mamba_decoder."  # begins those of a layer with a shared block, but its own
    up: tuple[str, ...] = (
        "mlp.gate_proj",
        "mlp.up_proj",
    )  # or the only product before the activation
    down: str = "mlp.down_proj"
    norm: str = "norm"
    shared_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    head: str = "lm_head"
    are_transposed: bool = False  # weights of layers are stored as [in, out]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the hidden states.
        max_model_len: longest context in tokens.
        attention: of every layer that has attention.
        mlp: of every layer that has one and no experts.
        block: order of every layer's parts.
        layers: what differs between layers.
        ropes: the rotary embeddings that layers refer to.
        norm: after the last layer; None for none.
        head: from hidden states to logits.
        mixer: of every layer that has a mixer.
        experts: of every layer that has experts.
        shared: the blocks that layers share; None for none.
        embed_scale: factor on the embeddings.
        embed_norm: norm of the embeddings; None for none.
        positions: learned embeddings of positions; None for none.
        factors: constant factors that the weights have.
        names: names of the stored tensors.
    """

    vocab_size: int
    hidden_size: int
    max_model_len: int
    attention: Attention | LatentAttention | None
    mlp: Mlp | None
    block: Block
    layers: tuple[Layer, ...]
    ropes: tuple[RotarySettings, ...]
    norm: Norm | None
    head: Head
    mixer: Mixer | None = None
    experts: Experts | None = None
    shared: SharedBlocks | None = None
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    positions: Positions | None = None
    factors: Factors = Factors()
    names: Names = Names()

    def __post_init__(self) -> None:
        for layer in self.layers:
            assert not layer.has_attention or self.attention is not None
            assert not layer.has_mixer or self.mixer is not None
            assert not layer.has_experts or self.experts is not None
            assert layer.shared_use is None or self.shared is not None
            assert not layer.has_mlp or layer.has_experts or self.mlp is not None
        assert self.shared is None or self.attention is None, "KV of layers is alike"
        assert self.factors.embed == 1.0 or not self.head.is_tied
        assert self.factors.key == 1.0 or isinstance(self.attention, Attention)

    @property
    def kv_indices(self) -> tuple[int | None, ...]:
        """Index of each layer in the KV layout; None for one without KV."""
        return _indices(layer.has_kv for layer in self.layers)

    @property
    def state_indices(self) -> tuple[int | None, ...]:
        """Index of each layer in the layout of the state; None for one without a mixer."""
        return _indices(layer.has_mixer for layer in self.layers)

    @property
    def kv_limits(self) -> tuple[int, ...]:
        """See `ModelPlan.kv_limits`."""
        lengths = {rope.switch_tokens for rope in self.ropes if rope.switch_tokens is not None}
        return tuple(sorted(lengths))

    @property
    def has_reusable_kv(self) -> bool:
        """See `ModelPlan.has_reusable_kv`."""
        return all(
            rope.dynamic_factor is None or self.max_model_len <= rope.max_positions
            for rope in self.ropes
        )

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Layout of one token's KV, which differs between layers in the window alone.

        A window as long as the longest context leaves nothing out, and counts as none.
        """
        attention = self.attention if self.shared is None else self.shared.attention
        if attention is None:
            return KVLayout((), dtype)
        of_layer = attention.layer_kv
        windows = (
            layer.window_tokens or self.max_model_len for layer in self.layers if layer.has_kv
        )
        layers = (
            replace(of_layer, window_tokens=window if window < self.max_model_len else None)
            for window in windows
        )
        return KVLayout(tuple(layers), dtype)

    def state_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> StateLayout | None:
        """Layout of one sequence's recurrent state; None if no layer has any.

        Args:
            dtype: dtype of the weights, and of what convolutions keep.
            state_dtype: dtype of what recurrences accumulate.
        """
        num_layers = sum(layer.has_mixer for layer in self.layers)
        if self.mixer is None or not num_layers:
            return None
        return StateLayout((self.mixer.state(dtype, state_dtype),) * num_layers)


def _indices(are_there: Iterable[bool]) -> tuple[int | None, ...]:
    """Number of those that are there, counted from 0; None for the others."""
    found: list[int | None] = []
    count = 0
    for is_there in are_there:
        found.append(count if is_there else None)
        count += is_there
    return tuple(found)
