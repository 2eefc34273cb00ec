"""What the controller of a cluster knows, and keeps in Ray's own store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aquifer.cluster.tcp import Address
from aquifer.config import ModelSpec


@dataclass(frozen=True, slots=True)
class Settings:
    """How the workers of a cluster are made.

    Args:
        on_gpu: whether they run on GPUs.
        num_devices: devices of each.
        num_wanted: how many there should be; 0 for as many as there is room for.
        log_level: least level of messages that their agents log.
        drain_s: how long the requests of a worker that leaves may take to end.
    """

    on_gpu: bool = False
    num_devices: int = 1
    num_wanted: int = 0
    log_level: str = "info"
    drain_s: float = 0.0


@dataclass(slots=True)
class WorkerRecord:
    """A worker that runs or starts.

    Args:
        name: of its actor.
        node_id: of its node.
        address: of its agent; None until it has one.
        is_leaving: whether it gets no more requests.
    """

    name: str
    node_id: str
    address: Address | None = None
    is_leaving: bool = False


@dataclass(slots=True)
class ClusterState:
    """All that outlives the controller's process.

    Attributes:
        settings: how workers are made; None until a server has come.
        models: that are registered, by name.
        workers: by name, oldest first.
        num_made: workers that were made so far.
        url: of the server.
    """

    settings: Settings | None = None
    models: dict[str, ModelSpec] = field(default_factory=dict)
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    num_made: int = 0
    url: str = ""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> ClusterState:
        """From text of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        state = cls(num_made=values["num_made"], url=values["url"])
        if values["settings"] is not None:
            state.settings = Settings(**values["settings"])
        for of_model in values["models"].values():
            of_model["path"] = Path(of_model["path"])
            of_model["aliases"] = tuple(of_model["aliases"])
            state.models[of_model["name"]] = ModelSpec(**of_model)
        for of_worker in values["workers"].values():
            address = of_worker.pop("address")
            worker = WorkerRecord(**of_worker, address=address and Address(**address))
            state.workers[worker.name] = worker
        return state


class WorkerView(NamedTuple):
    """A worker, as the server sees it."""

    name: str
    address: Address
    is_leaving: bool


class View(NamedTuple):
    """The workers that there are.

    Args:
        version: changes whenever they do, also when the controller starts again.
        workers: those that have an address, oldest first.
    """

    version: int
    workers: tuple[WorkerView, ...]


def view_of(state: ClusterState, version: int) -> View:
    """What the server sees of the workers."""
    return View(
        version,
        tuple(
            WorkerView(worker.name, worker.address, worker.is_leaving)
            for worker in state.workers.values()
            if worker.address is not None
        ),
    )
