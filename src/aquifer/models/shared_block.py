"""Transformer blocks that several layers share, as in Zamba2 (Glorioso et al., 2024).

A block computes, from the stream x and the embeddings e that it began as,

    both = norm([x, e])
    attended = norm(out(attention(qkv(both) + adapter(both))))
    result = down(activation(up(attended) + adapter(attended)))

without residual connections. The layer that uses it multiplies the result by a matrix of its own.
The blocks are used in turn. Each has its weights once; an adapter, the product of two matrices of
low rank, and KV belong to one use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from aquifer.cache.base import AttentionOptions, KVView
from aquifer.kernels.activation import activate
from aquifer.kernels.linear import linear, norm_linear, silu_linear
from aquifer.kernels.norm import rms_norm
from aquifer.kernels.rotary import qk_norm_rope_write
from aquifer.models.collectives import ALONE, Collectives
from aquifer.models.parts import Attention, Mlp, Norm
from aquifer.models.tensors import Linear, Tensors
from aquifer.weights.parameters import Parameter, Source


@dataclass(frozen=True, slots=True)
class SharedUse:
    """One use of a shared block.

    Args:
        block: number of the block.
        index: number of the use, among those of all blocks.
    """

    block: int
    index: int


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Description of the blocks, which differ in their weights alone.

    Args:
        count: number of blocks, which are used in turn.
        layers: the layers that use them, ascending.
        attention: attention, without any options. Its input is twice as wide as the hidden states.
        mlp: the MLP, with a gate.
        norm: the two norms, RMSNorm.
        rank: of the adapters.
        adapts_attention: whether queries, keys and values have adapters, and not only the MLP.
            Then there are as many KV heads as heads.
    """

    count: int
    layers: tuple[int, ...]
    attention: Attention
    mlp: Mlp
    norm: Norm
    rank: int
    adapts_attention: bool

    def __post_init__(self) -> None:
        heads = self.attention
        plain = Attention(heads.num_heads, heads.num_kv_heads, heads.head_dim)
        assert heads == plain, "the blocks compute no options of attention"
        assert self.mlp.is_gated
        assert not self.adapts_attention or heads.num_kv_heads == heads.num_heads

    def parameters(
        self, layer_name: str, tensors: Collection[str], hidden_size: int, dtype: torch.dtype
    ) -> Iterator[Parameter]:
        """The parameters of all blocks and of all their uses.

        A checkpoint may have the tensors of a block under each layer that uses it, or under one of
        them. Each is read from the first layer that has it.

        Args:
            layer_name: begins the names of a layer's stored tensors, with `{}` for its number.
            tensors: names of the stored tensors.
            hidden_size: width of the hidden states, H.
            dtype: dtype of the weights.
        """
        rank, mlp_rows = self.rank, 2 * self.mlp.width
        q_rows, k_rows, v_rows = self.attention.qkv_rows
        parts = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        for block in range(min(self.count, len(self.layers))):
            users = [f"{layer_name.format(i)}shared_transformer." for i in self.layers]
            users = users[block :: self.count]

            def source(place: str, *index: int | slice, users: list[str] = users) -> Source:
                names = [user + place for user in users]
                name = next((each for each in names if each in tensors), names[0])
                return Source(name, index)

            def one(name: str, shape: tuple[int, ...], *sources: Source) -> Parameter:
                return Parameter(name, shape, dtype, sources)

            name = f"shared.{block}."
            norm = source("input_layernorm.weight")
            yield one(f"{name}before_attention.weight", (2 * hidden_size,), norm)
            ends = (0, q_rows, q_rows + k_rows, q_rows + k_rows + v_rows)
            qkv = (
                source(f"{part}.weight", slice(ends[i], ends[i + 1]))
                for i, part in enumerate(parts)
            )
            yield one(f"{name}qkv.weight", (ends[-1], 2 * hidden_size), *qkv)
            out = source("self_attn.o_proj.weight")
            yield one(f"{name}out.weight", (hidden_size, self.attention.out_columns), out)
            norm = source("pre_ff_layernorm.weight")
            yield one(f"{name}before_mlp.weight", (hidden_size,), norm)
            for matrix, stored, shape in (
                ("up", "feed_forward.gate_up_proj", (mlp_rows, hidden_size)),
                ("down", "feed_forward.down_proj", (hidden_size, self.mlp.width)),
            ):
                yield one(f"{name}{matrix}.weight", shape, source(f"{stored}.weight"))
                if self.mlp.has_bias:
                    yield one(f"{name}{matrix}.bias", shape[:1], source(f"{stored}.bias"))
            for use in range(block, len(self.layers), self.count):
                name = f"shared_uses.{use}."
                stored = f"feed_forward.gate_up_proj_adapter_list.{use}."
                first, second = (source(f"{stored}{i}.weight") for i in (0, 1))
                yield one(f"{name}up_first", (rank, hidden_size), first)
                yield one(f"{name}up_second", (mlp_rows, rank), second)
                if self.adapts_attention:
                    adapters = [f"self_attn.linear_{part}_adapter_list.{use}." for part in "qkv"]
                    firsts = (
                        source(f"{adapter}0.weight", slice(i * rank, (i + 1) * rank))
                        for i, adapter in enumerate(adapters)
                    )
                    seconds = (source(f"{each}1.weight", i) for i, each in enumerate(adapters))
                    yield one(f"{name}qkv_first", (3 * rank, 2 * hidden_size), *firsts)
                    yield one(f"{name}qkv_second", (3, q_rows, rank), *seconds)
                linear_name = f"{layer_name.format(self.layers[use])}linear.weight"
                own = Source(linear_name)
                yield one(f"{name}linear.weight", (hidden_size, hidden_size), own)

    def use(
        self,
        tensors: Tensors,
        use: SharedUse,
        index: int,
        scale: float,
        collectives: Collectives = ALONE,
    ) -> SharedLayer:
        """A use over loaded parameters.

        Args:
            tensors: parameters, by name.
            use: the use.
            index: of its layer in the KV layout.
            scale: factor on the dot products.
            collectives: the ranks, of which each has some heads, and columns of the MLP.
        """
        return SharedLayer(self, tensors, use, index, AttentionOptions(scale), collectives)


