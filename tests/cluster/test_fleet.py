"""Engines of workers that come and go as a controller says, which the test plays; no Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama
from tests.cluster.test_link import HOST, TOKEN, Server
from tests.serve.fake_server import open_fake, open_one_at_a_time

from aquifer.cluster.agent import Agent, AgentOptions
from aquifer.cluster.fleet import ClusterFleet
from aquifer.cluster.state import View, WorkerView
from aquifer.cluster.tcp import Address
from aquifer.config import EngineConfig, ModelSpec
from aquifer.errors import ConfigError, UnavailableError
from aquifer.serve.messages import Abort


class Controller:
    """Plays the controller: `show` says which workers there are."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = False
        self._view = View(1, ())
        self._shown = asyncio.Event()

    def show(self, *workers: WorkerView) -> None:
        self._view = View(self._view.version + 1, workers)
        self._shown.set()

    async def call(self, method: str, *args: Any, patience_s: float = 10.0) -> Any:
        if self.fails:
            raise UnavailableError("the cluster's controller does not answer")
        if method == "watch":
            assert args[0] == "front"
            while args[1] == self._view.version:
                self._shown.clear()
                await self._shown.wait()
            return self._view
        self.calls.append((method, *args))
        return None


def _worker(name: str, address: Address, *, is_leaving: bool = False) -> WorkerView:
    return WorkerView(name, address, is_leaving)


def test_workers_come_leave_and_are_lost(tmp_path: Path) -> None:
    config = EngineConfig((ModelSpec("fake", tiny_llama(tmp_path / "tiny")),))
    agents = [Agent(AgentOptions(HOST, TOKEN, "cpu"), open_fake) for _ in range(2)]
    first, second = (Address(HOST, agent.start()) for agent in agents)

    async def test() -> None:
        controller = Controller()
        fleet = ClusterFleet(config, controller, "front", TOKEN, "warning", 60)
        server = Server()
        fleet.start(server.engines)
        ready = asyncio.create_task(fleet.ready(lambda _: None))
        server.send("early", 0, [5, 6], 3)
        assert server.refused[0] == "no worker serves at the moment"
        controller.show(_worker("w1", first))
        assert list(await ready) == ["fake"]
        server.send("r1", 1, [5, 6], 400)
        while 1 not in server.running:
            await asyncio.sleep(0.01)
        controller.show(_worker("w1", first), _worker("w2", second))
        while len([engine for engine in server.engines.names if engine]) < 2:
            await asyncio.sleep(0.01)
        controller.show(_worker("w1", first, is_leaving=True), _worker("w2", second))
        while ("left", "w1") not in controller.calls:
            await asyncio.sleep(0.01)
        assert server.ended == [1]  # it was waited for
        assert server.engines.names == ["w2"]
        controller.show(_worker("w2", second))
        while server.engines.availability.reason is not None:  # it starts
            await asyncio.sleep(0.01)
        server.send("r2", 2, [5, 6], 3)
        await server.until(2)
        assert server.ended == [1, 2]
        controller.show()
        while server.engines.names:
            await asyncio.sleep(0.01)
        server.send("late", 3, [5, 6], 3)
        assert server.refused[3] == "no worker serves at the moment"
        server.engines.refuse()
        controller.show(_worker("w3", first))
        await asyncio.sleep(0.05)
        assert server.engines.names == []
        await fleet.stop()
        await server.engines.stop()

    asyncio.run(test())
    for agent in agents:
        agent.close()


def test_a_worker_that_leaves_serves_until_the_next_one_does(tmp_path: Path) -> None:
    config = EngineConfig((ModelSpec("fake", tiny_llama(tmp_path / "tiny")),))
    agents = [Agent(AgentOptions(HOST, TOKEN, "cpu"), open_fake) for _ in range(2)]
    first, second = (Address(HOST, agent.start()) for agent in agents)

    async def test() -> None:
        controller = Controller()
        fleet = ClusterFleet(config, controller, "front", TOKEN, "warning", 600)
        server = Server()
        fleet.start(server.engines)
        controller.show(_worker("w1", first))
        await fleet.ready(lambda _: None)
        try:
            controller.show(_worker("w1", first, is_leaving=True))
            await asyncio.sleep(0.05)
            server.send("r1", 1, [5, 6], 3)
            await server.until(1)
            controller.show(_worker("w1", first, is_leaving=True), _worker("w2", second))
            number = 1
            while ("left", "w1") not in controller.calls:
                number += 1
                server.send(f"r{number}", number, [5, 6], 3)
                await server.until(number)
                assert server.refused == {}
            assert server.ended == [*range(1, number + 1)]
            assert server.engines.names == ["w2"]
        finally:
            await server.close()
            await fleet.stop()

    try:
        asyncio.run(test())
    finally:
        for agent in agents:
            agent.close()


def test_requests_that_wait_go_to_a_worker_that_comes(tmp_path: Path) -> None:
    """Each runs once: on the first worker or, half of them, on the second one."""
    config = EngineConfig((ModelSpec("fake", tiny_llama(tmp_path / "tiny")),))
    agents = [Agent(AgentOptions(HOST, TOKEN, "cpu"), open_one_at_a_time) for _ in range(2)]
    first, second = (Address(HOST, agent.start()) for agent in agents)

    async def test() -> None:
        controller = Controller()
        fleet = ClusterFleet(config, controller, "front", TOKEN, "warning", 60)
        server = Server()
        fleet.start(server.engines)
        controller.show(_worker("w1", first))
        await fleet.ready(lambda _: None)
        server.send("long", 0, [5, 6], 10**6)
        for number in range(1, 7):
            server.send(f"r{number}", number, [5, 6], 50)
        controller.show(_worker("w1", first), _worker("w2", second))
        await server.until(*range(1, 7))
        assert sorted(server.ended) == [*range(1, 7)]
        server.engines.send(Abort("long"))
        await server.close()
        await fleet.stop()

    asyncio.run(test())
    for agent in agents:
        agent.close()


def test_registrations_go_to_the_controller_first() -> None:
    async def test() -> None:
        controller = Controller()
        fleet = ClusterFleet(EngineConfig(()), controller, "front", TOKEN, "warning", 60)
        spec = ModelSpec("m", Path("/m"))
        await fleet.registered(spec)
        await fleet.removed("m")
        assert controller.calls == [("register", spec), ("remove", "m")]
        controller.fails = True
        with pytest.raises(UnavailableError, match="does not answer"):
            await fleet.registered(spec)

    asyncio.run(test())


def test_a_checkpoint_that_no_worker_can_load_ends_the_start(tmp_path: Path) -> None:
    config = EngineConfig((ModelSpec("fake", tmp_path),))
    agent = Agent(AgentOptions(HOST, TOKEN, "cpu"), open_nothing)
    address = Address(HOST, agent.start())

    async def test() -> None:
        controller = Controller()
        fleet = ClusterFleet(config, controller, "front", TOKEN, "error", 60)
        server = Server()
        fleet.start(server.engines)
        controller.show(_worker("w1", address))
        with pytest.raises(ConfigError, match="no such checkpoint"):
            await fleet.ready(lambda _: None)
        await server.close()
        await fleet.stop()

    asyncio.run(test())
    agent.close()


def open_nothing(*_: object) -> Any:
    """Takes the place of `Engine.open`."""
    raise ConfigError("no such checkpoint")
