"""Configuration of a trace replay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from aquifer.cache import kv_cache
from aquifer.cache.base import CacheFactory
from aquifer.engine.params import MAX_SEQUENCES
from aquifer.engine.policies import RestoreMode
from aquifer.errors import ConfigError
from aquifer.sim.baselines.reserved import Policy, ReservedCache
from aquifer.sim.device import DeviceModel, ModelShape
from aquifer.sim.driver import PAGE_BYTES

_RESERVED: dict[str, Policy] = {
    "orca-max": "max",
    "orca-pow2": "pow2",
    "orca-oracle": "oracle",
    "static": "max",
}

MANAGERS = ("virtual", "paged", *_RESERVED)
"""Cache managers to compare. "static" reserves like "orca-max" and runs static batches: no request
joins a running batch, and all of its outputs return when the last is done (FasterTransformer,
section 6.1)."""

_UTILIZATION = 0.9  # fraction of the device's memory; vLLM's default too


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Configuration of a replay.

    Args:
        models: by the names that a trace may use; requests without a name go to the first.
        device: the device that all models run on.
        manager: one of `MANAGERS`.
        memory_bytes: the pool's budget, weights included; None for nine tenths of the device.
        page_bytes: size of a physical page.
        block_size: tokens of a block, for managers with blocks.
        max_model_len: the longest context; None for the model's.
        max_num_seqs: maximum number of running sequences of one model.
        max_num_batched_tokens: maximum number of tokens of one step.
        num_samples: completions of each prompt.
        beam_width: number of beams of a beam search; 0 for sampling.
        prefix_caching: retain KV for later requests.
        preemption_mode: "swap", "recompute" or "auto", as in the engine.
        swap_space_bytes: host memory for the KV of preempted requests; 0 for none.
        fast_forward: process steps in which nothing changes together.
        seed: seed of the made-up beam scores.

    Raises:
        ConfigError: an option is invalid.
    """

    models: dict[str, ModelShape]
    device: DeviceModel
    manager: str = "virtual"
    memory_bytes: int | None = None
    page_bytes: int = PAGE_BYTES
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_samples: int = 1
    beam_width: int = 0
    prefix_caching: bool = False
    preemption_mode: RestoreMode = "auto"
    swap_space_bytes: int = 4 << 30
    fast_forward: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.manager not in MANAGERS:
            raise ConfigError(
                f"unknown KV cache {self.manager!r}; choose one of {', '.join(MANAGERS)}"
            )
        if self.prefix_caching and self.is_reserved:
            raise ConfigError(f"{self.manager} cannot share, so there is no prefix caching with it")
        if self.beam_width and self.num_samples > 1:
            raise ConfigError("give one of --num-samples and --beam-width")
        if self.num_sequences > min(self.max_num_seqs, MAX_SEQUENCES):
            name = "--beam-width" if self.beam_width else "--num-samples"
            raise ConfigError(
                f"{name} is {self.num_sequences}; it must be at most {MAX_SEQUENCES}, and at most "
                f"--max-num-seqs, which is {self.max_num_seqs}"
            )
        for model_name, model in self.models.items():
            if self.max_model_len is not None and self.max_model_len > model.max_tokens:
                raise ConfigError(
                    f"--max-model-len is {self.max_model_len}; {model_name} allows at most "
                    f"{model.max_tokens}"
                )

    @property
    def budget_bytes(self) -> int:
        """The pool's budget."""
        return self.memory_bytes or int(_UTILIZATION * self.device.memory_bytes)

    def context(self, model: ModelShape) -> int:
        """Return the maximum length of a model's sequences, in tokens."""
        return self.max_model_len or model.max_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences of each request."""
        return self.beam_width or self.num_samples

    @property
    def is_reserved(self) -> bool:
        """Whether the manager reserves all of a request's memory when it is admitted."""
        return self.manager in _RESERVED

    def factory(self) -> CacheFactory:
        """Return the factory of a model's cache manager."""
        policy = _RESERVED.get(self.manager)
        if policy is None:
            return kv_cache(self.manager, self.block_size, self.max_num_batched_tokens)
        return partial(ReservedCache, policy=policy, block_size=self.block_size)
