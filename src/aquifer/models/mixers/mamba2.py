"""Mamba-2 (Dao and Gu, 2024): a state of P times N numbers for each of H heads.

The product of the input has the columns

    gate [H P] | x [H P] | b [G N] | c [G N] | dt [H]

of which x, b and c go through a convolution. The heads of a group have the same b and c. Beside the
state, a layer keeps x, b and dt of the latest tokens (`kernels.ssd_update`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aquifer.cache.base import KVView, Rows, StateTensor
from aquifer.kernels.causal_conv import conv_chunks, conv_update
from aquifer.kernels.gated_norm import gated_norm
from aquifer.kernels.ssd import scan_chunks
from aquifer.kernels.ssd_update import Pending, state_update
from aquifer.models.collectives import ALONE, Collectives
from aquifer.models.tensors import Linear, Tensors
from aquifer.weights.parameters import Parameter, Source

_FEW_PLACES, _MANY_PLACES, _WIDE_SIZE = 4, 7, 256
"""Places of pending tokens: many if a state's rows have so many numbers, so that they take some 3 %
of its memory."""


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Description of a Mamba-2 mixer: a `Mixer`.

    Args:
        num_heads: heads, H.
        head_dim: elements of a head's input, P.
        num_groups: groups of heads with the same b and c, G; also groups of columns that the norm
            covers.
        state_size: numbers of the state for each element, N.
        kernel_size: taps of the convolution, at least 2.
        norm_eps: added to the mean square in the norm before the last product; None for no norm.
        norm_before_gate: whether the gate multiplies what is normalised, else what is to be.
        conv_bias: whether the convolution has a bias.
        in_bias: whether the first product has one.
        out_bias: whether the last product has one.
        dt_limit: bounds of the time step, for tokens of prompts and new tokens alike.
            Transformers has none for tokens that it computes one at a time.
        in_factor: constant factor on the input, multiplied into the weights.
        factors: constant factors on the five parts of the product, multiplied into the weights and
            the bias.
        out_factor: constant factor on the result, multiplied into the last product's.
        norm_groups: groups of columns that the norm covers on all ranks together, if these are
            fewer than the ranks; else as many as there are groups of heads on each.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    norm_eps: float | None
    norm_before_gate: bool = False
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    in_factor: float = 1.0
    factors: tuple[float, ...] = (1.0,) * 5
    out_factor: float = 1.0
    norm_groups: int | None = None

    @property
    def width(self) -> int:
        """Elements of the inputs of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_columns(self) -> int:
        """Elements of b, and of c, of all groups."""
        return self.num_groups * self.state_size

    @property
    def conv_columns(self) -> int:
        """Columns that go through the convolution."""
        return self.width + 2 * self.group_columns

    @property
    def num_pending(self) -> int:
        """Places of tokens that are not in the state yet: one token in so many writes it."""
        return _MANY_PLACES if self.state_size >= _WIDE_SIZE else _FEW_PLACES

    def parameters(
        self, name: str, stored: str, hidden_size: int, dtype: torch.dtype
    ) -> Iterator[Parameter]:
        """See `Mixer.parameters`."""

        def one(
            place: str,
            shape: tuple[int, ...],
            dtype: torch.dtype,
            factors: Sequence[tuple[int, float]] = (),
        ) -> Parameter:
            return Parameter(name + place, shape, dtype, (Source.of(stored + place, factors),))

        groups = self.group_columns
        parts = (self.width, self.width, groups, groups, self.num_heads)
        own = list(zip(parts, self.factors, strict=True))
        with_input = [(rows, factor * self.in_factor) for rows, factor in own]
        out = [(hidden_size, self.out_factor)]
        yield one("in_proj.weight", (sum(parts), hidden_size), dtype, with_input)
        if self.in_bias:
            yield one("in_proj.bias", (sum(parts),), dtype, own)
        yield one("conv1d.weight", (self.conv_columns, 1, self.kernel_size), dtype)
        if self.conv_bias:
            yield one("conv1d.bias", (self.conv_columns,), dtype)
        for place in ("A_log", "D", "dt_bias"):
            yield one(place, (self.num_heads,), torch.float32)
        if self.norm_eps is not None:
            yield one("norm.weight", (self.width,), dtype)
        yield one("out_proj.weight", (hidden_size, self.width), dtype, out)
        if self.out_bias:
            yield one("out_proj.bias", (hidden_size,), dtype, out)

    def state(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """See `Mixer.state`."""
        places = self.num_pending
        # Of a token's place, it is written once, and read in half of the steps that follow.
        traffic = 1 / places + (places - 1) / (2 * places)
        return (
            StateTensor("conv", (self.conv_columns, self.kernel_size - 1), dtype),
            StateTensor(
                "ssm",
                (self.num_heads, self.head_dim, self.state_size),
                state_dtype,
                traffic=1 + 1 / places,
            ),
            StateTensor("x", (places, self.num_heads, self.head_dim), dtype, traffic),
            StateTensor("b", (places, self.num_groups, self.state_size), dtype, traffic),
            StateTensor("steps", (places, self.num_heads), torch.float32, traffic),
        )

    def layer(
        self, tensors: Tensors, name: str, index: int, collectives: Collectives = ALONE
    ) -> Mamba2Layer:
        """See `Mixer.layer`."""
        return Mamba2Layer(self, tensors, name, index, collectives)


class Mamba2Layer:
    """Mamba-2 of one layer: a `MixerLayer`, and the `Recurrence` in it.

    Args:
        of: its description.
        tensors: parameters, by name.
        name: begins the names of the layer's own.
        index: of the layer in the layout of the state.
        collectives: the ranks.
    """

    def __init__(
        self, of: Mamba2, tensors: Tensors, name: str, index: int, collectives: Collectives
    ) -> None:
        self._of = of
        self._collectives = collectives
        self._index = index
        self.in_proj = Linear.of(tensors, f"{name}in_proj")
        self.out_proj = Linear.of(tensors, f"{name}out_proj")
        self._conv = tensors[f"{name}conv1d.weight"].squeeze(1)  # [columns, taps]
        self._conv_bias = tensors.get(f"{name}conv1d.bias")
        self._a_log = tensors[f"{name}A_log"]
        self._d = tensors[f"{name}D"]
        self._dt_bias = tensors[f"{name}dt_bias"]
        self._norm = tensors.get(f"{name}norm.weight")
        self.out_columns = of.width
        self.kind = of
        own = self._conv, self._conv_bias, self._a_log, self._d, self._dt_bias
        self.weights = [each for each in own if each is not None]

    def recur(self, product: torch.Tensor, kv: KVView) -> torch.Tensor:
        """See `MixerLayer.recur`. Without a norm, the result is gated already."""
        return kv.recur(self._index, product, self)

    def finish(self, mixed: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """See `MixerLayer.finish`."""
        of, size = self._of, self._collectives.size
        if self._norm is None:
            return mixed
        gate = product[:, : of.width]
        if (of.norm_groups or size) < size:
            return self._normed_together(mixed, gate, self._norm)
        return gated_norm(
            mixed,
            gate,
            self._norm,
            eps=of.norm_eps or 0.0,
            group_size=of.width // of.num_groups,
            norm_before_gate=of.norm_before_gate,
        )

    def _normed_together(
        self, mixed: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """`gated_norm` where several ranks have columns of the same group: [tokens, width]."""
        of, ranks = self._of, self._collectives
        assert of.norm_groups is not None
        assert of.norm_eps is not None
        factor = F.silu(gate.float())
        wide = mixed.float() if of.norm_before_gate else mixed.float() * factor
        squares = wide.new_zeros(len(wide), of.norm_groups)
        group = ranks.rank * of.norm_groups // ranks.size
        squares[:, group] = wide.square().mean(1)
        (sums,) = ranks.total(squares)
        mean = sums[:, group : group + 1] * (of.norm_groups / ranks.size)
        normed = wide * torch.rsqrt(mean + of.norm_eps) * weight.float()
        return (normed * factor if of.norm_before_gate else normed).to(mixed.dtype)

    def run(
        self,
        inputs: torch.Tensor,
        out: torch.Tensor,
        states: Sequence[torch.Tensor],
        rows: Rows,
    ) -> None:
        """See `Recurrence.run`.

        Args:
            inputs: [tokens, columns of gate, x, b, c and dt].
            out: [tokens, out_columns].
            states: what convolution and recurrence keep, as in `Mamba2.state`.
            rows: the step's tokens.
        """
        of, (conv_state, state) = self._of, states[:2]
        pending = Pending(*states[2:])
        num_tokens, num_decodes = len(rows.slots), rows.num_decodes
        slots, positions = rows.slots[:num_decodes], rows.positions[:num_decodes]
        gate, before, dt = inputs[:num_tokens].split(
            (of.width, of.conv_columns, of.num_heads), dim=1
        )
        gate = gate.unflatten(1, (of.num_heads, of.head_dim)) if self._norm is None else None
        after = inputs.new_empty(num_tokens, of.conv_columns)
        x, b, c = after.split((of.width, of.group_columns, of.group_columns), dim=1)
        x = x.unflatten(1, (of.num_heads, of.head_dim))
        b, c = (each.unflatten(1, (of.num_groups, of.state_size)) for each in (b, c))
        y = out[:num_tokens].unflatten(1, (of.num_heads, of.head_dim))
        weights = self._conv, self._conv_bias, conv_state
        if num_decodes:
            conv_update(
                before[:num_decodes],
                *weights,
                slots,
                positions,
                after[:num_decodes],
                activation="silu",
            )
            state_update(
                state,
                pending,
                x[:num_decodes],
                dt[:num_decodes],
                self._a_log,
                b[:num_decodes],
                c[:num_decodes],
                self._d,
                self._dt_bias,
                slots,
                positions,
                y[:num_decodes],
                dt_limit=of.dt_limit,
                gate=None if gate is None else gate[:num_decodes],
            )
        if rows.chunks is not None:
            conv_chunks(before, *weights, rows.chunks, after, activation="silu")
            scan_chunks(
                state,
                pending,
                x,
                dt,
                self._a_log,
                b,
                c,
                self._d,
                self._dt_bias,
                rows.chunks,
                y,
                dt_limit=of.dt_limit,
                gate=gate,
            )
