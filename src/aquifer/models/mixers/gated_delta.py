"""Gated DeltaNet (Yang et al., 2024): for each value head, a matrix that maps keys to values.

The product of the input has the columns

    q [HK K] | k [HK K] | v [HV V] | gate [HV V] | b [HV] | a [HV]

of which q, k and v go through a convolution; b and a give the learning rate and the decay. Each
value head is normalised, and then multiplied by silu(gate). In the checkpoint, the rows of these
parts are stored by key head, with those of its value heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from aquifer.cache.base import KVView, Rows, StateTensor
from aquifer.kernels.causal_conv import conv_chunks, conv_update
from aquifer.kernels.gated_delta import delta_chunks, delta_gates, delta_update
from aquifer.kernels.gated_norm import gated_norm
from aquifer.models.collectives import ALONE, Collectives
from aquifer.models.tensors import Linear, Tensors
from aquifer.weights.forms import RowOrder
from aquifer.weights.parameters import Parameter, Source


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Description of a Gated DeltaNet mixer: a `Mixer`.

    Args:
        num_key_heads: heads of queries and keys, HK.
        num_value_heads: heads of values, HV, a multiple of that.
        key_dim: elements of a query and of a key, K.
        value_dim: elements of a value, V.
        kernel_size: taps of the convolution, at least 2.
        norm_eps: added to the mean square of a value head.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    norm_eps: float

    @property
    def width(self) -> int:
        """Elements of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values, which go through the convolution."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.width

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Columns of the product: the convolution's, the gate, b and a."""
        return sum(self.conv_parts), self.width, self.num_value_heads, self.num_value_heads

    def parameters(
        self, name: str, stored: str, hidden_size: int, dtype: torch.dtype
    ) -> Iterator[Parameter]:
        """See `Mixer.parameters`."""

        def one(place: str, shape: tuple[int, ...], dtype: torch.dtype = dtype) -> Parameter:
            return Parameter(name + place, shape, dtype, (Source(stored + place),))

        group = self.num_value_heads // self.num_key_heads
        values = group * self.value_dim
        num_columns, num_wide = sum(self.conv_parts), sum(self.parts[:2])
        by_head = self.num_key_heads
        sources = (
            Source(
                f"{stored}in_proj_qkvz.weight",
                (slice(0, num_wide),),
                order=RowOrder(by_head, (self.key_dim, self.key_dim, values, values)),
            ),
            Source(
                f"{stored}in_proj_ba.weight",
                (slice(num_wide, sum(self.parts)),),
                order=RowOrder(by_head, (group, group)),
            ),
        )
        yield Parameter(f"{name}in_proj.weight", (sum(self.parts), hidden_size), dtype, sources)
        yield one("conv1d.weight", (num_columns, 1, self.kernel_size))
        for place in ("A_log", "dt_bias"):
            yield one(place, (self.num_value_heads,), torch.float32)
        yield one("norm.weight", (self.value_dim,))
        yield one("out_proj.weight", (hidden_size, self.width))

    def state(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """See `Mixer.state`."""
        heads = (self.num_value_heads, self.key_dim, self.value_dim)
        return (
            StateTensor("conv", (sum(self.conv_parts), self.kernel_size - 1), dtype),
            StateTensor("delta", heads, state_dtype),
        )

    def layer(
        self, tensors: Tensors, name: str, index: int, collectives: Collectives = ALONE
    ) -> GatedDeltaLayer:
        """See `Mixer.layer`."""
        return GatedDeltaLayer(self, tensors, name, index)


class GatedDeltaLayer:
    """Gated DeltaNet of one layer: a `MixerLayer`, and the `Recurrence` in it.

    Args:
        of: its description.
        tensors: parameters, by name.
        name: begins the names of the layer's own.
        index: of the layer in the layout of the state.
    """

    def __init__(self, of: GatedDelta, tensors: Tensors, name: str, index: int) -> None:
        self._of = of
        self._index = index
        self.in_proj = Linear.of(tensors, f"{name}in_proj")
        self.out_proj = Linear.of(tensors, f"{name}out_proj")
        self._conv = tensors[f"{name}conv1d.weight"].squeeze(1)  # [columns, taps]
        self._a_log = tensors[f"{name}A_log"]
        self._dt_bias = tensors[f"{name}dt_bias"]
        self._norm = tensors[f"{name}norm.weight"]
        self._scale = of.key_dim**-0.5
        self.out_columns = of.width
        self.kind = of
        self.weights = [self._conv, self._a_log, self._dt_bias]

    def recur(self, product: torch.Tensor, kv: KVView) -> torch.Tensor:
        """See `MixerLayer.recur`."""
        return kv.recur(self._index, product, self)

    def finish(self, mixed: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """See `MixerLayer.finish`."""
        of = self._of
        _, gate, _, _ = product.split(of.parts, dim=1)
        return gated_norm(
            mixed,
            gate,
            self._norm,
            eps=of.norm_eps,
            group_size=of.value_dim,
            norm_before_gate=True,
        )

    def run(
        self,
        inputs: torch.Tensor,
        out: torch.Tensor,
        states: Sequence[torch.Tensor],
        rows: Rows,
    ) -> None:
        """See `Recurrence.run`.

        Args:
            inputs: [tokens, columns of the product].
            out: [tokens, out_columns].
            states: what convolution and recurrence keep.
            rows: the step's tokens.
        """
        of, (conv_state, state) = self._of, states
        num_tokens, num_decodes = len(rows.slots), rows.num_decodes
        slots, positions = rows.slots[:num_decodes], rows.positions[:num_decodes]
        before, _, b, a = inputs[:num_tokens].split(of.parts, dim=1)
        g, beta = delta_gates(a, b, self._a_log, self._dt_bias)
        after = inputs.new_empty(num_tokens, sum(of.conv_parts))
        q, k, v = after.split(of.conv_parts, dim=1)
        q, k = (each.unflatten(1, (of.num_key_heads, of.key_dim)) for each in (q, k))
        v, y = (
            each.unflatten(1, (of.num_value_heads, of.value_dim)) for each in (v, out[:num_tokens])
        )
        weights = self._conv, None, conv_state
        if num_decodes:
            conv_update(
                before[:num_decodes],
                *weights,
                slots,
                positions,
                after[:num_decodes],
                activation="silu",
            )
            delta_update(
                state,
                q[:num_decodes],
                k[:num_decodes],
                v[:num_decodes],
                g[:num_decodes],
                beta[:num_decodes],
                slots,
                positions,
                y[:num_decodes],
                scale=self._scale,
            )
        if rows.chunks is not None:
            conv_chunks(before, *weights, rows.chunks, after, activation="silu")
            delta_chunks(state, q, k, v, g, beta, rows.chunks, y, scale=self._scale)
