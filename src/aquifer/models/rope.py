"""Angles of the rotary embedding, with the kinds of scaling that checkpoints ask for.

Frequencies follow the papers, with Transformers' names and defaults for their parameters, so that
a checkpoint gives the same tokens here and in Transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from aquifer.fields import Fields
from aquifer.kernels.rotary import rotary_angles
from aquifer.models.limits import LEAST_POSITIONS, MOST_POSITIONS

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_LEAST, _MOST = 1e-6, 1e6
"""Bounds of factors and weights; real ones are between 0.1 and 100."""

_LEAST_THETA, _MOST_THETA = 2.0, 1e30
"""Bounds of the base of the frequencies, all of which are then normal numbers of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class RotarySettings:
    """Settings of the rotary embedding, from a configuration."""

    max_positions: int  # `max_position_embeddings`
    max_model_len: int  # longest context in tokens, with scaling
    theta: float  # base of the frequencies
    partial_factor: float  # part of each head that is rotated
    frequencies: torch.Tensor  # [rotated / 2] float32, on the host
    magnitude: float  # factor on cosines and sines
    # Of a base that grows with the context length; None if it is fixed.
    dynamic_factor: float | None = None
    # The context length beyond which all positions have `long_frequencies`; None if there is none.
    switch_tokens: int | None = None
    long_frequencies: torch.Tensor | None = None  # as `frequencies`

    @classmethod
    def read(
        cls,
        config: Fields,
        head_dim: int,
        max_positions: int,
        *,
        fields: Fields | None = None,
        default_partial: float = 1.0,
    ) -> RotarySettings:
        """Read the settings as written by Transformers 4 or 5.

        Args:
            config: the configuration.
            head_dim: dimensions of a head, an even number.
            max_positions: its `max_position_embeddings`.
            fields: the settings, if they are not those of the whole model.
            default_partial: part of each head that is rotated, unless it is given.

        Raises:
            ConfigError: the kind of scaling is unknown, or a parameter is missing or impossible.
        """
        is_whole = fields is None
        if fields is None:
            fields = rope_section(config)
        for name in fields:
            if isinstance(fields.values[name], dict):
                raise fields.error(name, "a number or a text, as all layers have the same settings")
        kind_name = "type" if "type" in fields and "rope_type" not in fields else "rope_type"
        kind = fields.text(kind_name, default="default")
        if kind == "su":  # an older name
            kind = "longrope"
        if kind not in _KINDS:
            raise fields.error(kind_name, f"one of {', '.join(_KINDS)}")
        if _ORIGINAL in config:
            original = {_ORIGINAL: config.values[_ORIGINAL]}
            is_first = is_whole and kind in _SCALED_FROM_ORIGINAL  # as in Transformers
            fields = fields.replaced(original) if is_first else fields.with_defaults(original)
        if kind == "dynamic" and head_dim == 2:
            raise fields.error(kind_name, "of another kind for heads of 2 dimensions")
        partial = (fields if "partial_rotary_factor" in fields else config).number(
            "partial_rotary_factor", _LEAST, 1.0, default=default_partial
        )
        head_dim = int(head_dim * partial)
        if head_dim < 2 or head_dim % 2:
            raise fields.error(
                "partial_rotary_factor",
                f"such that it rotates an even number of dimensions, not {head_dim}",
            )
        theta = (fields if "rope_theta" in fields else config).number(
            "rope_theta", _LEAST_THETA, _MOST_THETA, default=10000.0
        )
        frequencies = 1.0 / theta ** _exponents(head_dim)
        magnitude, dynamic_factor = 1.0, None
        switch_tokens, long_frequencies = None, None
        if kind == "linear":
            frequencies = frequencies / _factor(fields)
        elif kind == "dynamic":
            dynamic_factor = _factor(fields)
        elif kind == "llama3":
            frequencies = _llama3(frequencies, fields)
        elif kind == "yarn":
            frequencies, magnitude = _yarn(frequencies, theta, max_positions, fields)
        elif kind == "longrope":
            original_tokens = fields.integer(_ORIGINAL, LEAST_POSITIONS, MOST_POSITIONS)
            powers = theta ** _exponents(head_dim)
            frequencies = 1.0 / (_factors(fields, "short_factor", head_dim) * powers)
            magnitude = _longrope_magnitude(original_tokens, max_positions, fields)
            if original_tokens < max_positions:
                switch_tokens = original_tokens
                long_frequencies = 1.0 / (_factors(fields, "long_factor", head_dim) * powers)
        return cls(
            max_positions=max_positions,
            max_model_len=_max_model_len(fields, kind, max_positions),
            theta=theta,
            partial_factor=partial,
            frequencies=frequencies,
            magnitude=magnitude,
            dynamic_factor=dynamic_factor,
            switch_tokens=switch_tokens,
            long_frequencies=long_frequencies,
        )


def rope_section(config: Fields) -> Fields:
    """The settings of the rotary embedding, for all layers.

    Transformers 5 writes `rope_parameters`. Of both, `rope_scaling` counts, as there: users add it
    for a longer context.
    """
    is_old = bool(config.values.get("rope_scaling"))
    return config.section("rope_scaling" if is_old else "rope_parameters")


