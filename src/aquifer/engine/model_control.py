"""The models of an engine: registered, loaded, pinned and removed while others are served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.idle_pages import IdlePages
from aquifer.engine.model_host import ModelHost, make_host
from aquifer.engine.model_set import ModelSet, OnProgress
from aquifer.engine.parts import EngineParts
from aquifer.engine.pinning import Pinning
from aquifer.engine.reports import LoadProgress, ModelInfo, ModelStatus
from aquifer.errors import ConfigError
from aquifer.memory.driver import make_current
from aquifer.models import ModelPlan, Planner
from aquifer.weights.checkpoint import Checkpoint


def _ignore(_: LoadProgress) -> None:
    """A callback for progress that reports nothing."""


class ModelControl(ABC):
    """The part of an engine that is about models.

    Args:
        config: models and options.
        parts: pool, scheduler and threads.
        planner: finds the implementation of a checkpoint.

    Attributes:
        config: as given.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts, planner: Planner) -> None:
        self.config = config
        self._assembly = assembly = parts.assembly
        self._scheduler = assembly.scheduler
        self._reuse = parts.reuse
        self._models: ModelSet[ModelHost] = ModelSet(assembly, parts.reuse)
        self._pinning = Pinning(self._models, assembly.room, config.max_share_by_key)
        self._make_host: Callable[..., ModelHost] = partial(
            make_host, config, assembly, parts.limits, parts.reuse, planner, parts.leader
        )
        self._idle_pages = IdlePages(assembly.pool, assembly.room)
        self._has_ranks = parts.leader is not None
        self._num_arrivals = 0  # of requests, and of models that are asked for

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The models that are registered, by name."""
        return {host.info.name: host.info for host in self._models}

    @property
    def statuses(self) -> dict[str, ModelStatus]:
        """What the registered models do and have, by name."""
        return {host.info.name: host.status for host in self._models}

    def keep_alive(self, model: str, seconds: float) -> None:
        """Keep the weights of a model for so long without a request, from now on.

        Unknown models are ignored.
        """
        for host in self._models:
            if host.info.name == model:
                host.keep_alive_s = seconds

    @property
    def idle_s(self) -> float | None:
        """How long it may wait for a request: then a model is to be unloaded. None for any time."""
        return self._models.idle_s

    def prepare(self) -> bool:
        """Do a little, of 1 or 2 ms, for requests to come; False if there is nothing to do.

        To be called while the engine has no work. Nothing depends on it.
        """
        # Other ranks would do all of it before their next step.
        if self._has_ranks or not self.config.eager_pages:
            return False
        self._use_device()
        return self._idle_pages.map_some(self._scheduler.lanes.values())

    def add_model(
        self, spec: ModelSpec, on_progress: OnProgress = _ignore, *, load: bool = True
    ) -> ModelInfo:
        """Register a model while others are served; it gets addresses, and no memory.

        Args:
            spec: its name and path.
            on_progress: called for each stretch of weights that was read.
            load: whether to load it at once. If not, it is loaded when a request for it waits.

        Raises:
            ConfigError: the checkpoint cannot be used, the name is taken, it does not fit beside
                pinned models, or, with `load`, the pool has no room for the weights; then it is not
                registered.
            DriverError: the device refused memory; likewise.
        """
        host = self._register(spec)
        if load:
            try:
                self._models.load(host, on_progress)
            except BaseException:
                self._models.remove(host)
                raise
        return host.info

    def load_model(self, name: str, on_progress: OnProgress = _ignore) -> None:
        """Bring the weights of a registered model into the pool, if they are not there.

        Raises:
            UnknownModelError: no such model.
            ConfigError: the pool has no room for them, or the checkpoint cannot be used.
            DriverError: the device refused memory.
        """
        host = self._models.find(name)
        self._use_device()
        self._models.load(host, on_progress)

    def ask_for_model(self, name: str) -> None:
        """Load a model as if a request for it had arrived, in the steps to come.

        Its status tells when it is resident, or why it cannot be.

        Raises:
            UnknownModelError: no such model.
        """
        self._num_arrivals += 1
        self._models.find(name).ask(self._num_arrivals)

    def unload_model(self, name: str, keep_bytes: int = 0) -> None:
        """Take the weights of a model out of the pool; it stays registered.

        Its running requests are preempted. They go on when it has been loaded again, which happens
        as soon as there is room for it, because they wait.

        Args:
            name: the model.
            keep_bytes: how much of its first layers may stay.

        Raises:
            UnknownModelError: no such model.
            RequestError: it is pinned.
        """
        host = self._models.find(name)
        host.check_not_pinned()
        self._use_device()
        self._preempt_all(host)
        host.unload(keep_bytes)

    def pin_model(self, name: str) -> None:
        """Load a model, and keep its weights in the pool until `unpin_model`.

        Raises:
            UnknownModelError: no such model.
            RequestError: beside it and the other pinned ones, another model could not be loaded.
        """
        self._models.pin(self._models.find(name))
        self.ask_for_model(name)

    def unpin_model(self, name: str) -> None:
        """The opposite of `pin_model`; one that is not pinned stays as it is.

        Raises:
            UnknownModelError: no such model.
        """
        self._models.find(name).is_pinned = False

    def remove_model(self, name: str) -> None:
        """Remove a model. Its requests end with an error, which the next `step` returns.

        Raises:
            UnknownModelError: no such model.
        """
        host = self._models.find(name)
        self._use_device()
        self._finish_steps()
        self._end_requests(host, f"model {name!r} was removed")
        self._models.remove(host)
        self._pinning.remove_model(name)
        self._idle_pages.forget(name)

    def _load_first(
        self,
        models: Sequence[tuple[ModelSpec, tuple[Checkpoint, ModelPlan]]],
        on_progress: OnProgress,
    ) -> None:
        """Register the models of the configuration, and load those that fit together."""
        for spec, read in models:
            self._register(spec, read)
        self._models.load_first(on_progress)

    def _register(
        self, spec: ModelSpec, read: tuple[Checkpoint, ModelPlan] | None = None
    ) -> ModelHost:
        """Register a model, of which the checkpoint may have been read.

        Raises:
            ConfigError: it cannot be served, or not beside others.
            DriverError: the device refused.
        """
        if self.config.bucket_memory_bytes is not None and self.models:
            raise ConfigError(
                "bucket_memory is for one model, as its memory cannot be had by others; leave it "
                "out to serve several"
            )
        return self._models.register(spec.name, partial(self._make_host, spec, read))

    def _use_device(self) -> None:
        """Launch on this engine's device; an engine of this thread may have another one."""
        make_current(self._assembly.pool.driver.device)

    def _preempt_all(self, host: ModelHost) -> None:
        """Preempt all running requests of a model, when all steps in flight are done."""
        self._finish_steps()
        self._scheduler.preempt_all(host.lane)

    @abstractmethod
    def _finish_steps(self) -> None:
        """Wait for all steps in flight; the next `step` returns their outputs."""

    @abstractmethod
    def _end_requests(self, host: ModelHost, error: str) -> None:
        """End all requests of a model with an error, which the next `step` returns."""
