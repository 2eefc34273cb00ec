"""Engines of a cluster's workers, which come and go as the controller says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from aquifer.cluster.link import RemoteLink
from aquifer.cluster.state import View, WorkerView
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.reports import LoadProgress, ModelInfo
from aquifer.errors import ConfigError, EngineError
from aquifer.serve.engines import Engines
from aquifer.serve.link import EngineLink
from aquifer.serve.placed_engine import PlacedEngine

_PAUSE_S = 1.0
"""Until the controller is asked again after it could not be reached."""

_LOOK_S = 0.05
"""Interval of looks whether a worker serves that does not leave."""

_logger = logging.getLogger(__name__)


class ControllerCalls(Protocol):
    """How the controller is called; `ControllerClient` does it through Ray."""

    async def call(self, method: str, *args: Any, patience_s: float = 10.0) -> Any:
        """Call a method of the controller, or raise an `UnavailableError`."""


class ClusterFleet:
    """The `Fleet` of a cluster's workers.

    For one event loop.

    Args:
        engine: options of all engines, with all models that are registered.
        controller: calls the controller.
        front: id of this server among those that the cluster may have one after the other.
        token: of the cluster.
        log_level: least level of messages that the engine processes log.
        drain_s: how long the requests of a worker that leaves may take to end.
    """

    def __init__(
        self,
        engine: EngineConfig,
        controller: ControllerCalls,
        front: str,
        token: str,
        log_level: str,
        drain_s: float,
    ) -> None:
        self._config = engine
        self._controller = controller
        self._front = front
        self._token = token
        self._log_level = log_level
        self._drain_s = drain_s
        self._num_added = 0
        self._added: asyncio.Queue[PlacedEngine] = asyncio.Queue()
        self._leaving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, engines: Engines) -> None:
        """Begin to follow the controller."""
        self._engines = engines
        self._following = self._in_background(self._follow())

    async def ready(self, on_progress: Callable[[LoadProgress], None]) -> dict[str, ModelInfo]:
        """Wait until one worker serves; return all models by name.

        Raises:
            ConfigError: an option or a checkpoint cannot be used.
        """
        adding = asyncio.create_task(self._added.get())
        starting: set[asyncio.Task[dict[str, ModelInfo]]] = set()
        try:
            while True:
                await asyncio.wait(
                    {adding, self._following, *starting}, return_when=asyncio.FIRST_COMPLETED
                )
                if self._following.done():
                    self._following.result()  # raises
                if adding.done():
                    engine = adding.result()
                    starting.add(asyncio.create_task(engine.ready(on_progress)))
                    adding = asyncio.create_task(self._added.get())
                for task in [task for task in starting if task.done()]:
                    starting.discard(task)
                    try:
                        return task.result()
                    except ConfigError:
                        raise
                    except EngineError as error:
                        _logger.error("a worker could not start its engine: %s", error)
        finally:
            adding.cancel()
            for task in starting:
                task.cancel()

    async def registered(self, spec: ModelSpec) -> None:
        """Have workers that come later serve a model too; the controller writes it down.

        Raises:
            UnavailableError: the controller does not answer; nothing has changed.
        """
        await self._controller.call("register", spec)
        self._config = replace(self._config, models=(*self._config.models, spec))

    async def removed(self, model: str) -> None:
        """Have workers that come later do without a model; the controller writes it down.

        Raises:
            UnavailableError: the controller does not answer; nothing has changed.
        """
        await self._controller.call("remove", model)
        left = tuple(spec for spec in self._config.models if spec.name != model)
        self._config = replace(self._config, models=left)

    async def stop(self) -> None:
        """Follow the controller no more."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        version = 0
        while True:
            try:
                view: View = await self._controller.call("watch", self._front, version)
            except EngineError as error:
                _logger.error("%s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            version = view.version
            self._apply(view)

    def _apply(self, view: View) -> None:
        """Add, drain and remove engines, so that they are those of the workers."""
        if self._engines.is_stopping:
            return
        there = {worker.name for worker in view.workers}
        for name in self._engines.names:
            if name not in there:
                self._in_background(self._engines.remove(name))
        for worker in view.workers:
            if worker.is_leaving:
                if worker.name not in self._leaving:
                    self._leaving.add(worker.name)
                    self._in_background(self._drain(worker.name))
            elif worker.name not in self._engines.names:
                self._add(worker)

    def _add(self, worker: WorkerView) -> None:
        def new_link(config: EngineConfig) -> EngineLink:
            return RemoteLink(config, worker.address, self._token, self._log_level)

        # Each begins with another model, so that those that are loaded first are not the same.
        models = self._config.models
        first = self._num_added % max(len(models), 1)
        self._num_added += 1
        config = replace(self._config, models=models[first:] + models[:first])
        engine = self._engines.add(worker.name, config, new_link, insists=True)
        self._added.put_nowait(engine)

    async def _drain(self, name: str) -> None:
        """Let a worker go once it has no requests; it accepts them until another one serves.

        What it accepts has half of the time to end at least, also if no other one comes.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._drain_s
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s / 2):
                while not {*self._engines.serving} - self._leaving and name in self._engines.names:
                    await asyncio.sleep(_LOOK_S)
        await self._engines.drain(name, until_s - loop.time())
        await self._engines.remove(name)
        try:
            await self._controller.call("left", name)
        except EngineError as error:
            _logger.error("%s cannot be ended now: %s", name, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
