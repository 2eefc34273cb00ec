"""Description of a decoder-only transformer: what differs between families, as data.

A family (`aquifer.models.families`) reads a `config.json` into a `DecoderSpec`. `DecoderPlan`
derives the parameters from it, and `Decoder` the computation. Every layer is one of two sums:

    serial    x += scale * after_attention(attention(before_attention(x)))
              x += scale * after_mlp(mlp(before_mlp(x)))
    parallel  x += attention(before_attention(x)) + mlp(before_mlp(x))

in which any of the four norms may be absent. A parallel layer without `before_mlp` uses the result
of `before_attention` for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from aquifer.cache.base import KVLayout, LayerKV, StateLayout
from aquifer.kernels.experts import Activation, Routing
from aquifer.models.rope import RotarySettings
from aquifer.weights.forms import Form


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation, over the last dimension.

    Args:
        eps: added to the mean square, or to the variance.
        centred: whether the mean is subtracted first (LayerNorm); else RMSNorm.
        plus_one: whether the weight is one more than what is stored (Gemma).
        has_bias: whether a bias is added.
    """

    eps: float
    centred: bool = False
    plus_one: bool = False
    has_bias: bool = False


class HeadSpan(Enum):
    """What a norm of queries and keys covers."""

    HEAD = "head"  # each head, all with the same weight [head_dim]
    EACH_HEAD = "each head"  # each head with its own weight, [heads, head_dim]
    ALL_HEADS = "all heads"  # all heads of a token as one row, weight [heads * head_dim]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A norm of queries and keys before they are rotated."""

    norm: Norm
    span: HeadSpan = HeadSpan.HEAD


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention, equal in all layers but for what `Layer` says.

    Args:
        num_heads: query heads.
        num_kv_heads: heads of keys and values, a divisor of that.
        head_dim: dimensions of a head.
        qkv_bias: whether Q, K and V have a bias.
        out_bias: whether the output projection has one.
        head_norm: norm of queries and keys; None for none.
        softcap: see `AttentionOptions`.
        is_interleaved: whether the rotary embedding rotates neighbouring dimensions, (0, 1),
            (2, 3), and so on; else the first half of the rotated dimensions with the second.
        is_grouped: whether the fused projection is stored by KV head: its query heads, its key
            head, its value head; else all queries, all keys, all values.
        has_sinks: whether each head has a sink (`aquifer.kernels.sinks`).
        has_alibi: whether scores have linear biases (`aquifer.kernels.alibi`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: HeadNorm | None = None
    softcap: float | None = None
    is_interleaved: bool = False
    is_grouped: bool = False
    has_sinks: bool = False
    has_alibi: bool = False

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the fused projection."""
        kv_rows = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_rows, kv_rows

    @property
    def out_columns(self) -> int:
        """Columns of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def layer_kv(self) -> LayerKV:
        """KV of one token in one layer."""
        return LayerKV(self.num_kv_heads, self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), equal in all layers.

    Args:
        num_heads: heads.
        q_rank: elements that queries are compressed to, and normalised in; None for not.
        kv_rank: elements that keys and values are compressed to, and normalised in.
        nope_dim: dimensions of a head's query and key that are not rotated.
        rope_dim: those that are; of the key, the same for all heads.
        value_dim: dimensions of a head's value.
        norm: norm of what is compressed.
        qkv_bias: whether the products that compress have biases; needs `q_rank`.
        out_bias: whether the output projection has one.
        is_interleaved: see `Attention`.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: Norm
    qkv_bias: bool = False
    out_bias: bool = False
    is_interleaved: bool = True

    @property
    def q_rows(self) -> int:
        """Rows of all heads' queries."""
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def qkv_rows(self) -> tuple[int, int]:
        """Rows of the fused projection: of queries, or what they are compressed to; and of KV."""
        return self.q_rank or self.q_rows, self.kv_rank + self.rope_dim

    @property
    def out_columns(self) -> int:
        """Columns of the output projection."""
        return self.num_heads * self.value_dim

    @property
    def layer_kv(self) -> LayerKV:
        """KV of one token in one layer: the compressed keys and values, and the rotated key."""
        return LayerKV(1, self.kv_rank + self.rope_dim, self.kv_rank, is_latent=True)


@dataclass(frozen=True, slots=True)
class Mlp:
    """The feed-forward part of a layer.

    Args:
        width: width between its two products.
        activation: one of `aquifer.kernels.activation.ACTIVATIONS`.
        is_gated: whether the activation of one product multiplies another.
        has_bias: whether the products have biases.
    """

    width: int
    activation: str
    is_gated: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the stored tensors of a mixture of experts, within its layer.

    Experts are stored one by one, under a name with `{}` for their number, or all together. Then
    `forms` are the tensors that the weights are in: what is added to the name, and the form. The
    biases are in a tensor of the name and `_bias`.
    """

    router: str
    up: tuple[str, ...]  # gate and up of each expert, or both of all of them
    down: str
    forms: tuple[tuple[str, Form], ...] = (("", Form.PLAIN),)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of an MLP; each expert is a gated MLP.

    Args:
        count: number of experts.
        top_k: experts of a token.
        width: width of an expert between its two products.
        routing: how a token's experts are chosen and weighed.
        shared_width: width of an expert that all tokens have; 0 for none.
        is_shared_gated: whether that expert is weighed by a sigmoid.
        has_choice_bias: whether a bias is added to the scores for the choice.
        routes_in_float32: whether the router's logits are left in float32.
        activation: how gate and up are combined.
        has_bias: whether the router and both products have biases; only for experts that are stored
            in one tensor.
        is_interleaved: whether rows of gate and up alternate.
        names: ways in which they may be stored.
    """

    count: int
    top_k: int
    width: int
    routing: Routing
    shared_width: int = 0
    is_shared_gated: bool = True
    has_choice_bias: bool = False
    routes_in_float32: bool = False
    activation: Activation = "silu"
    has_bias: bool = False
    is_interleaved: bool = False
    names: tuple[ExpertNames, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """The order of a layer's parts; see the module."""

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
    """

    scale: float
    window_tokens: int | None = None
    rope: int | None = 0
    has_experts: bool = False


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
class Names:
    """Names of the stored tensors, without `.weight` and `.bias`.

    `prefix` stands before all but `head`, and is absent in checkpoints of the base model. `{}` in
    `layer` is the layer's number; the names below are within it.
    """

    prefix: str = "model."
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
    up: tuple[str, ...] = (
        "mlp.gate_proj",
        "mlp.up_proj",
    )  # or the only product before the activation
    down: str = "mlp.down_proj"
    norm: str = "norm"
    shared: str = "mlp.shared_expert"  # gate_proj, up_proj and down_proj of the shared expert
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
        attention: of every layer.
        mlp: of every layer without experts.
        experts: of the other layers.
        block: order of every layer's parts.
        layers: what differs between layers.
        ropes: the rotary embeddings that layers refer to.
        norm: after the last layer; None for none.
        head: from hidden states to logits.
        embed_scale: factor on the embeddings.
        embed_norm: norm of the embeddings; None for none.
        positions: learned embeddings of positions; None for none.
        names: names of the stored tensors.
    """

    vocab_size: int
    hidden_size: int
    max_model_len: int
    attention: Attention | LatentAttention
    mlp: Mlp
    block: Block
    layers: tuple[Layer, ...]
    ropes: tuple[RotarySettings, ...]
    norm: Norm | None
    head: Head
    experts: Experts | None = None
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    positions: Positions | None = None
    names: Names = Names()

    @property
    def kv_limits(self) -> tuple[int, ...]:
        """See `ModelPlan.kv_limits`."""
        lengths = {rope.switch_tokens for rope in self.ropes if rope.switch_tokens is not None}
        return tuple(sorted(lengths))

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Layout of one token's KV, which differs between layers in the window alone.

        A window as long as the longest context leaves nothing out, and counts as none.
        """
        windows = (layer.window_tokens or self.max_model_len for layer in self.layers)
        layers = (
            replace(
                self.attention.layer_kv,
                window_tokens=window if window < self.max_model_len else None,
            )
            for window in windows
        )
        return KVLayout(tuple(layers), dtype)

    def state_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> StateLayout | None:
        """Layout of one sequence's recurrent state; None, as no layer has any.

        Args:
            dtype: dtype of the weights, and of what convolutions keep.
            state_dtype: dtype of what recurrences accumulate.
        """
        return None