class RotaryAngles:
    """Cosines and sines of a step's positions, computed in every step.

    A table for the whole context of a long model would take more memory than some models' weights.

    Args:
        settings: frequencies and scaling.
        device: device of the positions.
    """

    def __init__(self, settings: RotarySettings, device: torch.device) -> None:
        self._settings = settings
        self._frequencies = settings.frequencies.to(device)
        long = settings.long_frequencies
        self._long_frequencies = None if long is None else long.to(device)
        self._switch_tokens = settings.switch_tokens or 0
        self._exponents = _exponents(2 * len(settings.frequencies)).to(device)

    def __call__(
        self, positions: torch.Tensor, context_lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (cos, sin), each [tokens, rotated / 2] float32.

        Args:
            positions: [tokens].
            context_lengths: [tokens], see `ModelInput`; used by dynamic scaling and longrope only.
        """
        frequencies, factor = self._frequencies, self._settings.dynamic_factor
        if factor is not None:
            frequencies = self._dynamic(context_lengths, factor)
        elif self._long_frequencies is not None:
            is_long = context_lengths > self._switch_tokens
            frequencies = torch.where(
                is_long.unsqueeze(1), self._long_frequencies, self._frequencies
            )
        return rotary_angles(positions, frequencies, self._settings.magnitude)

    def _dynamic(self, context_lengths: torch.Tensor, factor: float) -> torch.Tensor:
        """Frequencies whose base grows with the context length, [tokens, head_dim / 2]."""
        limit, head_dim = self._settings.max_positions, 2 * len(self._exponents)
        lengths = context_lengths.clamp(min=limit).to(torch.float32)
        growth = factor * lengths / limit - (factor - 1)
        base = self._settings.theta * growth ** (head_dim / (head_dim - 2))
        return 1.0 / base.unsqueeze(1) ** self._exponents


def _exponents(head_dim: int) -> torch.Tensor:
    """[head_dim / 2]."""
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _factor(fields: Fields) -> float:
    return fields.number("factor", _LEAST, _MOST)


def _max_model_len(fields: Fields, kind: str, max_positions: int) -> int:
    """Longest context in tokens, extended by rotary scaling; computed as vLLM does.

    "linear" and "dynamic" multiply `max_position_embeddings` by their factor, unless the original
    length is given too. With "yarn", some checkpoints give that entry before and some after
    scaling, so the original length is multiplied. In all other cases the entry is the final length.
    """
    is_stretched = kind == "yarn" or (kind in ("linear", "dynamic") and _ORIGINAL not in fields)
    if not is_stretched or "factor" not in fields:
        return max_positions
    original = _original(fields, max_positions)
    result = int(original * _factor(fields))
    if not LEAST_POSITIONS <= result <= MOST_POSITIONS:
        raise fields.error(
            "factor",
            f"such that a context of {original} tokens times it has from {LEAST_POSITIONS} to "
            f"{MOST_POSITIONS}",
        )
    return result


def _original(fields: Fields, default: int | None = None) -> int:
    """Context length before scaling, in tokens."""
    return fields.integer(_ORIGINAL, 1, MOST_POSITIONS, default)


def _llama3(frequencies: torch.Tensor, fields: Fields) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, blend in between (Llama 3.1)."""
    factor, original = _factor(fields), _original(fields)
    low = fields.number("low_freq_factor", _LEAST, _MOST)
    high = fields.number("high_freq_factor", _LEAST, _MOST)
    if high <= low:
        raise fields.error("high_freq_factor", f"more than low_freq_factor, which is {low:g}")
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def _factors(fields: Fields, name: str, head_dim: int) -> torch.Tensor:
    """A factor on each wavelength, [head_dim / 2]."""
    return torch.tensor(fields.numbers(name, _LEAST, _MOST, head_dim // 2))


def _longrope_magnitude(original: int, max_positions: int, fields: Fields) -> float:
    """Attention magnitude of LongRoPE, the same for short and for long contexts."""
    if "attention_factor" in fields:
        return fields.number("attention_factor", _LEAST, _MOST)
    factor = _factor(fields) if "factor" in fields else max_positions / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn(
    frequencies: torch.Tensor, theta: float, max_positions: int, fields: Fields
) -> tuple[torch.Tensor, float]:
    """Scaled frequencies and attention magnitude of YaRN (sections 3.2 and 3.4).

    Low frequencies are interpolated, high ones kept.
    """
    head_dim = 2 * len(frequencies)
    original = _original(fields, max_positions)
    factor = _factor(fields) if "factor" in fields else max_positions / original

    def dimension_of(num_rotations: float) -> float:
        """Dimension with that many full rotations over the original context."""
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(fields.number("beta_fast", _LEAST, _MOST, default=32.0))
    high = dimension_of(fields.number("beta_slow", _LEAST, _MOST, default=1.0))
    if fields.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    mixed = frequencies / factor * ramp + frequencies * (1 - ramp)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in fields:
        return mixed, fields.number("attention_factor", _LEAST, _MOST)
    mscale = fields.number("mscale", 0.0, _MOST, default=0.0)
    mscale_all_dim = fields.number("mscale_all_dim", 0.0, _MOST, default=0.0)
    if mscale and mscale_all_dim:
        return mixed, magnitude(mscale) / magnitude(mscale_all_dim)
    return mixed, magnitude(1.0)
