"""Life of a model: registered, loading, resident, partly resident, removed.

    registered -> loading -> resident -> partly resident -> registered
    partly resident -> loading        failed from loading, removed from any

A registered model has addresses for its weights and its KV, a queue of requests, and no memory. It
is loaded into pages of the pool. While it has no requests its weights may be evicted, tensor by
tensor; those that are gone are loaded again when it is wanted. Its addresses stay, so the model
that was built over them and the captured steps stay valid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from itertools import chain

from aquifer.engine.assembly import Assembly
from aquifer.engine.lane import Lane
from aquifer.engine.lane_pages import running_bytes, swapped_bytes
from aquifer.engine.policies.least_run import long_run_s
from aquifer.engine.policies.residents import Resident
from aquifer.engine.pooled_weights import Life, PooledWeights
from aquifer.engine.reports import LoadProgress, ModelInfo, ModelState, ModelStatus
from aquifer.errors import RequestError, UnknownModelError, errors_of_model

RETRY_S = 10.0
"""How long a model that could not be loaded refuses requests, before it is tried again."""


class ModelLife(ABC):
    """State of one model, and the ways from one state to another.

    The engine's `ModelHost` builds a model over the weights and runs it; a replay only counts time.

    Args:
        assembly: pool and scheduler.
        keep_alive_s: how long its weights are kept while nothing uses them; infinite for as long as
            nothing else needs the memory.

    Attributes:
        info: description of the model for other processes.
        state: its state.
        error: why loading it failed; None if it did not.
        lane: its requests.
        ready_s: when it became resident last, on the assembly's clock.
        loaded_s: when the load that is under way is expected to end, on that clock; None if there
            is none.
        used_s: when it became resident or failed, or a request of it arrived or ran last, on that
            clock.
        turn: number of requests that had arrived when it gave way to another model; it is loaded
            again after models of which a request had arrived before.
        gave_way_s: when it gave way last, on the assembly's clock.
        runs_in_full: whether its turn is not to be a short one: it has waited for long.
        asked: number of requests that had arrived when an operator asked for it, until it is
            resident; None if nobody did.
        is_pinned: whether its weights stay.
        keep_alive_s: as given, or as the latest request says.
        was_made_ready: whether its latest load has made what runs its steps, which takes memory
            outside of pages; an earlier one may have.
    """

    info: ModelInfo
    lane: Lane
    _weights: PooledWeights

    def __init__(self, assembly: Assembly, keep_alive_s: float = math.inf) -> None:
        self.state = ModelState.REGISTERED
        self.error: str | None = None
        self.ready_s = -math.inf
        self.loaded_s: float | None = None
        self.used_s = -math.inf
        self.turn = 0
        self.gave_way_s = -math.inf
        self.runs_in_full = False
        self.asked: int | None = None
        self.is_pinned = False
        self.keep_alive_s = keep_alive_s
        self.was_made_ready = False
        self._num_loads = 0
        self._loading_s = 0.0
        self._begun_s = math.inf  # when the latest load began
        self._scheduler = assembly.scheduler
        self._clock_s = assembly.clock_s
        self._copy_s = assembly.copy_s

    @property
    def weights(self) -> PooledWeights:
        """Its weights."""
        return self._weights

    @property
    def resident_bytes(self) -> int:
        """Bytes of its weights that are in the pool."""
        return self._weights.resident_bytes

    @property
    def status(self) -> ModelStatus:
        """What it does and has."""
        return ModelStatus(
            self.state,
            self.resident_bytes,
            self.info.weight_bytes,
            self._num_loads,
            self._loading_s,
            self.error,
            shared_bytes=self._weights.shared_bytes,
            host_bytes=self._weights.host_bytes,
            is_saving=self._weights.is_saving,
            is_pinned=self.is_pinned,
            keep_alive_s=None if self.keep_alive_s == math.inf else self.keep_alive_s,
            left_s=self.left_s,
        )

    @property
    def is_unused(self) -> bool:
        """Whether nothing needs its weights: it is not pinned, and no request of it runs.

        Some may wait.
        """
        if self.is_pinned:
            return False
        if self.state == ModelState.RESIDENT:
            return not self.lane.is_busy
        return self.state == ModelState.PARTIAL

    def weights_life(self) -> Life:
        """What its weights have to know of it."""
        return Life(
            is_unused=lambda: self.is_unused,
            is_wanted=lambda: bool(self.lane.waiting),
            on_evict=self._on_evict,
        )

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be loaded."""
        return self.state != ModelState.RESIDENT and (
            self.asked is not None or bool(self.lane.waiting)
        )

    @property
    def first_arrival(self) -> int:
        """The number of the earliest request that waits, or at which it was asked for."""
        arrivals = [group.arrival for group in self.lane.waiting]
        return min(arrivals if self.asked is None else [self.asked, *arrivals])

    @property
    def has_new(self) -> bool:
        """Whether a request of it has had no token yet, or an operator waits for it."""
        groups = chain(self.lane.waiting, self.lane.running)
        return self.asked is not None or any(group.first_token_s is None for group in groups)

    @property
    def has_streamed(self) -> bool:
        """Whether its turn may be a short one: its requests have had a token, and waited little."""
        return not (self.has_new or self.runs_in_full)

    @property
    def can_wait(self) -> bool:
        """Whether all of its requests have had their first token, and it gave way not long ago."""
        waited_s = self._clock_s() - self.gave_way_s
        return not self.has_new and waited_s < long_run_s(self.restore_s)

    @property
    def restore_s(self) -> float:
        """Seconds to load it, and the KV of its waiting requests from the host."""
        return self.weights.missing_s + self._copy_s(swapped_bytes(self.lane))

    @property
    def place_in_turn(self) -> tuple[bool, int, bool, float]:
        """Orders models that are to be loaded: by first request, and after they gave way by that.

        One that gave way comes after all requests that had arrived by then and before later ones;
        of several that did so since the latest arrival, the one that was loaded first. Those that
        can wait come last, and each can for a bounded time.
        """
        first = self.first_arrival
        return self.can_wait, max(first, self.turn), first >= self.turn, self.ready_s

    @property
    def resident(self) -> Resident:
        """It as a model that runs, to the policy that says which one gives way."""
        return Resident(
            self._clock_s() - self.ready_s,
            self._copy_s(running_bytes(self.lane)),
            self.has_streamed,
        )

    @property
    def left_s(self) -> float | None:
        """Time until it is unloaded because nothing has used it; None for never."""
        has_weights = self.state in (ModelState.RESIDENT, ModelState.PARTIAL)
        if self.is_pinned or not has_weights or self.keep_alive_s == math.inf:
            return None
        if self.lane.has_work or self.lane.in_flight or self.asked is not None:
            return None
        return max(self.used_s + self.keep_alive_s - self._clock_s(), 0.0)

    def ask(self, arrival: int) -> None:
        """It is to be loaded, as if a request with this number had arrived."""
        if self.state == ModelState.FAILED:
            self.state = ModelState.REGISTERED
        self.error = None
        self.asked = None if self.state == ModelState.RESIDENT else arrival
        self.used_s = self._clock_s()

    def check_not_failed(self) -> None:
        """Refuse a request for a model that could not be loaded; after a while it is tried again.

        Raises:
            UnknownModelError: loading it has failed.
        """
        if self.state != ModelState.FAILED:
            return
        if self._clock_s() - self.used_s < RETRY_S:
            raise UnknownModelError(
                f"model {self.info.name!r} could not be loaded: {self.error}", param="model"
            )
        self.state, self.error = ModelState.REGISTERED, None

    def check_not_pinned(self) -> None:
        """Refuse what a pinned model must not lose.

        Raises:
            RequestError: it is pinned.
        """
        if self.is_pinned:
            raise RequestError(f"model {self.info.name!r} is pinned; unpin it first")

    def wanted(self, keep_alive_s: float | None = None) -> None:
        """A request of it arrives; it may change how long the weights are kept without any."""
        self.used_s = self._clock_s()
        self._weights.uses.use(self.used_s)
        if keep_alive_s is not None:
            self.keep_alive_s = keep_alive_s

    def used(self) -> None:
        """A step of it is launched."""
        self.used_s = self._clock_s()

    # --- loading and evicting ----------------------------------------------------------------

    def load(self, on_progress: Callable[[LoadProgress], None]) -> bool:
        """Bring the weights that are missing into the pool, and prepare the model to run.

        Returns: False if the pool has no room for them, and nothing has changed.

        Raises:
            ConfigError: the checkpoint cannot be used; the model has failed.
            DriverError: the device refused memory.
        """
        if self.state == ModelState.LOADING:
            self.finish_loading()
        if self.state == ModelState.RESIDENT:
            return True
        if not self._take_pages():
            return False
        with self._failing():
            self._fill(on_progress)
        self._prepare(on_progress)
        return True

    def begin_loading(self, threads: Executor) -> bool:
        """Begin to load the weights that are missing, while other models run.

        Args:
            threads: where they are loaded; `finish_loading` ends it.

        Returns: False if the pool has no room for them, and nothing has changed.

        Raises:
            DriverError: the device refused memory; nothing has changed.
        """
        is_overdue = not (self.has_new or self.can_wait)
        if not self._take_pages():
            return False
        self.runs_in_full = is_overdue
        self._weights.begin_filling(threads)
        return True

    def is_filled_within(self, timeout_s: float | None) -> bool:
        """Wait for a time, None for any; return whether `finish_loading` would not wait.

        Pre-condition: it loads.
        """
        return self._weights.is_filled_within(timeout_s)

    def finish_loading(self) -> None:
        """Wait for the weights, and prepare the model to run. Pre-condition: it loads.

        Raises:
            ConfigError: the checkpoint cannot be used; the model has failed.
            DriverError: the device refused memory; likewise.
        """
        with self._failing():
            self._weights.finish_filling()
        self._prepare(lambda progress: None)

    def give_way(self, turn: int) -> None:
        """Run no more requests until it is loaded again; its weights may be evicted.

        Pre-condition: none of them runs, and no step of it is in flight.

        Args:
            turn: number of requests that have arrived so far, of all models.
        """
        self._leave(ModelState.PARTIAL)
        self.turn = turn
        self.gave_way_s = self._clock_s()

    def unload(self, keep_bytes: int = 0) -> None:
        """Evict the weights, but for so many bytes.

        Pre-condition: no request of it runs, and no step is in flight.
        """
        if self.state in (ModelState.LOADING, ModelState.RESIDENT, ModelState.PARTIAL):
            self._weights.evict(keep_bytes)
            self._on_evict()

    @abstractmethod
    def close(self) -> None:
        """Release everything. Pre-condition: it has no requests, and no step is in flight."""

    def _take_pages(self) -> bool:
        """Take pages for the weights that are missing; it is loading then. False without room."""
        before = self.state
        self.state = ModelState.LOADING  # meanwhile what is there of it stays
        self._begun_s = self._clock_s()
        self.loaded_s = self._begun_s + self._weights.missing_s
        has_room = False
        try:
            has_room = self._weights.take_pages()
        finally:
            if not has_room:
                self.state, self.loaded_s = before, None
        return has_room

    def _fill(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Load the contents of the pages that were taken."""
        self._weights.fill(on_progress)

    @abstractmethod
    def _make_ready(self, on_progress: Callable[[LoadProgress], None]) -> bool:
        """Make what runs steps over the weights, which are there; False if it was made before."""

    def _prepare(self, on_progress: Callable[[LoadProgress], None]) -> None:
        """Prepare to run over the weights, which are there."""
        with self._failing():
            self.was_made_ready = self._make_ready(on_progress)
        self.state, self.error, self.asked = ModelState.RESIDENT, None, None
        self.loaded_s = None
        self.lane.is_resident = True
        self.lane.last_turn = -1  # it comes next, before others take its weights again
        self.ready_s = self.used_s = self._clock_s()
        self._num_loads += 1
        self._loading_s += self.ready_s - self._begun_s

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """If an exception is raised, the model has failed, and its weights are evicted."""
        try:
            with errors_of_model(self.info.name):
                yield
        except BaseException as error:
            self._weights.evict()
            self.state, self.error, self.asked = ModelState.FAILED, str(error), None
            self.loaded_s = None
            self.used_s = self._clock_s()
            raise

    def _on_evict(self) -> None:
        """Some weights have been evicted, since it was idle."""
        self._leave(ModelState.PARTIAL if self.resident_bytes else ModelState.REGISTERED)

    def _leave(self, state: ModelState) -> None:
        """Plan nothing of it until it has been loaded again."""
        self.state, self.loaded_s = state, None
        self.lane.is_resident = False
        self._scheduler.unblock(self.lane)
