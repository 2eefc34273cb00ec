"""Configuration of a trace replay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from aquifer.cache import BUCKETED, kv_cache
from aquifer.cache.base import CacheFactory
from aquifer.cache.bucketed import BucketedCache
from aquifer.cache.buckets import BucketBounds
from aquifer.cache.slot_pages import MappingOptions
from aquifer.config import check_preemption
from aquifer.engine.params import MAX_SEQUENCES
from aquifer.engine.policies import RestoreMode
from aquifer.errors import ConfigError
from aquifer.memory_options import PREDICTION_USES
from aquifer.predict.forecaster import Forecaster, LengthForecaster, Oracle, Predictor
from aquifer.sim.baselines.evictions import Eviction
from aquifer.sim.baselines.reserved import Policy, ReservedCache
from aquifer.sim.device import DeviceModel, ModelShape
from aquifer.sim.driver import PAGE_BYTES
from aquifer.sizes import format_size

_RESERVED: dict[str, Policy] = {
    "orca-max": "max",
    "orca-pow2": "pow2",
    "orca-oracle": "oracle",
    "static": "max",
}

LengthPrediction = Literal["off", "prior", "oracle"]

MANAGERS = ("virtual", "paged", BUCKETED, *_RESERVED)
"""Cache managers to compare. "static" reserves like "orca-max" and runs static batches: no request
joins a running batch, and all of its outputs return when the last is done (FasterTransformer,
section 6.1)."""

_UTILIZATION = 0.9  # fraction of the device's memory; vLLM's default too


@dataclass(frozen=True, slots=True)
class LoadingConfig:
    """How weights come and go in a replay of several models.

    By default this is what the engine does: tensors of idle models are evicted one by one, and
    what is missing of a model is loaded when a request waits for it.

    Args:
        bytes_per_s: how fast weights are loaded, from host memory.
        disk_bytes_per_s: how fast at most a model is loaded for the first time; None if all weights
            are in host memory from the start.
        is_exclusive: a model has the device for itself, and is evicted and loaded as a whole.
        keep_alive_s: seconds after which the weights of a model without requests are evicted; None
            if that happens for others only.
        start_s: seconds to start a process before each load; 0 if context and kernels are kept.
        eviction: which weights are evicted: see `aquifer.sim.baselines.evictions`.
        weight_share: a fixed part of the budget that weights have, from 0 to 1; None for one rule
            for weights and prefixes.

    Raises:
        ConfigError: an option is invalid, or does not go with another one.
    """

    bytes_per_s: float
    disk_bytes_per_s: float | None = None
    is_exclusive: bool = False
    keep_alive_s: float | None = None
    start_s: float = 0.0
    eviction: Eviction = "regret"
    weight_share: float | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or (self.disk_bytes_per_s or 1) <= 0:
            raise ConfigError("weights must be loaded at more than 0 bytes per second")
        if self.eviction not in get_args(Eviction):
            raise ConfigError(
                f"unknown eviction {self.eviction!r}; choose one of {', '.join(get_args(Eviction))}"
            )
        if self.weight_share is not None and not 0 < self.weight_share < 1:
            raise ConfigError(f"weight_share is {self.weight_share}; it must be between 0 and 1")
        if self.is_exclusive and (self.weight_share is not None or self.eviction != "regret"):
            raise ConfigError("a model that has the device for itself is evicted as a whole")


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
        kv_layout: "token-major", or "layer-major" for a buffer for K and for V of each layer.
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
        loading: how weights come and go; None if all stay in the pool.
        states_lengths: each request states its length as the most tokens of its output; else it
            ends by itself, and all that is known beforehand is the context.
        length_prediction: how the lengths of outputs are forecast: "off", "prior" by those of
            recent outputs, or "oracle" by themselves.
        predictor: with "prior", predicts too; None for recent lengths alone.
        prediction_uses: what forecasts are used for.
        groups_by_bucket: with "bucketed", requests are admitted first whose bucket has a region.
        static_buckets: with "bucketed", the buckets have equal widths for ever, as those of S3.
        bounds: with "bucketed", bounds of the buckets that several devices share; None if each
            model of each device has its own.

    Raises:
        ConfigError: an option is invalid.
    """

    models: dict[str, ModelShape]
    device: DeviceModel
    manager: str = "virtual"
    memory_bytes: int | None = None
    page_bytes: int = PAGE_BYTES
    block_size: int = 16
    kv_layout: Literal["token-major", "layer-major"] = "token-major"
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
    loading: LoadingConfig | None = None
    states_lengths: bool = True
    length_prediction: LengthPrediction = "off"
    predictor: Predictor | None = None
    prediction_uses: tuple[str, ...] = PREDICTION_USES
    groups_by_bucket: bool = False
    static_buckets: bool = False
    bounds: BucketBounds | None = None

    def __post_init__(self) -> None:
        if self.manager not in MANAGERS:
            raise ConfigError(
                f"unknown KV cache {self.manager!r}; choose one of {', '.join(MANAGERS)}"
            )
        if self.prefix_caching and (self.is_reserved or self.manager == BUCKETED):
            raise ConfigError(f"{self.manager} cannot share, so there is no prefix caching with it")
        if self.groups_by_bucket and self.manager != BUCKETED:
            raise ConfigError(f"{self.manager} has no buckets to group requests by")
        if self.bounds is not None and (
            self.manager != BUCKETED or self.static_buckets or len(self.models) > 1
        ):
            raise ConfigError("bounds to share are for one model with buckets that follow lengths")
        if self.loading is not None and self.is_reserved:
            raise ConfigError(
                f"{self.manager} reserves its memory for good, so no weights can come and go"
            )
        check_preemption(self.preemption_mode, self.swap_space_bytes)
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

    def weight_bytes(self, budget_bytes: int) -> int:
        """Return the size of all models' weights, each in whole pages.

        Args:
            budget_bytes: what they must fit into.

        Raises:
            ConfigError: they do not.
        """
        left_bytes = budget_bytes
        for name, model in self.models.items():
            left_bytes -= -(-model.weight_bytes // self.page_bytes) * self.page_bytes
            if left_bytes < 0:
                raise ConfigError(
                    f"the weights of {name} take {format_size(model.weight_bytes)}, more than what "
                    f"is left of {format_size(self.budget_bytes)}; give more --memory"
                )
        return budget_bytes - left_bytes

    @property
    def num_sequences(self) -> int:
        """Sequences of each request."""
        return self.beam_width or self.num_samples

    @property
    def is_reserved(self) -> bool:
        """Whether the manager reserves all of a request's memory when it is admitted."""
        return self.manager in _RESERVED

    def forecaster(self) -> Forecaster | None:
        """Make the forecaster of a model."""
        if self.length_prediction == "off":
            return None
        return (
            Oracle()
            if self.length_prediction == "oracle"
            else LengthForecaster(self.predictor, in_background=False)
        )

    @property
    def knows_lengths(self) -> bool:
        """Whether the scheduler knows when a request ends."""
        return self.states_lengths or self.length_prediction == "oracle"

    def factory(self) -> CacheFactory:
        """Return the factory of a model's cache manager."""
        policy = _RESERVED.get(self.manager)
        if self.is_reserved and self.kv_layout == "layer-major":
            raise ConfigError(f"{self.manager} keeps whole tokens together; choose token-major")
        if self.manager == BUCKETED:
            return partial(
                BucketedCache,
                block_size=self.block_size,
                bounds=self.bounds,
                has_equal_widths=self.static_buckets,
            )
        if policy is None:
            mapping = MappingOptions(is_layer_major=self.kv_layout == "layer-major")
            return kv_cache(self.manager, self.block_size, self.max_num_batched_tokens, mapping)
        return partial(ReservedCache, policy=policy, block_size=self.block_size)
