"""What a web process asks of the rest of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from prometheus_client.core import Metric

from aquifer.config import ModelSpec
from aquifer.engine.reports import MemoryReport, ModelInfo
from aquifer.serve.messages import Abort, Add, Availability, ModelVerb, Outputs
from aquifer.serve.prefixes import PinnedPrefix
from aquifer.serve.snapshots import Snapshot


class Backend(Protocol):
    """What all web processes share: the engine, pinned prefixes, metrics.

    `aquifer.serve.hub.Hub` is it where the only web process is the server's first process,
    `aquifer.serve.web_process.RemoteHub` where there are several.

    Every method that waits raises an `EngineError` if the engine has stopped, or an
    `UnavailableError` if it does not answer in time.
    """

    @property
    def availability(self) -> Availability:
        """Whether requests are accepted."""

    def send(self, message: Add | Abort) -> None:
        """Send a message to an engine process; a request that none accepts ends with an error."""

    async def memory(self) -> MemoryReport:
        """Ask the engine for its memory report, which includes the effect of all earlier aborts."""

    async def metrics(self) -> bytes:
        """Return the metrics of the whole server in Prometheus's exposition format."""

    async def snapshot(self) -> Snapshot:
        """Return the state of the server, made at most once in `SNAPSHOT_S` for all who ask."""

    async def pin(
        self,
        owner: str | None,
        client: str,
        model: str,
        token_ids: list[int],
        cache_salt: str | None,
    ) -> PinnedPrefix:
        """Pin the KV of a prefix, as `aquifer.serve.prefixes.PinnedPrefixes.pin` does."""

    async def unpin(self, owner: str | None, prefix_id: str) -> bool:
        """Unpin a prefix; return whether this owner had one with this id."""

    async def prefixes(self, owner: str | None) -> list[PinnedPrefix]:
        """List this owner's pinned prefixes, oldest first."""

    async def manage(self, verb: ModelVerb, model: str) -> None:
        """Do something with a model; a load has only begun when this returns."""

    async def register(self, model: str) -> str:
        """Register a model as the command line names it; returns its served name.

        Raises:
            RequestError: it cannot be used.
        """

    async def remove(self, name: str) -> None:
        """Remove a model; its requests end with an error."""


class WebSide(Protocol):
    """The web processes, as what they share sees them.

    `aquifer.serve.web.Web` is it where there is one, `aquifer.serve.web_processes.WebProcesses`
    where there are several.
    """

    async def prepare(self) -> None:
        """Get ready while the models are loaded.

        Raises:
            ConfigError: a tokenizer or a template cannot be used.
        """

    async def open(self, models: Mapping[str, ModelInfo]) -> None:
        """Answer requests for these models, by served name, from now on."""

    async def add(self, spec: ModelSpec, info: ModelInfo) -> None:
        """Answer requests for one more model. Pre-condition: `open`.

        Raises:
            ConfigError: its tokenizer or template cannot be used; nothing has changed.
        """

    async def remove(self, name: str) -> None:
        """Answer no more requests for a model; return once that is so."""

    def deliver(self, outputs: Outputs) -> None:
        """Deliver outputs of the engine to the requests that they are of."""

    def available(self, availability: Availability) -> None:
        """Hear that it has changed whether requests are accepted."""

    async def request_metrics(self) -> list[list[Metric]]:
        """Return what each web process has measured since the start."""

    async def run(self) -> None:
        """Serve until `stop`, and then until the last response is sent."""

    async def stop(self, timeout_s: float) -> None:
        """Accept no more requests; end those that still run after `timeout_s` with an error."""

    def kill(self) -> None:
        """End processes of its own at once."""
