"""How large a step may become: as configured, or the default of the device type."""

from __future__ import annotations

from dataclasses import dataclass

from aquifer.config import EngineConfig

_CPU_SEQS, _GPU_SEQS = 256, 512
"""Default number of sequences that run at once. On a GPU a step of 512 takes less than twice the
time of one of 256, and requests that find no place wait for seconds."""

_CPU_BATCHED_TOKENS, _GPU_BATCHED_TOKENS = 2048, 8192
"""Default token budget of a step. A GPU takes several thousand tokens to reach its full rate; on a
CPU larger values only delay decodes."""

_GPU_PREFILL_S = 0.04
"""Default time limit of the prompts in a step in which sequences decode, on a GPU. On the host a
step of few tokens takes as long."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of any step.

    Args:
        max_seqs: sequences of one model that run at once.
        max_batched_tokens: tokens of a step.
        max_prefill_s: time limit of the prompts in a step in which sequences decode, in seconds;
            None for none.
    """

    max_seqs: int
    max_batched_tokens: int
    max_prefill_s: float | None

    @classmethod
    def of(cls, config: EngineConfig, device_type: str) -> StepLimits:
        """The limits of an engine on such a device."""
        on_cpu = device_type == "cpu"
        prefill_s = None if on_cpu else _GPU_PREFILL_S
        if config.max_prefill_ms is not None:
            prefill_s = config.max_prefill_ms / 1e3 or None
        return cls(
            config.max_num_seqs or (_CPU_SEQS if on_cpu else _GPU_SEQS),
            config.max_num_batched_tokens
            or (_CPU_BATCHED_TOKENS if on_cpu else _GPU_BATCHED_TOKENS),
            prefill_s,
        )
