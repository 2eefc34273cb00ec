"""The engines of a server: which there are, and when the server can begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.reports import LoadProgress, ModelInfo
from aquifer.serve.config import ServerConfig
from aquifer.serve.engine_configs import device_names, engine_configs, lend_weights
from aquifer.serve.engines import Engines
from aquifer.serve.link import ProcessLink
from aquifer.serve.process import OpenEngine, open_engine


class Fleet(Protocol):
    """Adds engines to those of a server, and may remove them while it serves.

    `LocalFleet` is that of the devices of this machine, `aquifer.cluster.fleet.ClusterFleet` that
    of a cluster's workers.
    """

    def start(self, engines: Engines) -> None:
        """Start to add engines."""

    async def ready(self, on_progress: Callable[[LoadProgress], None]) -> dict[str, ModelInfo]:
        """Wait until the server can begin; return all models by name.

        Raises:
            ConfigError: an option or a checkpoint cannot be used.
            EngineError: the driver refused a call, or a process died.
        """

    async def registered(self, spec: ModelSpec) -> None:
        """Have engines that come later serve a model too.

        Raises:
            EngineError: that cannot be made sure of; nothing has changed.
        """

    async def removed(self, model: str) -> None:
        """Have engines that come later do without a model.

        Raises:
            EngineError: that cannot be made sure of; nothing has changed.
        """

    async def stop(self) -> None:
        """Add and remove no more engines: the server is shutting down."""


class LocalFleet:
    """The `Fleet` of the devices of this machine: an engine process for each.

    Args:
        engine: options of the engines, with the models to serve.
        config: options of the server.
        open_it: opens an engine, in its process.
    """

    def __init__(
        self, engine: EngineConfig, config: ServerConfig, open_it: OpenEngine = open_engine
    ) -> None:
        self._configs = engine_configs(engine, config.device_names)
        self._lends_weights = lend_weights(self._configs)
        self._folder: TemporaryDirectory[str] | None = None
        self._open_it = open_it
        self._log_level = config.log_level

    def start(self, engines: Engines) -> None:
        """Add the engines of all devices."""
        self._engines = engines
        if self._lends_weights:  # they find each other in a folder that other users cannot open
            self._folder = TemporaryDirectory(prefix="aquifer-")
            folder = Path(self._folder.name)
            self._configs = [replace(each, neighbours=folder) for each in self._configs]
        for config, name in zip(self._configs, device_names(self._configs), strict=True):
            new_link = partial(
                ProcessLink, open_it=self._open_it, log_level=self._log_level, reports=bool(name)
            )
            engines.add(name, config, new_link)

    async def ready(self, on_progress: Callable[[LoadProgress], None]) -> dict[str, ModelInfo]:
        """Wait until all engines have loaded what they load first; see `Fleet.ready`."""
        return await self._engines.ready(on_progress)

    async def registered(self, spec: ModelSpec) -> None:
        """Nothing to do: no engines come later."""

    async def removed(self, model: str) -> None:
        """Nothing to do: no engines come later."""

    async def stop(self) -> None:
        """No engines come later that could find others."""
        if self._folder is not None:
            self._folder.cleanup()
