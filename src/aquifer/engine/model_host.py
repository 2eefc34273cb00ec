"""A model of an engine: its weights, its requests and the runner of its steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch

from aquifer.cache import kv_cache
from aquifer.cache.bucketed import BucketedCache, BucketOptions
from aquifer.cache.buckets import Routing
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.assembly import Assembly, LaneSpec
from aquifer.engine.costs import PrefillCost
from aquifer.engine.first_step import run_first_step
from aquifer.engine.in_flight import InFlight
from aquifer.engine.leader import Leader
from aquifer.engine.mapping import mapping_options
from aquifer.engine.model_files import dtype_named, read_model
from aquifer.engine.model_life import ModelLife
from aquifer.engine.model_weights import ModelWeights
from aquifer.engine.reporting import model_info
from aquifer.engine.reports import LoadProgress, ModelState, Stage
from aquifer.engine.runner import Runner
from aquifer.engine.step_input import StepInput
from aquifer.engine.step_limits import StepLimits
from aquifer.engine.threads import Products, ThreadControl, ThreadLimit, torch_threads
from aquifer.errors import ConfigError, as_config_error
from aquifer.fields import is_there, read_fields
from aquifer.models import ModelPlan, Planner
from aquifer.models.limits import MOST_HEADS
from aquifer.predict.choice import make_forecaster
from aquifer.sizes import format_size
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.reuse import ReuseStore
from aquifer.weights.store import check_fits

_log = logging.getLogger(__name__)

_EOS = "eos_token_id"
_MOST_TOKEN_ID = 2**31 - 1

_FIRST_SLOT = 1

_SPARE_SLOTS = 16
"""Slots beyond the sequences that run at once, on a device that runs ahead, so that others can be
taken while a slot is vacated."""


class ModelHost(ModelLife):
    """One model of an engine, and the owner of all its resources.

    Args:
        spec: its name and path.
        plan: its plan, from its configuration.
        checkpoint: its checkpoint.
        config: the engine's options.
        assembly: pool and scheduler.
        limits: the limits of a step.
        reuse: the weights of all models.
        leader: the other ranks that have parts of the model; None for none.

    Attributes:
        info: description of the model for other processes.
        eos_ids: its end-of-sequence tokens.
        prefill_cost: cost model of its prefills.

    Raises:
        ConfigError: an option does not fit the model, its weights do not fit the pool, or its
            end-of-sequence tokens are none.
    """

    _weights: ModelWeights

    def __init__(
        self,
        spec: ModelSpec,
        plan: ModelPlan,
        checkpoint: Checkpoint,
        config: EngineConfig,
        assembly: Assembly,
        limits: StepLimits,
        reuse: ReuseStore,
        leader: Leader | None = None,
    ) -> None:
        super().__init__(assembly, math.inf if config.keep_alive_s is None else config.keep_alive_s)
        self._plan = plan
        self._checkpoint = checkpoint
        self._pool = assembly.pool
        self._limits = limits
        self._runner: Runner | None = None
        num_sharing = 1 if assembly.pool.driver.runs_ahead else config.tensor_parallel_size
        self._thread_limit = ThreadLimit.of_process(config.threads, num_sharing)
        self._thread_control = ThreadControl(Products.of(plan.parameters), self._thread_limit)
        max_model_len = config.max_model_len or plan.max_model_len
        if max_model_len > plan.max_model_len:
            raise ConfigError(
                f"max_model_len is {max_model_len}; {spec.name} allows at most {plan.max_model_len}"
            )
        check_fits(assembly.pool, spec.name, plan.parameters)
        self._num_spare_slots = _SPARE_SLOTS if assembly.pool.driver.runs_ahead else 0
        self.eos_ids = _eos_ids(spec.name, checkpoint, plan.vocab_size)
        self.prefill_cost = PrefillCost(_even_tokens(checkpoint, plan))
        self._led = None if leader is None else leader.model(spec.name)
        with ExitStack() as resources:
            if self._led is not None:
                resources.callback(self._led.remove)
            self._weights = ModelWeights(
                assembly,
                reuse,
                spec.name,
                plan.parameters,
                checkpoint,
                (config.seed or 0) if config.load_format == "dummy" else None,
                self.weights_life(),
                self._led,
            )
            resources.callback(self._weights.close)
            self.lane = assembly.open_lane(
                LaneSpec(
                    name=spec.name,
                    kv_layout=plan.kv_layout,
                    max_seqs=limits.max_seqs,
                    max_tokens=max_model_len,
                    cache=kv_cache(
                        config.kv_cache,
                        config.block_size,
                        limits.max_batched_tokens,
                        mapping_options(config, assembly.pool),
                        _bucket_options(config),
                    ),
                    keeps_prefixes=config.enable_prefix_caching and plan.has_reusable_kv,
                    recompute_s=self.prefill_cost.seconds,
                    num_spare_slots=self._num_spare_slots,
                    kv_limits=plan.kv_limits,
                    state_layout=plan.state_layout(dtype_named(config.state_dtype)),
                    forecaster=make_forecaster(config.length_prediction, spec.path),
                    on_kv_op=None if self._led is None else self._led.note_kv,
                )
            )
            self.lane.is_resident = False
            resources.callback(assembly.close_lane, self.lane)
            resources.callback(self._close_runner)
            if self._led is not None:
                self._led.register(
                    spec,
                    self.lane.cache.tensors,
                    limits.max_seqs,
                    limits.max_seqs + self._num_spare_slots,
                    max_model_len,
                )
            self.info = model_info(spec, plan, checkpoint, max_model_len, self._weights.num_bytes)
            self._resources = resources.pop_all()

    @property
    def runner(self) -> Runner:
        """The runner of its steps. Pre-condition: it is resident."""
        assert self._runner is not None
        return self._runner

    def launch(self, step: StepInput) -> InFlight:
        """Launch a step, with as many threads as it is worth. Pre-condition: it is resident."""
        assert self.state == ModelState.RESIDENT, f"{self.info.name} is {self.state}"
        self.used()
        with self._thread_control.threads_for(step.spans.num_tokens):
            return self.runner.launch(step)

    def close(self) -> None:
        """Release everything. Pre-condition: it has no requests, and no step is in flight."""
        self.state = ModelState.REMOVED
        self._resources.close()

    def _fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        with torch_threads(self._thread_limit.most):
            super()._fill(on_progress)

    def _make_ready(self, on_progress: Callable[[LoadProgress], None]) -> bool:
        if self._runner is not None:
            return False
        file = self._checkpoint.fields.file
        with (
            torch_threads(self._thread_limit.most),
            as_config_error(f"{self.info.name} cannot run; check {file}"),
        ):
            # One that fails to warm up is not kept for the next load.
            self._runner = self._make_runner(on_progress)
            self.lane.captured_sizes = self._runner.captured_sizes
        if isinstance(self.lane.cache, BucketedCache) and self.lane.cache.lacks_pages:
            raise ConfigError(
                f"--bucket-memory takes more than the {format_size(self._pool.free_bytes)} of the "
                f"pool's {format_size(self._pool.budget_bytes)} that the weights leave; give less "
                "of it, or a higher --memory"
            )
        return True

    def _close_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def _make_runner(self, on_progress: Callable[[LoadProgress], None]) -> Runner:
        """Build the model over its weights, and run it before it is reported as resident.

        Raises:
            Exception: anything that the model's code raises.
        """
        with torch.inference_mode():
            model = self._plan.build(self._weights.tensors)
        make = Runner if self._led is None else self._led.runner
        runner = make(
            model,
            self.lane.cache.tensors,
            self._pool.driver,
            self._limits.max_seqs,
            self._limits.max_seqs + self._num_spare_slots,
            self.info.max_model_len,
        )
        if self._pool.driver.runs_ahead:
            self._warm_up(runner, on_progress)
        run_first_step(self.lane, runner, model.vocab_size, self._limits.max_batched_tokens)
        return runner

    def _warm_up(self, runner: Runner, on_progress: Callable[[LoadProgress], None]) -> None:
        """Take a device's memory for activations, compile its kernels and capture steps.

        The host needs none of it.
        """
        cache, num_tokens = self.lane.cache, self._limits.max_batched_tokens
        warm_up = runner.warm_up_of(num_tokens)
        slots, tokens = np.array([_FIRST_SLOT]), np.array([warm_up.num_kv_tokens])
        num_prompt = warm_up.num_kv_tokens + 1
        cache.expect(_FIRST_SLOT, num_prompt, num_prompt)  # in few large pages
        has_kv = cache.reserve(slots, tokens)

        def on_stage(stage: Stage, done: int, total: int) -> None:
            on_progress(LoadProgress(self.info.name, done, total, stage))

        try:
            cache.upload()
            captures = cache.tensors.open()
            token_s = runner.warm_up(
                warm_up, num_tokens, on_stage, has_kv=has_kv, captures=captures
            )
        finally:
            if has_kv:
                cache.release(_FIRST_SLOT)
            cache.tensors.vacate()  # the pages have not the sizes that prompts will need
        self.prefill_cost.observe(0, num_tokens, num_tokens * token_s)


def _bucket_options(config: EngineConfig) -> BucketOptions:
    return BucketOptions(
        Routing(config.bucket_routing_threshold, config.bucket_inflation),
        has_equal_widths=config.bucket_bounds == "equal",
        kept_bytes=config.bucket_memory_bytes,
    )


def make_host(
    config: EngineConfig,
    assembly: Assembly,
    limits: StepLimits,
    reuse: ReuseStore,
    planner: Planner,
    leader: Leader | None,
    spec: ModelSpec,
    read: tuple[Checkpoint, ModelPlan] | None = None,
) -> ModelHost:
    """Make a model that is registered and not loaded.

    Args:
        config: the engine's options.
        assembly: pool and scheduler.
        limits: the limits of a step.
        reuse: the weights of all models.
        planner: finds the implementation of a checkpoint.
        leader: the other ranks that have parts of the model; None for none.
        spec: its name and path.
        read: its checkpoint and plan, if they were read before.

    Raises:
        ConfigError: the checkpoint cannot be used.
        DriverError: the device has no addresses left.
    """
    checkpoint, plan = read or read_model(spec, planner, config)
    return ModelHost(spec, plan, checkpoint, config, assembly, limits, reuse, leader)


def _even_tokens(checkpoint: Checkpoint, plan: ModelPlan) -> float:
    """Position at which a token's attention takes as many operations as its matrix products."""
    num_heads = checkpoint.fields.integer("num_attention_heads", 1, MOST_HEADS, default=0)
    operations = plan.kv_layout.attention_operations(num_heads or None)
    used = sum(math.prod(each.shape) * each.used_share for each in plan.parameters)
    return 2 * used / operations if operations else float("inf")


def _eos_ids(name: str, checkpoint: Checkpoint, vocab_size: int) -> frozenset[int]:
    """End-of-sequence tokens from `generation_config.json`, or else from `config.json`.

    Some checkpoints list ids beyond the vocabulary. These are left out with a warning, since the
    model never produces them; Transformers compares with them in vain.

    Raises:
        ConfigError: an id is no whole number, or negative.
    """
    file = checkpoint.path / "generation_config.json"
    fields = checkpoint.fields
    if is_there(file):
        generation = read_fields(file)
        if _EOS in generation.values:  # null, too, overrides the other file
            fields = generation
    ids = frozenset(fields.integers(_EOS, 0, _MOST_TOKEN_ID))
    beyond = sorted(i for i in ids if i >= vocab_size)
    if beyond:
        _log.warning(
            "%s: %s of %s lists tokens beyond the vocabulary of %d, which are ignored: %s",
            name,
            _EOS,
            fields.file,
            vocab_size,
            ", ".join(map(str, beyond[:8])),
        )
    return ids.difference(beyond)
