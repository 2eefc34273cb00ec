"""Descriptions of the parts of a decoder's layers: norms, attention, MLP and experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from aquifer.cache.base import LayerKV
from aquifer.kernels.experts import Activation, Routing, has_gate
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
        has_gate: whether the result is multiplied by the sigmoid of a gate. Its rows in the fused
            projection are before the queries; stored they are after each head's query.
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
    has_gate: bool = False

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the fused projection, without those of the gate."""
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
    """A mixture of experts in place of an MLP; each expert is an MLP.

    Args:
        count: number of experts.
        top_k: experts of a token.
        width: width of an expert between its two products.
        routing: how a token's experts are chosen and weighed.
        shared_width: width of an expert that all tokens have; 0 for none.
        is_shared_gated: whether that expert is weighed by a sigmoid.
        has_choice_bias: whether a bias is added to the scores for the choice.
        routes_in_float32: whether the router's logits are left in float32.
        activation: how gate and up are combined, or what is applied to up alone.
        shared_bias: whether the products of the shared expert have biases.
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
    shared_bias: bool = False
    has_bias: bool = False
    is_interleaved: bool = False
    names: tuple[ExpertNames, ...] = ()

    @property
    def is_gated(self) -> bool:
        """Whether experts, and the shared one, have gates."""
        return has_gate(self.activation)
