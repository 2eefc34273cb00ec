"""Actor that keeps the workers of a cluster, and the list of its models.

Its state is in Ray's own store, so that another process of it goes on where one has died. Requests
do not go through it: a server asks it which workers there are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aquifer.cluster.policy import Node, Placement, bundle, capacity, decide
from aquifer.cluster.state import ClusterState, Settings, View, WorkerRecord, view_of
from aquifer.cluster.worker import Worker
from aquifer.config import ModelSpec
from aquifer.errors import one_line
from aquifer.serve.supervisor import pause_s

CONTROLLER = "aquifer-controller"
NAMESPACE = "aquifer"

_KEY = b"cluster"
_LOOK_S = 1.0
"""Interval of looks at the nodes; what happens to a worker is noticed at once."""
_WATCH_S = 3.0
"""The longest time until `watch` answers."""
_FRONT_S = 6.0
"""A server that has not asked for this long is gone."""
_START_S = 60.0
"""A worker that takes longer to start counts as failed."""
LAST_S = 10.0
"""A worker that leaves ends so long after the time for its requests, also if a server uses it."""

_logger = logging.getLogger(__name__)


class Controller:
    """Keeps the workers of a cluster.

    An asyncio actor.
    """

    def __init__(self) -> None:
        saved = _internal_kv_get(_KEY, namespace=NAMESPACE)
        self._state = ClusterState.from_json(saved.decode()) if saved else ClusterState()
        self._found = list(self._state.workers)  # of the process before, which are to be looked at
        self._version = time.time_ns()
        self._changed = asyncio.Event()  # set and replaced when the version changes
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}  # of workers, by name
        self._failures: dict[str, int] = {}  # starts that failed in a row, by node
        self._num_lost: Counter[str] = Counter()  # workers that have ended by themselves, by node
        self._not_before_s: dict[str, float] = {}  # when a node may get a worker again
        self._nodes: list[dict[str, Any]] = []
        self._leaving: set[str] = set()  # nodes
        self._front = ""  # the server that uses the workers
        self._front_seen_s = -_FRONT_S  # when it has asked last
        self._is_stopping = False
        self._keeping: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    # ---- what a server asks

    async def configure(
        self, front: str, settings: Settings, models: list[ModelSpec]
    ) -> list[ModelSpec] | None:
        """Begin to keep workers for a server; returns all models that are registered, these first.

        Args:
            front: id of the server.
            settings: how workers are made. Workers that were made otherwise are ended.
            models: of the server's command line; they replace others of the same name.

        Returns: None if another server uses the workers.
        """
        until_s = time.monotonic() + _FRONT_S
        while self._is_replaced(front):
            if time.monotonic() > until_s:
                return None
            await asyncio.sleep(_LOOK_S)
        self._saw(front)
        self._is_stopping = False
        before, self._state.settings = self._state.settings, settings
        if before is not None and _kind(before) != _kind(settings):
            await asyncio.gather(*(self._end(name) for name in list(self._state.workers)))
        given = {model.name: model for model in models}
        others = {name: spec for name, spec in self._state.models.items() if name not in given}
        self._state.models = {**given, **others}
        self._save()
        self._start()
        return [*self._state.models.values()]

    async def set_url(self, url: str) -> None:
        """Hear where the server is."""
        self._state.url = url
        self._save()

    async def register(self, model: ModelSpec) -> None:
        """Register a model."""
        self._state.models[model.name] = model
        self._save()

    async def remove(self, name: str) -> None:
        """Remove a model."""
        self._state.models.pop(name, None)
        self._save()

    async def watch(self, front: str, version: int) -> View:
        """Return the workers once they are not those of a version, or after some time.

        A server that has not asked for long, so that another one uses the workers, gets none.

        Args:
            front: id of the server that asks.
            version: of what it has.
        """
        if self._is_replaced(front):
            await asyncio.sleep(_WATCH_S)
            return View(0, ())
        self._saw(front)
        self._start()
        if version == self._version:
            with suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_S):
                    await self._changed.wait()
        return view_of(self._state, self._version)

    async def left(self, name: str) -> None:
        """End a worker that was leaving, and that no request needs any more."""
        await self._end(name)

    async def stop(self, front: str) -> bool:
        """End all workers, and keep none until another server comes.

        Args:
            front: id of the server that stops.

        Returns: False if another server uses the workers; then nothing is done.
        """
        if self._is_replaced(front):
            return False
        self._is_stopping = True
        self._front_seen_s = -_FRONT_S
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        self._state.models, self._state.url = {}, ""
        await asyncio.gather(*(self._end(name) for name in list(self._state.workers)))
        if self._is_stopping:  # or a server has come meanwhile
            self._state = ClusterState(num_made=self._state.num_made)
        self._save()
        return True

    # ---- what an operator asks

    async def leave(self, node_id: str) -> None:
        """Have a node get no more workers, and return once it has none."""
        self._leaving.add(node_id)
        there = [each for each in self._state.workers.values() if each.node_id == node_id]
        for worker in there:
            worker.is_leaving = True
        self._note_change()
        with suppress(TimeoutError):
            settings = self._state.settings
            async with asyncio.timeout(LAST_S + (settings.drain_s if settings else 0.0)):
                while any(worker.name in self._state.workers for worker in there):
                    await self._changed.wait()
        for worker in there:
            await self._end(worker.name)

    async def status(self) -> dict[str, Any]:
        """Return what there is: nodes, workers, models."""
        self._start()
        self._nodes = await asyncio.to_thread(ray.nodes)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._nodes}
        return {
            "url": self._state.url,
            "settings": self._state.settings and asdict(self._state.settings),
            "models": {name: str(spec.path) for name, spec in self._state.models.items()},
            "nodes": [
                {
                    "id": node["NodeID"],
                    "address": node["NodeManagerAddress"],
                    "alive": node["Alive"],
                    "leaving": node["NodeID"] in self._leaving,
                    "capacity": self._capacity(node) if self._state.settings else 0,
                }
                for node in self._nodes
            ],
            "workers": [
                {
                    "name": worker.name,
                    "node": worker.node_id,
                    "host": addresses.get(worker.node_id, "?"),
                    "address": str(worker.address) if worker.address else None,
                    "leaving": worker.is_leaving,
                }
                for worker in self._state.workers.values()
            ],
        }

    async def pid(self) -> int:
        """The process id of the controller."""
        return os.getpid()

    # ---- keeping workers

    def _is_replaced(self, front: str) -> bool:
        """Whether another server uses the workers."""
        return front != self._front and time.monotonic() < self._front_seen_s + _FRONT_S

    def _saw(self, front: str) -> None:
        """A server asks, and will use the workers."""
        self._front, self._front_seen_s = front, time.monotonic()

    def _start(self) -> None:
        """Begin to keep workers, if that was wanted and has not begun."""
        if self._keeping is None and self._state.settings is not None and not self._is_stopping:
            found, self._found = self._found, []
            for name in found:
                if (worker := self._state.workers.get(name)) is not None:
                    self._run(worker, is_new=False)
            self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            try:
                self._nodes = await asyncio.to_thread(ray.nodes)
                await self._apply()
            except RayError as error:
                _logger.error("the nodes cannot be looked at: %s", error)
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()

    async def _apply(self) -> None:
        settings = self._state.settings
        assert settings is not None
        alive = [node for node in self._nodes if node["Alive"]]
        self._leaving &= {node["NodeID"] for node in alive}
        nodes = [
            Node(
                node["NodeID"],
                self._capacity(node),
                self._takes_more(node["NodeID"]),
                self._num_lost[node["NodeID"]],
            )
            for node in alive
        ]
        # Those that leave are replaced before they have left.
        workers = [
            Placement(each.name, each.node_id)
            for each in self._state.workers.values()
            if not each.is_leaving
        ]
        changes = decide(nodes, workers, settings.num_wanted)
        for name in changes.lost:
            _logger.error("the node of %s is gone", name)
            self._in_background(self._end(name))
        for name in changes.end:
            self._state.workers[name].is_leaving = True
            self._note_change()
        for node_id in changes.create:
            self._state.num_made += 1
            worker = WorkerRecord(f"worker-{self._state.num_made}", node_id)
            self._state.workers[worker.name] = worker
            self._save()
            self._run(worker, is_new=True)

    def _takes_more(self, node_id: str) -> bool:
        not_before_s = self._not_before_s.get(node_id, 0.0)
        return node_id not in self._leaving and time.monotonic() >= not_before_s

    def _capacity(self, node: dict[str, Any]) -> int:
        settings = self._state.settings
        assert settings is not None
        return capacity(
            node["Resources"],
            on_gpu=settings.on_gpu,
            num_devices=settings.num_devices,
            num_wanted=settings.num_wanted,
        )

    def _run(self, worker: WorkerRecord, *, is_new: bool) -> None:
        self._running[worker.name] = asyncio.create_task(self._live(worker, is_new=is_new))

    async def _live(self, worker: WorkerRecord, *, is_new: bool) -> None:
        """Make a worker, or find one that was made before, and wait until it has ended."""
        try:
            if is_new:
                async with asyncio.timeout(_START_S):
                    actor, worker.address = await self._make(worker)
                self._failures.pop(worker.node_id, None)
                self._note_change()
                _logger.info("%s is at %s", worker.name, worker.address)
            else:
                actor = await asyncio.to_thread(ray.get_actor, worker.name, NAMESPACE)
                if worker.address is None:
                    raise TimeoutError("it was not started when the controller was")
            exit_code = await actor.wait.remote()
            _logger.error("the agent of %s has ended (exit code %s)", worker.name, exit_code)
        except (RayError, TimeoutError, ValueError) as error:
            _logger.error("%s has ended: %s", worker.name, reason_of(error))
            if worker.address is None:
                self._failures[worker.node_id] = self._failures.get(worker.node_id, 0) + 1
                wait_s = pause_s(self._failures[worker.node_id])
                self._not_before_s[worker.node_id] = time.monotonic() + wait_s
        self._num_lost[worker.node_id] += 1
        self._running.pop(worker.name, None)
        await self._end(worker.name)

    async def _make(self, worker: WorkerRecord) -> tuple[Any, Any]:
        """Make the actor of a worker in a placement group on its node; returns its address too."""
        settings = self._state.settings
        assert settings is not None
        resources = bundle(on_gpu=settings.on_gpu, num_devices=settings.num_devices)
        group = placement_group(
            [resources],
            strategy="STRICT_PACK",
            name=worker.name,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": worker.node_id}],
        )
        await group.ready()
        (node,) = (node for node in self._nodes if node["NodeID"] == worker.node_id)
        actor = (
            ray.remote(Worker)
            .options(
                name=worker.name,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,  # another worker takes its place
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(
                "cuda:0" if settings.on_gpu else "cpu",
                max(self._capacity(node), 1),
                settings.log_level,
            )
        )
        return actor, await actor.start.remote()

    async def _end(self, name: str) -> None:
        """End a worker and give back its resources; it may be gone already.

        It is written down until it has ended, so that another process of the controller ends it.
        """
        worker = self._state.workers.get(name)
        if worker is None:
            return
        worker.address, worker.is_leaving = None, True
        if (task := self._running.pop(name, None)) is not None:
            task.cancel()
        self._note_change()
        self._wake.set()

        def end() -> None:
            with suppress(ValueError, RayError):
                actor = ray.get_actor(name, NAMESPACE)
                with suppress(RayError):
                    ray.get(actor.stop.remote(), timeout=6.0)
                ray.kill(actor)
            with suppress(ValueError, RayError):
                remove_placement_group(get_placement_group(name))

        await asyncio.to_thread(end)
        self._state.workers.pop(name, None)
        self._note_change()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _note_change(self) -> None:
        """Tell those that watch, and write it down."""
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        self._save()

    def _save(self) -> None:
        text = self._state.to_json().encode()
        _internal_kv_put(_KEY, text, overwrite=True, namespace=NAMESPACE)


def _kind(settings: Settings) -> tuple[Any, ...]:
    """What workers with other values cannot be used for."""
    return settings.on_gpu, settings.num_devices


def reason_of(error: Exception) -> str:
    """Why a call of an actor has failed, in one line."""
    if isinstance(error, RayTaskError):  # its own text begins with where the call ran
        error = error.cause
    return one_line(error)


def controller_actor() -> Any:
    """The handle of the controller, which is made if there is none. Pre-condition: `ray.init`."""
    make: Callable[..., Any] = ray.remote(Controller).options
    return make(
        name=CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=1000,
    ).remote()