class SharedLayer:
    """A use of a shared block, and the matrix of its layer, over loaded parameters.

    Args:
        of: the description of the blocks.
        tensors: parameters, by name.
        use: the use.
        index: of its layer in the KV layout.
        how: how it attends.
        collectives: the ranks.
    """

    def __init__(
        self,
        of: SharedBlocks,
        tensors: Tensors,
        use: SharedUse,
        index: int,
        how: AttentionOptions,
        collectives: Collectives,
    ) -> None:
        self._of, self._index, self._how = of, index, how
        self._collectives = collectives
        block, own = f"shared.{use.block}.", f"shared_uses.{use.index}."
        self._before_attention = tensors[f"{block}before_attention.weight"]
        self._qkv = Linear.of(tensors, f"{block}qkv")
        self._out = Linear.of(tensors, f"{block}out")
        self._before_mlp = tensors[f"{block}before_mlp.weight"]
        self._up = Linear.of(tensors, f"{block}up")
        self._down = Linear.of(tensors, f"{block}down")
        self._up_first = tensors[f"{own}up_first"]  # [rank, hidden]
        self._up_second = tensors[f"{own}up_second"]  # [2 width, rank]
        self._qkv_first = tensors.get(f"{own}qkv_first")  # [3 rank, 2 hidden]
        self._qkv_second = tensors.get(f"{own}qkv_second")  # [3, rows of q, rank]
        self._linear = Linear.of(tensors, f"{own}linear")

    def __call__(
        self,
        x: torch.Tensor,
        embedding: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        kv: KVView,
    ) -> torch.Tensor:
        """What the layer adds to the input of its mixer.

        Args:
            x: [tokens, hidden], the stream.
            embedding: [tokens, hidden], what it began as.
            cos: [tokens, head_dim / 2] float32; None for no rotary embedding.
            sin: [tokens, head_dim / 2] float32; None exactly if `cos` is.
            kv: the step's KV.

        Returns:
            [tokens, hidden], contiguous.
        """
        of, heads = self._of, self._of.attention
        qkv = self._projected(torch.cat((x, embedding), dim=1))
        query = qkv.new_empty(len(qkv), heads.num_heads, heads.head_dim)
        destination = kv.destination(self._index)
        qk_norm_rope_write(qkv, None, None, cos, sin, query, *destination)
        attend = self._out(kv.attend(self._index, query, self._how).flatten(1))
        (attended,) = self._collectives.total(attend)
        normed = rms_norm(attended, self._before_mlp, of.norm.eps)
        up = self._up(normed)
        up.addmm_(linear(normed, self._up_first, None), self._up_second.T)
        if of.mlp.activation == "silu":
            down = silu_linear(up, self._down.weight, self._down.bias)
        else:
            down = self._down(activate(up, of.mlp.activation, is_gated=True))
        return self._linear(*self._collectives.total(down))

    def _projected(self, both: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values: [tokens, 2 hidden] -> [tokens, rows of all three]."""
        weight, eps = self._before_attention, self._of.norm.eps
        if self._qkv_first is None or self._qkv_second is None:
            return norm_linear(None, both, weight, eps, self._qkv.weight, None)[0]
        normed = rms_norm(both, weight, eps)
        qkv = self._qkv(normed)
        low = linear(normed, self._qkv_first, None)
        parts = qkv.unflatten(1, (3, -1)).transpose(0, 1)  # [3, tokens, rows of q]
        parts.baddbmm_(low.unflatten(1, (3, -1)).transpose(0, 1), self._qkv_second.mT)
        return qkv
