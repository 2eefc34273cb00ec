"""Angles of the rotary embedding, with the kinds of scaling that checkpoints ask for.

Frequencies follow the papers, with Transformers' names and defaults for their parameters, so that
a checkpoint gives the same tokens here and in Transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from aquifer.errors import ConfigError
from aquifer.kernels.rotary import rotary_angles


class RotaryAngles:
    """Cosines and sines of a step's positions, computed in every step.

    A table for the whole context of a long model would take more memory than some models' weights.

    Args:
        head_dim: number of dimensions that are rotated.
        max_positions: `max_position_embeddings` of the model.
        theta: base of the frequencies.
        scaling: `rope_scaling` or `rope_parameters` of the model's configuration.
        device: device of the positions.

    Raises:
        ConfigError: the kind of scaling is unknown, or a parameter of it is missing.
    """

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        self._head_dim = head_dim
        self._max_positions = max_positions
        self._theta = theta
        self._dynamic_factor: float | None = None
        self._magnitude = 1.0
        # [head_dim / 2]
        self._exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._frequencies = 1.0 / theta**self._exponents
        try:
            if kind == "linear":
                self._frequencies = self._frequencies / scaling["factor"]
            elif kind == "dynamic":
                self._dynamic_factor = float(scaling["factor"])
            elif kind == "llama3":
                self._frequencies = _llama3(self._frequencies, scaling)
            elif kind == "yarn":
                self._frequencies, self._magnitude = _yarn(
                    self._frequencies, theta, max_positions, scaling
                )
            elif kind != "default":
                raise ConfigError(
                    f"unknown rope scaling {kind!r}; known are linear, dynamic, llama3 and yarn"
                )
        except KeyError as error:
            raise ConfigError(f"rope scaling {kind!r} lacks its parameter {error}") from error
        self._exponents = self._exponents.to(device)
        self._frequencies = self._frequencies.to(device)

    def __call__(
        self, positions: torch.Tensor, context_lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (cos, sin), each [tokens, head_dim / 2] float32.

        Args:
            positions: [tokens].
            context_lengths: [tokens], see `ModelInput`; used by dynamic scaling only.
        """
        frequencies = self._frequencies
        if self._dynamic_factor is not None:
            frequencies = self._dynamic(context_lengths)
        return rotary_angles(positions, frequencies, self._magnitude)

    def _dynamic(self, context_lengths: torch.Tensor) -> torch.Tensor:
        """Frequencies whose base grows with the context length, [tokens, head_dim / 2]."""
        assert self._dynamic_factor is not None
        lengths = context_lengths.clamp(min=self._max_positions).to(torch.float32)
        growth = self._dynamic_factor * lengths / self._max_positions - (self._dynamic_factor - 1)
        base = self._theta * growth ** (self._head_dim / (self._head_dim - 2))
        return 1.0 / base.unsqueeze(1) ** self._exponents


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, blend in between (Llama 3.1)."""
    factor = scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def _yarn(
    frequencies: torch.Tensor, theta: float, max_positions: int, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Scaled frequencies and attention magnitude of YaRN (sections 3.2 and 3.4).

    Low frequencies are interpolated, high ones kept.
    """
    head_dim = 2 * len(frequencies)
    original = scaling.get("original_max_position_embeddings") or max_positions
    factor = scaling.get("factor") or max_positions / original

    def dimension_of(num_rotations: float) -> float:
        """Dimension with that many full rotations over the original context."""
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    mixed = frequencies / factor * ramp + frequencies * (1 - ramp)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = (
            magnitude(mscale) / magnitude(mscale_all_dim)
            if mscale and mscale_all_dim
            else magnitude(1.0)
        )
    return mixed, float(attention_factor)
