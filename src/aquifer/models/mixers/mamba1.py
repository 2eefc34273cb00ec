"""Mamba (Gu and Dao, 2023): a state of N numbers for each of I channels.

The product of the input has the columns x [I] | gate [I], of which x goes through a convolution. A
second product makes dt, b and c of its result, and a third one the time steps of all channels:

    low [R] | b [N] | c [N] = x_proj(x)
    dt [I] = dt_proj(low)

Low, b and c may each be normalised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from aquifer.cache.base import KVView, Rows, StateTensor
from aquifer.kernels.causal_conv import conv_chunks, conv_update
from aquifer.kernels.gated_norm import gated_norm
from aquifer.kernels.linear import linear
from aquifer.kernels.norm import NormWeights, norm_heads
from aquifer.kernels.selective_scan import selective_chunks, selective_update
from aquifer.models.collectives import ALONE, Collectives
from aquifer.models.tensors import Linear, Tensors
from aquifer.weights.parameters import Parameter, Source

_NORMED = ("dt", "b", "c")


class InnerNorm(Enum):
    """RMSNorm of low, b and c."""

    NONE = "none"
    PLAIN = "without weights"  # FalconMamba
    WEIGHTED = "with weights"  # Jamba


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Description of a Mamba mixer: a `Mixer`.

    Args:
        width: channels, I.
        state_size: numbers of the state of a channel, N.
        kernel_size: taps of the convolution, at least 2.
        dt_rank: elements that the time steps are made of, R.
        inner_norm: how these, b and c are normalised.
        norm_eps: added to the mean square there.
        conv_bias: whether the convolution has a bias.
        proj_bias: whether the first and the last product have one.
    """

    width: int
    state_size: int
    kernel_size: int
    dt_rank: int
    inner_norm: InnerNorm = InnerNorm.NONE
    norm_eps: float = 1e-6
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def inner_columns(self) -> tuple[int, int, int]:
        """Columns of low, b and c."""
        return self.dt_rank, self.state_size, self.state_size

    def parameters(
        self, name: str, stored: str, hidden_size: int, dtype: torch.dtype
    ) -> Iterator[Parameter]:
        """See `Mixer.parameters`."""
        wide = torch.float32

        def one(place: str, shape: tuple[int, ...], dtype: torch.dtype = dtype) -> Parameter:
            return Parameter(name + place, shape, dtype, (Source(stored + place),))

        yield one("in_proj.weight", (2 * self.width, hidden_size))
        if self.proj_bias:
            yield one("in_proj.bias", (2 * self.width,))
        yield one("conv1d.weight", (self.width, 1, self.kernel_size))
        if self.conv_bias:
            yield one("conv1d.bias", (self.width,))
        yield one("x_proj.weight", (sum(self.inner_columns), self.width))
        if self.inner_norm is InnerNorm.WEIGHTED:
            for part, columns in zip(_NORMED, self.inner_columns, strict=True):
                yield one(f"{part}_layernorm.weight", (columns,))
        yield one("dt_proj.weight", (self.width, self.dt_rank))
        yield one("dt_proj.bias", (self.width,), wide)
        yield one("A_log", (self.width, self.state_size), wide)
        yield one("D", (self.width,), wide)
        yield one("out_proj.weight", (hidden_size, self.width))
        if self.proj_bias:
            yield one("out_proj.bias", (hidden_size,))

    def state(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """See `Mixer.state`."""
        return (
            StateTensor("conv", (self.width, self.kernel_size - 1), dtype),
            StateTensor("ssm", (self.width, self.state_size), state_dtype),
        )

    def layer(
        self, tensors: Tensors, name: str, index: int, collectives: Collectives = ALONE
    ) -> Mamba1Layer:
        """See `Mixer.layer`."""
        return Mamba1Layer(self, tensors, name, index, collectives)


class Mamba1Layer:
    """Mamba of one layer: a `MixerLayer`, and the `Recurrence` in it.

    Args:
        of: its description.
        tensors: parameters, by name.
        name: begins the names of the layer's own.
        index: of the layer in the layout of the state.
        collectives: the ranks.
    """

    def __init__(
        self, of: Mamba1, tensors: Tensors, name: str, index: int, collectives: Collectives
    ) -> None:
        self._of = of
        self._collectives = collectives
        self._index = index
        self.in_proj = Linear.of(tensors, f"{name}in_proj")
        self.out_proj = Linear.of(tensors, f"{name}out_proj")
        self._conv = tensors[f"{name}conv1d.weight"].squeeze(1)  # [channels, taps]
        self._conv_bias = tensors.get(f"{name}conv1d.bias")
        self._x_proj = tensors[f"{name}x_proj.weight"]
        self._dt_proj = tensors[f"{name}dt_proj.weight"]
        self._dt_bias = tensors[f"{name}dt_proj.bias"]
        self._a_log = tensors[f"{name}A_log"]
        self._d = tensors[f"{name}D"]
        self._norms: list[NormWeights] = []
        if of.inner_norm is not InnerNorm.NONE:
            for part, columns in zip(_NORMED, of.inner_columns, strict=True):
                weight = tensors.get(f"{name}{part}_layernorm.weight")
                if weight is None:
                    weight = torch.ones_like(self._x_proj[:columns, 0])
                self._norms.append(NormWeights(weight, None, of.norm_eps))
        self.out_columns = of.width
        self.kind = of
        self.weights = None  # there are products between the convolution and the recurrence

    def recur(self, product: torch.Tensor, kv: KVView) -> torch.Tensor:
        """See `MixerLayer.recur`."""
        return kv.recur(self._index, product[:, : self._of.width], self)

    def finish(self, mixed: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """See `MixerLayer.finish`."""
        width = self._of.width
        gate = product[:, width:]
        return gated_norm(mixed, gate, None, eps=0.0, group_size=width, norm_before_gate=False)

    def run(
        self,
        inputs: torch.Tensor,
        out: torch.Tensor,
        states: Sequence[torch.Tensor],
        rows: Rows,
    ) -> None:
        """See `Recurrence.run`.

        Args:
            inputs: [tokens, channels].
            out: [tokens, channels].
            states: what convolution and recurrence keep.
            rows: the step's tokens.
        """
        conv_state, state = states
        num_tokens, num_decodes = len(rows.slots), rows.num_decodes
        slots, positions = rows.slots[:num_decodes], rows.positions[:num_decodes]
        x = inputs.new_empty(num_tokens, self._of.width)
        weights = self._conv, self._conv_bias, conv_state
        if num_decodes:
            conv_update(
                inputs[:num_decodes],
                *weights,
                slots,
                positions,
                x[:num_decodes],
                activation="silu",
            )
        if rows.chunks is not None:
            conv_chunks(inputs[:num_tokens], *weights, rows.chunks, x, activation="silu")
        (inner,) = self._collectives.total(linear(x, self._x_proj, None))
        low, b, c = inner.split(self._of.inner_columns, dim=1)
        for part, norm in zip((low, b, c), self._norms, strict=False):
            norm_heads(part.unsqueeze(1), norm)
        dt = linear(low, self._dt_proj, None)
        if num_decodes:
            selective_update(
                state,
                x[:num_decodes],
                dt[:num_decodes],
                self._a_log,
                b[:num_decodes],
                c[:num_decodes],
                self._d,
                self._dt_bias,
                slots,
                positions,
                out[:num_decodes],
            )
        if rows.chunks is not None:
            selective_chunks(
                state,
                x,
                dt,
                self._a_log,
                b,
                c,
                self._d,
                self._dt_bias,
                rows.chunks,
                out[:num_tokens],
            )
