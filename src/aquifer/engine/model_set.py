"""The models of an engine, and the part of the budget that is left for their KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from aquifer.engine.assembly import Assembly
from aquifer.engine.held_weights import HeldWeights
from aquifer.engine.lane_pages import first_pages, most_pages_of
from aquifer.engine.model_life import ModelLife
from aquifer.engine.policies.relief import Holder, ReliefSnapshot
from aquifer.engine.policies.residents import ResidentsSnapshot
from aquifer.engine.reporting import kv_capacity
from aquifer.engine.reports import KVCapacity, LoadProgress, ModelState
from aquifer.engine.sequence import SequenceGroup
from aquifer.errors import ConfigError, DriverError, RequestError, UnknownModelError
from aquifer.memory.driver import make_current
from aquifer.memory.pool import Kind, PoolUsage
from aquifer.sizes import format_size
from aquifer.weights.reuse import ReuseStore

_log = logging.getLogger(__name__)

OnProgress = Callable[[LoadProgress], None]

_PAUSE_S = 0.005
"""How long to wait for weights where no other model has anything to run."""

HostT = TypeVar("HostT", bound=ModelLife)


class ModelSet(Generic[HostT]):
    """All registered models. Their weights together may exceed the pool.

    Args:
        assembly: pool and scheduler.
        reuse: the weights of all models.
    """

    def __init__(self, assembly: Assembly, reuse: ReuseStore) -> None:
        self._pool, self._room = assembly.pool, assembly.room
        self._assembly, self._policies = assembly, assembly.policies
        self._reuse = reuse
        self._held = assembly.scheduler.admitter.held = HeldWeights(reuse)
        here = (assembly.pool.driver.device,)
        one = partial(ThreadPoolExecutor, 1, initializer=make_current, initargs=here)
        self._threads, self._savers = one("aquifer-load"), one("aquifer-save")
        self._hosts: dict[str, HostT] = {}
        self._warned: set[HostT] = set()  # of which long requests are refused

    def __iter__(self) -> Iterator[HostT]:
        return iter(self._hosts.values())

    def __getitem__(self, name: str) -> HostT:
        return self._hosts[name]

    def find(self, name: str) -> HostT:
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

    def register(self, name: str, make: Callable[[], HostT]) -> HostT:
        """Register a model. It gets addresses and no memory.

        Args:
            name: its name.
            make: makes it, if there is none of that name.

        Raises:
            ConfigError: the checkpoint cannot be used, the name is taken, or it could not be loaded
                beside pinned models.
            DriverError: the device has no addresses left.
        """
        if name in self._hosts:
            raise ConfigError(f"a model named {name!r} is registered already")
        host = self._hosts[name] = make()
        try:
            self._check_beside_pinned(host)
        except ConfigError:
            self.remove(host)
            raise
        return host

    def load(self, host: HostT, on_progress: OnProgress) -> None:
        """Bring the weights of a model into the pool where they are not there.

        Those of models of which no request runs make room.

        Raises:
            ConfigError: the pool has no room for them, or beside them for any KV, or the checkpoint
                cannot be used.
            DriverError: the device refused memory.
        """
        if host.state == ModelState.RESIDENT:
            return
        for other in self:  # nothing is prepared while a thread uses the device
            if other.state == ModelState.LOADING and other is not host:
                other.is_filled_within(None)
        self._reuse.compare(self._threads, None)
        # Asked first: a load that cannot succeed must not evict what others retain.
        if not (self._has_room(host) and host.load(on_progress)):
            with self._reuse.lending_paused():
                for other in self:
                    other.weights.is_saved_within(None)  # then they may go
                if not (self._has_room(host) and host.load(on_progress)):
                    raise ConfigError(self._no_room(host))
        self._check_loaded(host)

    def load_first(self, on_progress: OnProgress) -> None:
        """Load the models of a new engine, as far as they fit into the pool together.

        On a device of which kernels are compiled and steps captured, all are loaded in turn, so
        that none has to be prepared under traffic. The first ones come last, and stay.

        Raises:
            ConfigError: as `load`.
            DriverError: likewise.
        """
        if self._pool.driver.runs_ahead:
            for host in reversed(list(self)):
                self.load(host, on_progress)
            return
        self._reuse.compare(self._threads, None)
        for host in self:
            is_first = not any(other.resident_bytes for other in self)
            if is_first or host.weights.missing_pages <= self._room.free_pages:
                self.load(host, on_progress)
            else:
                _log.info("%s is loaded when a request asks for it", host.info.name)

    def _has_room(self, host: HostT, kv_pages: int = 0) -> bool:
        """Whether there is room for the weights of a model that are missing, and for some KV.

        What is there of it does not count as room.
        """
        own_pages = self._room.pages(host.weights.own_victim_bytes)
        return self._room.has(host.weights.missing_pages + own_pages + kv_pages)

    def _no_room(self, host: HostT) -> str:
        left_bytes = self._room.size(self._room.reachable_pages)
        return (
            f"the weights of {host.info.name} take {format_size(host.info.weight_bytes)} and the "
            f"pool has {format_size(left_bytes)} left; raise --memory, or unload another model"
        )

    def _check_loaded(self, host: HostT) -> None:
        """Account for what was prepared to run a model, and unload it if that leaves no KV for it.

        Raises:
            ConfigError: it leaves none.
        """
        if host.was_made_ready:  # asking the device may take as long as copying 100 MB
            self._pool.account_overhead(self._pool.driver.overhead_bytes())
        try:
            self._check_room(host)
        except ConfigError:
            host.unload()
            raise
        host.weights.begin_saving(self._savers)
        self._held.note_saving(host.weights)

    def remove(self, host: HostT) -> None:
        """Remove a model. Pre-condition: it has no requests, and no step is in flight."""
        host.close()
        self._warned.discard(host)
        del self._hosts[host.info.name]

    def close(self) -> None:
        """Remove all models, the latest one first."""
        for host in reversed(list(self)):
            self.remove(host)
        self._threads.shutdown()
        self._savers.shutdown()

    def load_wanted(
        self,
        num_arrivals: int,
        preempt: Callable[[HostT], None],
        on_failure: Callable[[HostT, str], None],
    ) -> None:
        """Load models of which requests wait, one at a time, in the order of `place_in_turn`.

        As long as requests of other models run, a model waits for the memory that they give back,
        and does not take what they are still to use. After a while another model gives way to it.

        Args:
            num_arrivals: number of requests that have arrived so far, of all models.
            preempt: preempts all running requests of a model, when its steps in flight are done.
            on_failure: called with a model that cannot be loaded, and why; it ends its requests.
        """
        if self._blocked[0] is not None and not self._assembly.scheduler.admitter.is_any_running():
            self._held.wait(_PAUSE_S)
        for host in self:
            if host.state == ModelState.LOADING:
                self._continue(host, on_failure)
                return
        if self._relieve(num_arrivals, preempt):
            return
        wanted = sorted((each for each in self if each.is_wanted), key=lambda it: it.place_in_turn)
        # Which weights they share is to be known before they get pages.
        if wanted and not self._reuse.compare(self._threads, self._pause_s):
            return
        for host in wanted:
            others = [other for other in self if other.lane.is_resident and other.lane.has_work]
            mark = self._held.mark()
            try:
                if self._leaves_room(host, others) and host.begin_loading(self._threads):
                    self._held.note_loading(host)
                    return
            except DriverError as error:
                on_failure(host, str(error))
                continue
            if self._held.was_any(mark):
                self._held.wait(self._pause_s)
                return
            if others or any(other.lane.in_flight for other in self):
                able = [other for other in others if not other.is_pinned]
                residents = [other.resident for other in able]
                snapshot = ResidentsSnapshot(
                    host.restore_s, residents, has_new=host.has_new, can_wait=host.can_wait
                )
                holder = self._policies.residents(snapshot) if able else None
                if holder is not None:
                    preempt(able[holder])
                    able[holder].give_way(num_arrivals)
                return
            host.error, host.asked = self._no_room(host), None
            on_failure(host, host.error)

    def _relieve(self, num_arrivals: int, preempt: Callable[[HostT], None]) -> bool:
        """Let a model give its memory to a request of another one that waits for KV for long;
        return whether one does."""
        blocked, host = self._blocked
        if blocked is None or host is None:
            return False
        others = [
            other
            for other in self
            if other is not host
            and other.lane.is_resident
            and other.lane.has_work
            and not other.is_pinned
        ]
        if not others:
            return False
        now_s = self._assembly.clock_s()
        waited_s = now_s - max(blocked.request.arrival_s, host.ready_s)
        holders = [
            Holder(
                now_s - other.ready_s,
                other.weights.load_s,
                other.info.weight_bytes,
                len(other.lane.running),
                other.has_streamed,
            )
            for other in others
        ]
        is_new = blocked.first_token_s is None
        chosen = self._policies.relief(ReliefSnapshot(waited_s, holders, is_new))
        if chosen is None:
            return False
        preempt(others[chosen])
        others[chosen].give_way(num_arrivals)
        host.ready_s = now_s  # its turn begins
        return True

    @property
    def _blocked(self) -> tuple[SequenceGroup, HostT] | tuple[None, None]:
        """The request that waits for memory though its model is there, and that model."""
        group = self._assembly.scheduler.admitter.blocked
        host = None if group is None else self._hosts.get(group.request.model)
        if group is None or host is None or not host.lane.is_resident:
            return None, None
        return group, host

    def _continue(self, host: HostT, on_failure: Callable[[HostT, str], None]) -> None:
        """Let a model run if its weights are there by now; waits a little if no other runs."""
        if not host.is_filled_within(self._pause_s):
            return
        try:
            host.finish_loading()
            self._check_loaded(host)
        except (ConfigError, DriverError) as error:
            on_failure(host, str(error))

    @property
    def _pause_s(self) -> float:
        """How long the loop may wait for weights: not while any model has something to run."""
        can_run = any(
            (lane.is_resident and lane.has_work) or lane.in_flight
            for lane in self._assembly.scheduler.lanes.values()
        )
        return 0.0 if can_run else _PAUSE_S

    def _leaves_room(self, host: HostT, others: Sequence[HostT]) -> bool:
        """Whether there is room for a model and its next request beside models that run.

        If others run, there must be room for its request, for which it would be loaded in vain
        otherwise; and any request of theirs must fit beside it, so that none waits for the model to
        go again. None of theirs may wait for memory already.
        """
        if self._blocked[1] in others:
            return False
        if not self._has_room(host, first_pages(host.lane) if others else 0):
            return False
        together = (other.weights.member for other in (host, *others))
        kv_pages = self._kv_pages_beside(self._reuse.distinct_bytes(together))
        return all(
            most_pages_of(other.lane, group) <= kv_pages
            for other in others
            for group in (*other.lane.running, *other.lane.waiting)
        )

    # --- what stays, and for how long --------------------------------------------------------

    def pin(self, host: HostT) -> None:
        """Let the weights of a model stay. Pre-condition: it is loaded, or asked for after this.

        Raises:
            RequestError: beside it and the other pinned ones, another model could not be loaded.
        """
        host.is_pinned = True
        try:
            for other in self:
                self._check_beside_pinned(other)
        except ConfigError as error:
            host.is_pinned = False
            raise RequestError(str(error)) from None

    def expire(self) -> None:
        """Unload the models that nothing has used for as long as they are to be kept."""
        for host in self:
            if host.left_s == 0.0 and not host.weights.is_saving:
                host.unload()

    @property
    def idle_s(self) -> float | None:
        """Time until `expire` has something to do, if nothing happens; None for any time."""
        return min((host.left_s for host in self if host.left_s is not None), default=None)

    @property
    def has_work(self) -> bool:
        """Whether a model is to be loaded or unloaded."""
        return any(
            host.is_wanted or host.state == ModelState.LOADING or host.left_s == 0.0
            for host in self
        )

    def _check_beside_pinned(self, host: HostT) -> None:
        """Refuse a model that could not be loaded beside those that are pinned.

        Raises:
            ConfigError: it could not.
        """
        pinned = [other for other in self if other.is_pinned]
        num_bytes = self._weight_bytes(host)
        if pinned and self._kv_pages_beside(num_bytes) < host.lane.cache.footprint.pages(1):
            names = ", ".join(sorted(other.info.name for other in pinned))
            raise ConfigError(
                f"{host.info.name} could not be loaded beside what is pinned ({names}): together "
                f"their weights take {format_size(num_bytes)} of "
                f"{format_size(self._pool.budget_bytes)}"
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
        return usage.overhead_bytes + usage.of_kind(Kind.WEIGHTS) + self.pinned_bytes

    def kv_pages(self, host: HostT) -> int:
        """The most pages that a model's KV can have, beside weights that cannot go."""
        return host.lane.cache.footprint.limited(self._kv_pages_beside(self._weight_bytes(host)))

    @property
    def least_kv_pages(self) -> int:
        """The most pages that KV can have beside the weights of whichever model is loaded."""
        return self._kv_pages_beside(max(map(self._weight_bytes, self), default=0))

    def _weight_bytes(self, host: HostT) -> int:
        """Bytes of the weights that stay while a model runs: its own, and those that are pinned."""
        pinned = [other for other in self if other.is_pinned and other is not host]
        if not pinned:
            return host.info.weight_bytes
        return self._reuse.distinct_bytes(other.weights.member for other in (host, *pinned))

    def _kv_pages_beside(self, weight_bytes: int) -> int:
        """The most pages that KV can have beside so many bytes of weights."""
        overhead_bytes = self._pool.usage().overhead_bytes
        return self._room.budget_pages(overhead_bytes + weight_bytes + self.pinned_bytes)

    def kv_capacity(self, host: HostT) -> KVCapacity:
        """What fits into the KV cache if a model has all of it."""
        return kv_capacity(host.lane.cache.footprint, host.info.max_model_len, self.kv_pages(host))

    def _check_room(self, host: HostT) -> None:
        """Refuse a model of which no request could run; warn where long ones cannot.

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
        if longest < limit - 1 and host not in self._warned:
            self._warned.add(host)
            _log.warning(
                "the pool holds at most %d tokens of %s at a time, its context length is %d; "
                "longer requests will be refused",
                longest,
                host.info.name,
                limit,
            )
