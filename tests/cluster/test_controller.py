"""The controller with a played Ray: what outlives a stop, and a process of the controller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError
from tests.serve.test_engines import settle, until

from aquifer.cluster import client, controller
from aquifer.cluster.client import ControllerClient
from aquifer.cluster.controller import Controller
from aquifer.cluster.state import Settings, View
from aquifer.cluster.tcp import Address
from aquifer.config import ModelSpec
from aquifer.errors import ConfigError

NODE = {
    "NodeID": "node",
    "NodeManagerAddress": "127.0.0.1",
    "Alive": True,
    "Resources": {"CPU": 4.0, "GPU": 4.0},
}
SETTINGS = Settings(num_wanted=2)
WAIT_S = 30.0
LONG_S = 1000.0  # a server that has not asked for it is gone


class Method:
    """A method of an actor, to be called with `remote`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


async def started() -> Address:
    return Address("127.0.0.1", 1)


class WorkerActor:
    """The actor of a worker, which runs until it is killed."""

    def __init__(self, start: Callable[[], Awaitable[Address]]) -> None:
        self.start = Method(start)
        self.wait = Method(lambda: asyncio.Event().wait())
        self.stop = Method(lambda: None)


class Group:
    """A placement group."""

    async def ready(self) -> None:
        """It has its resources at once."""


class Ray:
    """The calls of Ray that the controller makes.

    Attributes:
        saved: what is in Ray's own store.
        actors: of the workers, by name.
        num_gpus: of each worker that was ever made, by name.
        start: starts a worker.
        may_stop: whether workers that are asked to stop do so; until then they are waited for.
    """

    def __init__(self) -> None:
        self.saved: bytes | None = None
        self.actors: dict[str, WorkerActor] = {}
        self.num_gpus: dict[str, int] = {}
        self.start: Callable[[], Awaitable[Address]] = started
        self.may_stop = threading.Event()
        self.may_stop.set()
        self._name = ""

    def nodes(self) -> list[dict[str, Any]]:
        return [NODE]

    def get_actor(self, name: str, _: str) -> WorkerActor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def get(self, _: object, timeout: float) -> None:
        assert self.may_stop.wait(timeout + 30.0)

    def kill(self, actor: WorkerActor) -> None:
        self.actors = {name: each for name, each in self.actors.items() if each is not actor}

    def remote(self, _: type) -> Ray:
        return self

    def options(self, *, name: str, num_gpus: int, **_: object) -> Method:
        def make(*_: object) -> WorkerActor:
            assert name not in self.actors
            self.num_gpus[name] = num_gpus
            self.actors[name] = WorkerActor(self.start)
            return self.actors[name]

        return Method(make)

    def save(self, _: bytes, value: bytes, *, overwrite: bool, namespace: str) -> None:
        assert overwrite
        self.saved = value


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    played = Ray()
    monkeypatch.setattr(controller, "ray", played)
    monkeypatch.setattr(controller, "_internal_kv_get", lambda _, namespace: played.saved)
    monkeypatch.setattr(controller, "_internal_kv_put", played.save)
    monkeypatch.setattr(controller, "placement_group", lambda *_, **__: Group())
    monkeypatch.setattr(controller, "get_placement_group", lambda _: None)
    monkeypatch.setattr(controller, "remove_placement_group", lambda _: None)
    return played


