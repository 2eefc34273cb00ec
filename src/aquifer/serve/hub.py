"""What the web processes of a server share: the engines, pinned prefixes, metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from prometheus_client.core import Metric

from aquifer.config import EngineConfig, ModelSpec, aliases_of
from aquifer.engine.reports import EngineStats, LoadProgress, MemoryReport, ModelInfo
from aquifer.errors import ConfigError, EngineError, RequestError, UnknownModelError
from aquifer.hub import locate
from aquifer.serve.backend import WebSide
from aquifer.serve.config import ServerConfig
from aquifer.serve.engine_metrics import EngineMetrics, request_counts, summed
from aquifer.serve.engines import Engines
from aquifer.serve.fleet import Fleet
from aquifer.serve.messages import Abort, AbortAll, Add, Availability, ModelVerb, Outputs
from aquifer.serve.prefixes import PinnedPrefix, PinnedPrefixes
from aquifer.serve.snapshots import SNAPSHOT_S, RequestCounts, Shared, Snapshot
from aquifer.serve.stats_log import StatsLog, log_start

_log = logging.getLogger(__name__)


class Hub:
    """The `Backend` in the server's first process.

    For one event loop.

    Args:
        engine: options of the engines, with the models to serve.
        config: options of the server.
        fleet: adds the engines.
    """

    def __init__(self, engine: EngineConfig, config: ServerConfig, fleet: Fleet) -> None:
        self._engine = engine
        self._logs_stats = not config.disable_log_stats
        self._fleet = fleet
        self._engines = Engines(config.placement, self)
        self._prefixes = PinnedPrefixes(self._engines)
        self._web: WebSide | None = None
        self._metrics = EngineMetrics([])
        self._availability = self._engines.availability  # as the web side knows it
        self._logging: asyncio.Task[None] | None = None
        self._stats_log: StatsLog | None = None
        self._names = [model.name for model in engine.models]
        self._changing = asyncio.Lock()  # one model is registered or removed at a time
        self._snapshots = Shared(self._snapshot, 0.9 * SNAPSHOT_S)

    # ---- life

    def start(self) -> None:
        """Start the engine processes."""
        self._fleet.start(self._engines)

    def attach(self, web: WebSide) -> None:
        """Deliver outputs of the engine to these web processes."""
        self._web = web

    async def ready(self, on_progress: Callable[[LoadProgress], None]) -> dict[str, ModelInfo]:
        """Wait until all models are loaded; return their infos by served name.

        Raises:
            ConfigError: an option or a checkpoint cannot be used.
            EngineError: the driver refused a call, or the process died.
        """
        models = await self._fleet.ready(on_progress)
        self._metrics = EngineMetrics(models)
        return models

    async def log(self, models: Mapping[str, ModelInfo]) -> None:
        """Log what is served, and begin to log throughput if that is wanted."""
        device = None
        try:
            report = await self.memory()
        except EngineError:
            pass  # the engine process has died, which the keeper logs
        else:
            device = report.device
            log_start([*models.values()], aliases_of(self._engine.models), report)
        if self._logs_stats:
            self._stats_log = StatsLog(models, device)
            self._logging = asyncio.create_task(self._stats_log.run(self._counts))

    def refuse(self) -> None:
        """Accept no more requests: the server is shutting down."""
        if self._logging is not None:
            self._logging.cancel()
        self._engines.refuse()

    async def stop(self) -> None:
        """End the engine processes. Pre-condition: `refuse`."""
        await self._fleet.stop()
        await self._engines.stop()

    def kill(self) -> None:
        """Kill the engine processes at once."""
        self._engines.kill()

    # ---- the backend of web processes

    @property
    def availability(self) -> Availability:
        """Whether requests are accepted."""
        return self._engines.availability

    def send(self, message: Add | Abort | AbortAll) -> None:
        """Send a message to an engine process; a request that none accepts ends with an error."""
        self._engines.send(message)

    async def memory(self) -> MemoryReport:
        """Ask the engine for its memory report, which includes the effect of all earlier aborts.

        Raises:
            EngineError: the engine has stopped.
        """
        return await self._engines.memory()

    async def metrics(self) -> bytes:
        """Return the metrics of the whole server in Prometheus's exposition format."""
        try:
            report = await self.memory()
        except EngineError:
            report = None
        of_requests = await self._request_metrics()
        return self._metrics.render(of_requests, self._stats, report, self._engines.num_restarts)

    async def snapshot(self) -> Snapshot:
        """Return the state of the server, which may be as old as the time between two snapshots.

        Raises:
            EngineError: the engine has stopped.
        """
        return await self._snapshots.get()

    async def pin(
        self,
        owner: str | None,
        client: str,
        model: str,
        token_ids: list[int],
        cache_salt: str | None,
    ) -> PinnedPrefix:
        """Pin the KV of a prefix, as `PinnedPrefixes.pin` does."""
        return await self._prefixes.pin(owner, client, model, token_ids, cache_salt)

    async def unpin(self, owner: str | None, prefix_id: str) -> bool:
        """Unpin a prefix; return whether this owner had one with this id."""
        return await self._prefixes.unpin(owner, prefix_id)

    async def prefixes(self, owner: str | None) -> list[PinnedPrefix]:
        """List this owner's pinned prefixes, oldest first."""
        return self._prefixes.of(owner)

    async def manage(self, verb: ModelVerb, model: str) -> None:
        """Do something with a model, as `Engines.manage` does."""
        await self._engines.manage(verb, model)

    async def register(self, model: str) -> str:
        """Register a model as the command line names it; returns its served name.

        It is downloaded first, if it is one of the Hugging Face hub.

        Raises:
            RequestError: it cannot be used, or its name is taken.
            EngineError: the engine has stopped.
        """
        assert self._web is not None
        try:
            named = ModelSpec.parse(model)
            self._check_new(named.name)
            (spec,) = await asyncio.to_thread(locate, [named])
            async with self._changing:
                self._check_new(spec.name)
                await self._fleet.registered(spec)
                try:
                    info = await self._engines.register(spec)
                    await self._web.add(spec, info)
                except BaseException:
                    await self._engines.remove_model(spec.name)
                    await self._fleet.removed(spec.name)
                    raise
        except ConfigError as error:
            raise RequestError(str(error), param="model") from error
        self._names.append(spec.name)
        self._metrics.add(spec.name)
        if self._stats_log is not None:
            self._stats_log.add(spec.name)
        _log.info("model %s is registered, from %s", spec.name, spec.path)
        return spec.name

    async def remove(self, name: str) -> None:
        """Remove a model; its requests end with an error.

        Raises:
            UnknownModelError: there is none of this name.
            EngineError: the engine has stopped.
        """
        assert self._web is not None
        async with self._changing:
            if name not in self._names:
                raise UnknownModelError(f"no model {name!r} is served here", param="model")
            await self._fleet.removed(name)
            await self._engines.remove_model(name)
            self._names.remove(name)
            await self._web.remove(name)
            self._prefixes.forget(name)
            self._metrics.remove(name)
            if self._stats_log is not None:
                self._stats_log.remove(name)
        _log.info("model %s is removed", name)

    def _check_new(self, name: str) -> None:
        if name in self._names:
            raise ConfigError(f"a model named {name!r} is registered already")

    # ---- what the engine processes do

    def launched(self, model: str, num_tokens: int) -> None:
        """Measure a step that was launched."""
        self._metrics.launched(model, num_tokens)

    def deliver(self, outputs: Outputs) -> None:
        """Deliver outputs to the web processes."""
        if self._web is not None:
            self._web.deliver(outputs)

    def changed(self) -> None:
        """Tell the web processes whether requests are accepted, if that has changed."""
        now, before = self._engines.availability, self._availability
        if str(now.reason) != str(before.reason) or now.out_of_service != before.out_of_service:
            self._availability = now
            if self._web is not None:
                self._web.available(now)

    @property
    def _stats(self) -> EngineStats:
        stats = self._engines.stats
        assert stats is not None  # the models are ready
        return stats

    async def _request_metrics(self) -> list[Metric]:
        assert self._web is not None
        return summed(await self._web.request_metrics())

    async def _snapshot(self) -> Snapshot:
        report = await self.memory()
        counts = request_counts(await self._request_metrics())
        return Snapshot(time.time(), report, counts, self._engines.num_restarts)

    async def _counts(self) -> tuple[EngineStats, Mapping[str, RequestCounts]]:
        """The engine's counters, and what each model has served."""
        return self._stats, request_counts(await self._request_metrics())
