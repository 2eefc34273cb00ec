"""The models of an engine, and the part of the budget that is left for their KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

from aquifer.cache.footprint import UNLIMITED_TOKENS
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.assembly import Assembly
from aquifer.engine.lane import Lane
from aquifer.engine.model_host import ModelHost, State, read_model
from aquifer.engine.reports import KVCapacity, LoadProgress
from aquifer.engine.step_limits import StepLimits
from aquifer.errors import ConfigError, DriverError, UnknownModelError
from aquifer.memory.pool import PoolUsage
from aquifer.models import ModelPlan, Planner
from aquifer.sizes import format_size
from aquifer.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)

OnProgress = Callable[[LoadProgress], None]


class ModelSet:
    """All registered models. Their weights together may exceed the pool.

    Args:
        config: the engine's options.
        assembly: pool and scheduler.
        planner: finds the implementation of a checkpoint.
        limits: the limits of a step.
    """

    def __init__(
        self, config: EngineConfig, assembly: Assembly, planner: Planner, limits: StepLimits
    ) -> None:
        self._config = config
        self._pool = assembly.pool
        self._room = assembly.room
        self._assembly = assembly
        self._planner = planner
        self._limits = limits
        self._hosts: dict[str, ModelHost] = {}

    def __iter__(self) -> Iterator[ModelHost]:
        return iter(self._hosts.values())

    def __getitem__(self, name: str) -> ModelHost:
        return self._hosts[name]

    def find(self, name: str) -> ModelHost:
        """The model of that name.

        Raises:
            UnknownModelError: there is none.
        """
        host = self._hosts.get(name)
        if host is None:
            served = ", ".join(self._hosts) or "none"
            raise UnknownModelError(
                f"no model {name!r} is served here; served models: {served}", param="model"
            )
        return host

    def register(
        self, spec: ModelSpec, read: tuple[Checkpoint, ModelPlan] | None = None
    ) -> ModelHost:
        """Register a model. It gets addresses and no memory.

        Args:
            spec: its name and path.
            read: its checkpoint and plan, if they were read before.

        Raises:
            ConfigError: the checkpoint cannot be used, or the name is taken.
            DriverError: the device has no addresses left.
        """
        if spec.name in self._hosts:
            raise ConfigError(f"a model named {spec.name!r} is registered already")
        checkpoint, plan = read or read_model(spec, self._planner, self._config)
        host = ModelHost(spec, plan, checkpoint, self._config, self._assembly, self._limits)
        self._hosts[spec.name] = host
        return host

    def load(self, hosts: Sequence[ModelHost], on_progress: OnProgress) -> None:
        """Bring the weights of models into the pool where they are not there; all or none.

        Raises:
            ConfigError: the pool has no room for them, or beside them for any KV of some loaded
                model, or a checkpoint cannot be used.
            DriverError: the device refused memory.
        """
        with ExitStack() as undo:
            for host in hosts:
                if host.state == State.RESIDENT:
                    continue
                # Asked first: a load that cannot succeed must not evict what others retain.
                if not (self._room.has(host.weight_pages) and host.load(on_progress)):
                    left_bytes = self._room.size(self._room.reachable_pages)
                    raise ConfigError(
                        f"the weights of {host.info.name} take "
                        f"{format_size(host.info.weight_bytes)} and the pool has "
                        f"{format_size(left_bytes)} left; raise --memory, or unload another model"
                    )
                undo.callback(host.unload)
            # What was prepared to run the models leaves less for pages.
            self._pool.account_overhead(self._pool.driver.overhead_bytes())
            for host in self:
                if host.state == State.RESIDENT:
                    self._check_room(host)
            undo.pop_all()

    def remove(self, host: ModelHost) -> None:
        """Remove a model. Pre-condition: it has no requests, and no step is in flight."""
        host.close()
        del self._hosts[host.info.name]

    def close(self) -> None:
        """Remove all models, the latest one first."""
        for host in reversed(list(self)):
            self.remove(host)

    def load_wanted(self, on_failure: Callable[[ModelHost, str], None]) -> None:
        """Load the model of the earliest request that waits for weights, if there is room for it.

        As long as requests of other models run, it waits for the memory that they give back, and
        does not take what they are still to use.

        Args:
            on_failure: called with a model that cannot be loaded, and why; it ends its requests.
        """
        wanted = [host for host in self if host.lane.waiting and host.state != State.RESIDENT]
        wanted.sort(key=lambda host: min(group.arrival for group in host.lane.waiting))
        for host in wanted:
            others = [lane for lane in self._assembly.scheduler.lanes.values() if lane.is_resident]
            if any(lane.has_work for lane in others) and not self._leaves_room(host, others):
                return
            try:
                self.load([host], lambda progress: None)
            except (ConfigError, DriverError) as error:
                on_failure(host, str(error))
            else:
                return

    def _leaves_room(self, host: ModelHost, others: Iterable[Lane]) -> bool:
        """Whether there is room for a model's weights now, and any request of others fits beside.

        A request that was taken in must not fail because another model is loaded meanwhile.
        """
        if not self._room.has(host.weight_pages):
            return False
        kv_pages = self.kv_pages(host)
        return all(
            lane.most_pages(
                group.num_prompt_tokens, group.max_total, group.request.params.num_sequences
            )
            <= kv_pages
            for lane in others
            for group in (*lane.running, *lane.waiting)
        )

    # --- the budget --------------------------------------------------------------------------

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned prefixes of all models."""
        caches = (host.lane.prefixes for host in self)
        return sum(cache.pinned_bytes for cache in caches if cache is not None)

    @property
    def promised_bytes(self) -> int:
        """Bytes of the pinned prefixes of all models, those included that are not computed yet."""
        caches = (host.lane.prefixes for host in self)
        return sum(cache.promised_bytes for cache in caches if cache is not None)

    def fixed_bytes(self, usage: PoolUsage) -> int:
        """Bytes of the budget that KV cannot have: overhead, resident weights, pinned prefixes.

        Args:
            usage: usage of the pool, now.
        """
        weight_bytes = sum(host.resident_bytes for host in self)
        return usage.overhead_bytes + weight_bytes + self.pinned_bytes

    def kv_pages(self, host: ModelHost) -> int:
        """The most pages that a model's KV can have, with the model's weights in the pool."""
        missing_bytes = host.info.weight_bytes - host.resident_bytes
        return self._room.budget_pages(self.fixed_bytes(self._pool.usage()) + missing_bytes)

    def kv_capacity(self, host: ModelHost) -> KVCapacity:
        """What fits into the KV cache if a model has all of it."""
        footprint, num_pages = host.lane.cache.footprint, self.kv_pages(host)
        most_pages = footprint.most(1, host.info.max_model_len)
        if not most_pages:
            return KVCapacity(0, 0.0)
        num_seqs = num_pages / most_pages
        longest = footprint.longest(num_pages)
        if longest == UNLIMITED_TOKENS:  # a sequence keeps its windows alone
            longest = int(num_seqs * host.info.max_model_len) + 1
        return KVCapacity(longest - 1, num_seqs)

    def _check_room(self, host: ModelHost) -> None:
        """Refuse a model of which no request could ever run; warn where long ones cannot.

        Raises:
            ConfigError: no request could run.
        """
        footprint, room = host.lane.cache.footprint, self._room
        kv_pages, limit = self.kv_pages(host), host.info.max_model_len
        longest = footprint.longest(kv_pages) - 1
        if longest < 1:
            raise ConfigError(
                f"the weights leave {format_size(room.size(kv_pages))} of the pool's "
                f"{format_size(self._pool.budget_bytes)} for KV, and the first token of "
                f"{host.info.name} takes {format_size(room.size(footprint.pages(1)))}; raise "
                "--memory"
            )
        if longest < limit - 1:
            _log.warning(
                "the pool holds at most %d tokens of %s at a time, its context length is %d; "
                "longer requests will be refused",
                longest,
                host.info.name,
                limit,
            )