class Clock:
    """A clock that is ahead."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


async def until_whole(keeper: Controller, front: str) -> View:
    """Wait until a server sees all workers that it wants."""
    view = View(0, ())
    while len(view.workers) < SETTINGS.num_wanted:
        view = await keeper.watch(front, view.version)
    return view


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_S))


def spec(name: str) -> ModelSpec:
    return ModelSpec(name, Path(name))


def test_a_controller_that_was_stopped_makes_workers_for_the_next_server(ray: Ray) -> None:
    async def test() -> None:
        keeper = Controller()
        assert await keeper.configure("first", SETTINGS, [spec("a")]) == [spec("a")]
        await until_whole(keeper, "first")
        assert await keeper.stop("first")
        assert ray.actors == {}
        assert (await keeper.status())["workers"] == []
        assert await keeper.configure("second", SETTINGS, [spec("b")]) == [spec("b")]
        await until_whole(keeper, "second")
        assert len(ray.actors) == 2
        await keeper.stop("second")

    run(test())


def test_a_server_that_comes_while_the_workers_of_another_one_end(ray: Ray) -> None:
    async def test() -> None:
        keeper = Controller()
        await keeper.configure("first", SETTINGS, [spec("a")])
        await until_whole(keeper, "first")
        old = {*ray.actors}
        ray.may_stop.clear()
        stopping = asyncio.create_task(keeper.stop("first"))
        await settle()
        assert await keeper.configure("second", SETTINGS, [spec("b")]) == [spec("b")]
        view = await until_whole(keeper, "second")
        assert not {worker.name for worker in view.workers} & old
        ray.may_stop.set()
        await stopping
        assert {*ray.actors} == {worker.name for worker in view.workers}
        status = await keeper.status()
        assert list(status["models"]) == ["b"]
        assert {worker["name"] for worker in status["workers"]} == {*ray.actors}
        await keeper.stop("second")

    run(test())


def test_workers_of_another_kind_are_replaced(ray: Ray) -> None:
    """While they end, none of that kind is made in place of them."""

    async def test() -> None:
        keeper = Controller()
        await keeper.configure("server", SETTINGS, [])
        await until_whole(keeper, "server")
        old = {*ray.actors}
        ray.may_stop.clear()
        on_gpu = replace(SETTINGS, on_gpu=True)
        configuring = asyncio.create_task(keeper.configure("server", on_gpu, []))
        await until(lambda: len(ray.num_gpus) > 2)
        ray.may_stop.set()
        await configuring
        view = await until_whole(keeper, "server")
        assert [ray.num_gpus[worker.name] for worker in view.workers] == [1, 1]
        assert {*ray.num_gpus} - old == {worker.name for worker in view.workers}
        await keeper.stop("server")

    run(test())


def test_a_controller_that_dies_while_a_worker_ends(ray: Ray) -> None:
    """The next process of it ends the worker, which has the devices until then."""

    async def test() -> None:
        dead = Controller()
        await dead.configure("server", SETTINGS, [])
        view = await until_whole(dead, "server")
        first = view.workers[0].name
        ray.may_stop.clear()
        ending = asyncio.create_task(dead.left(first))
        view = await dead.watch("server", view.version)
        assert first not in {worker.name for worker in view.workers}
        saved = ray.saved
        ray.may_stop.set()
        await ending
        await dead.stop("server")

        ray.saved = saved  # as it was when the first process died
        ray.actors = {first: WorkerActor(started)}
        keeper = Controller()
        await keeper.watch("server", 0)
        await until(lambda: first not in ray.actors)
        await keeper.stop("server")

    run(test())


def test_a_server_that_comes_back_when_another_one_has_taken_its_place(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no workers and ends none: an agent would start engines for both in turns."""

    async def test() -> None:
        keeper = Controller()
        await keeper.configure("old", SETTINGS, [])
        await until_whole(keeper, "old")
        clock = Clock()
        monkeypatch.setattr(controller, "time", clock)
        clock.ahead_s += LONG_S
        await keeper.configure("new", SETTINGS, [])
        assert (await keeper.watch("old", 0)).workers == ()
        assert not await keeper.stop("old")
        assert len((await until_whole(keeper, "new")).workers) == len(ray.actors) == 2
        clock.ahead_s += LONG_S
        assert len((await keeper.watch("old", 0)).workers) == 2  # the new one is gone
        await keeper.stop("old")

    run(test())


def test_why_a_worker_cannot_start_is_logged(ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    """Ray puts the place where a call ran before the text of its error, which is left out here."""
    error = ConfigError("Ray was started without a token")

    async def start() -> Address:
        where = "ray::Worker.start() (pid=1)"
        raise RayTaskError("start", f"{where}\n{error}", error).as_instanceof_cause()

    async def test() -> None:
        ray.start = start
        keeper = Controller()
        await keeper.configure("server", SETTINGS, [])
        await until(
            lambda: "has ended: ConfigError: Ray was started without a token" in caplog.text
        )
        await keeper.stop("server")

    run(test())


def test_the_controller_ends_though_its_workers_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would be there, and stopped, when the next server comes."""
    killed: list[object] = []

    class Played:
        """Ray, whose actors do not answer in time."""

        def get(self, _: object, timeout: float) -> None:
            raise GetTimeoutError(f"not within {timeout} s")

        def kill(self, actor: object, *, no_restart: bool) -> None:
            assert no_restart
            killed.append(actor)

    class Actor:
        stop = Method(lambda _: None)

    actor = Actor()
    monkeypatch.setattr(client, "ray", Played())
    monkeypatch.setattr(client, "controller_actor", lambda: actor)
    ControllerClient().end("server", timeout_s=0.0)
    assert killed == [actor]


def test_a_node_that_leaves_waits_as_long_as_requests_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its devices would be gone otherwise while they still run."""
    waited: dict[str, float] = {}

    class Played:
        """Ray, whose actor answers with the name of the method."""

        def get(self, method: str, timeout: float) -> object:
            waited[method] = timeout
            return {"settings": {"drain_s": 3600.0}}

    class Actor:
        status = Method(lambda: "status")
        leave = Method(lambda _: "leave")

    monkeypatch.setattr(client, "ray", Played())
    monkeypatch.setattr(client, "controller_actor", Actor)
    ControllerClient().leave("node")
    assert waited["leave"] > 3600.0 + controller.LAST_S
