"""An engine process that an agent starts, reached by TCP; no Ray."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama
from tests.serve.fake_server import open_fake
from tests.serve.running import ROOT, eventually, is_running
from tests.serve.test_engines import settle

from aquifer.cluster import tcp
from aquifer.cluster.agent import Agent, AgentOptions
from aquifer.cluster.clocks import on_our_clock, on_their_clock
from aquifer.cluster.link import RemoteLink
from aquifer.cluster.messages import GetClock
from aquifer.cluster.token import read_token, write_token
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.outputs import RequestTiming, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.policies.placement import DeviceReport, ModelReport
from aquifer.engine.reports import EngineStats, MemoryReport
from aquifer.errors import ConfigError
from aquifer.serve.engines import Engines
from aquifer.serve.link import EngineLink, EngineProcess
from aquifer.serve.messages import Add, Outputs, Ready, Step
from aquifer.weights import peer_socket

TOKEN = "a token of some length"
HOST = "127.0.0.1"


@pytest.fixture
def address() -> Iterator[tcp.Address]:
    """Address of an agent that starts engines without a model."""
    agent = Agent(AgentOptions(HOST, TOKEN, "cpu"), open_fake)
    yield tcp.Address(HOST, agent.start())
    agent.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    return EngineConfig((ModelSpec("fake", path),))


def test_connections_that_are_reset_at_once(address: tcp.Address) -> None:
    """As port scanners and health checks do; each gives back its place among those that open."""
    for _ in range(3 * 16):
        connection = socket.create_connection((address.host, address.port))
        # Closed with a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def connects() -> bool:
        with suppress(tcp.RefusedError, OSError), tcp.connect(address, TOKEN):
            return True
        return False

    eventually(connects, "one with the token gets through")


class Server:
    """Engines that are reached by TCP."""

    def __init__(self) -> None:
        self.engines = Engines("affinity", self)
        self.running: set[int] = set()
        self.ended: list[int] = []
        self.refused: dict[int, str] = {}

    def send(self, request_id: str, number: int, prompt: list[int], num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens)
        request = Request(request_id, "fake", prompt, params, time.monotonic())
        self.engines.send(Add(request, number))

    def deliver(self, outputs: Outputs) -> None:
        self.running.update(outputs.numbers)
        self.ended += [number for number, output in outputs.others if output.finish_reason]
        self.refused |= {number: str(error) for number, error in outputs.refused.items()}

    def launched(self, model: str, num_tokens: int) -> None:
        """It is not looked at."""

    def changed(self) -> None:
        """It is not looked at."""

    def open(self, name: str, config: EngineConfig, address: tcp.Address) -> None:
        def new_link(config: EngineConfig) -> EngineLink:
            return RemoteLink(config, address, TOKEN, "warning")

        self.engines.add(name, config, new_link, insists=True)

    async def until(self, *numbers: int) -> None:
        """Wait until completions have ended."""
        while not {*numbers} <= {*self.ended, *self.refused}:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.engines.refuse()
        await self.engines.stop()


def _engine_process() -> int:
    """The process that this one has started last."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    spawned = [
        int(process)
        for task in children.parent.parent.glob("*/children")
        for process in task.read_text().split()
        if "spawn_main" in Path(f"/proc/{process}/cmdline").read_text()
    ]
    return max(spawned)


def test_requests_go_through_it_and_a_process_that_died_is_replaced(
    config: EngineConfig, address: tcp.Address, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        server = Server()
        server.open("w1", config, address)
        assert list(await server.engines.ready(lambda _: None)) == ["fake"]
        server.send("r0", 0, [5, 6, 7], 20)
        await server.until(0)
        server.send("r1", 1, [5, 6, 7], 10**6)
        first = _engine_process()
        while 1 not in server.running:
            await asyncio.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        await server.until(1)
        assert "died before the request finished" in server.refused[1]
        while server.engines.availability.reason is not None:
            await asyncio.sleep(0.01)
        assert _engine_process() != first
        server.send("r2", 2, [5, 6, 7], 20)
        await server.until(2)
        await server.close()
        assert server.ended == [0, 2]

    asyncio.run(test())
    assert "of w1 died (exit code -9) while it computed 'fake'" in caplog.text


def test_weights_are_shared_within_a_node_only(
    config: EngineConfig, address: tcp.Address, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        server = Server()
        server.open("w1", replace(config, peer_weights=True), address)
        await server.engines.ready(lambda _: None)
        await server.close()

    asyncio.run(test())
    assert "peer_weights has no effect here" in caplog.text


def test_an_agent_that_is_gone(config: EngineConfig) -> None:
    """The engine's requests end, and so do its process and attempts to reach it."""
    agent = Agent(AgentOptions(HOST, TOKEN, "cpu"), open_fake)
    address = tcp.Address(HOST, agent.start())

    async def test() -> None:
        server = Server()
        server.open("w1", config, address)
        await server.engines.ready(lambda _: None)
        engine = _engine_process()
        server.send("r", 0, [5, 6, 7], 10**6)
        await asyncio.to_thread(agent.close)
        await server.until(0)
        assert not is_running(engine)
        while server.engines.num_restarts < 2:  # once it is dead, and once it is not reached
            await asyncio.sleep(0.01)
        reason = server.engines.availability.reason
        assert reason is not None
        assert "is being started again" in reason.message
        await server.engines.remove("w1")
        await settle()
        assert server.engines.names == []

    asyncio.run(test())


@pytest.mark.parametrize("is_on", [True, False])
def test_workers_of_a_node_share_weights(tmp_path: Path, is_on: bool) -> None:
    """Those of one that comes later are copied from the first one, unless that is off."""
    spec = ModelSpec("tiny", tiny_llama(tmp_path / "tiny"))
    peer_weights = None if is_on else False
    config = EngineConfig((spec,), memory_bytes=64 << 20, peer_weights=peer_weights)
    cluster = os.urandom(16).hex()
    options = AgentOptions(HOST, TOKEN, "cpu", num_on_node=2, cluster=cluster)
    agents = [Agent(options) for _ in range(2)]

    async def test() -> MemoryReport:
        server = Server()
        for number, agent in enumerate(agents):
            server.open(f"w{number}", config, tcp.Address(HOST, agent.start()))
            await server.engines.ready(lambda _: None)
        memory = await server.engines.memory()
        await server.close()
        return memory

    try:
        memory = asyncio.run(test())
    finally:
        for agent in agents:
            agent.close()
    assert not options.neighbours.exists()
    num_bytes = memory.models["tiny"].status.weight_bytes
    loaded = [memory.loaded_bytes.get(("tiny", source), 0) for source in ("disk", "neighbour")]
    assert loaded == ([num_bytes, num_bytes] if is_on else [2 * num_bytes, 0])


def test_who_does_not_know_the_token_gets_nothing(address: tcp.Address) -> None:
    with pytest.raises(tcp.RefusedError, match="another token"):
        tcp.connect(address, "another token than that")
    with tcp.connect(address, TOKEN) as connection:
        connection.send(GetClock())
        assert connection.recv().now_s <= time.monotonic()
    for sent in (b"GET / HTTP/1.1\r\n\r\n" * 100, b"\0\0\0\4abcd" * 9, b""):
        with socket.create_connection((address.host, address.port), 30) as opened:
            with suppress(OSError):  # it was closed already
                opened.sendall(sent)
                opened.shutdown(socket.SHUT_WR)
            received = b""
            while part := _received(opened):
                received += part
        # A challenge, and what says that the answer was wrong; never a message.
        assert len(received) < 200
        assert b"Clock" not in received


def test_a_server_that_ends_leaves_the_engine_of_another_one_alone(
    config: EngineConfig, address: tcp.Address
) -> None:
    """One that has taken its place, as it could not be reached for a while."""

    async def test() -> None:
        old, new = Server(), Server()
        old.open("w1", config, address)
        await old.engines.ready(lambda _: None)
        old.engines.refuse()  # it starts no other one
        new.open("w1", config, address)
        await new.engines.ready(lambda _: None)
        process = _engine_process()
        await old.engines.stop()
        assert _engine_process() == process
        new.send("r0", 0, [5, 6], 3)
        await new.until(0)
        assert (new.ended, new.refused) == ([0], {})
        await new.close()

    asyncio.run(test())


class Failing:
    """A method that fails the first time as it does where the system is short of resources."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.has_failed = False

    def __call__(self, *arguments: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return self._method(*arguments)


def test_an_agent_that_cannot_start_a_process_can_do_so_later(
    config: EngineConfig, address: tcp.Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(EngineProcess.start)
    monkeypatch.setattr(EngineProcess, "start", lambda self: failing(self))

    async def test() -> None:
        server = Server()
        server.open("w1", config, address)
        await server.engines.ready(lambda _: None)
        assert failing.has_failed
        server.send("r0", 0, [5, 6], 3)
        await server.until(0)
        assert server.ended == [0]
        await server.close()

    asyncio.run(asyncio.wait_for(test(), 30.0))


def test_an_agent_that_cannot_accept_a_connection_accepts_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen = tcp.listen

    class Listener:
        """A socket that cannot accept the first connection."""

        def __init__(self, host: str) -> None:
            self._socket = listen(host)
            self.accept = Failing(self._socket.accept)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._socket, name)

    monkeypatch.setattr(tcp, "listen", Listener)
    agent = Agent(AgentOptions(HOST, TOKEN, "cpu"), open_fake)
    address = tcp.Address(HOST, agent.start())
    try:
        with tcp.connect(address, TOKEN) as connection:
            connection.send(GetClock())
            assert connection.poll(30)
    finally:
        agent.close()


def test_an_agent_removes_what_a_cluster_that_was_killed_has_left(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets of its engines, and their folder; not those of a cluster that runs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("t")))
    killed, running = (
        AgentOptions(HOST, TOKEN, "cpu", cluster=name).neighbours for name in ("killed", "running")
    )
    left, _ = peer_socket.listen(killed)
    left.close()
    listener, path = peer_socket.listen(running)
    with listener:
        agent = Agent(AgentOptions(HOST, TOKEN, "cpu", cluster="new"), open_fake)
        agent.start()
        agent.close()
        assert not killed.exists()
        assert list(peer_socket.paths_in(running)) == [path]


def _received(opened: socket.socket) -> bytes:
    try:
        return opened.recv(1000)
    except ConnectionResetError:
        return b""


def test_an_impostor_gets_no_messages() -> None:
    """A server that does not know the token is found out, although it accepts every answer."""
    with tcp.listen(HOST) as listener:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import socket, sys, time\n"
                f"s = socket.create_connection(('{HOST}', {port}))\n"
                "print(s.recv(100))\n"
                "s.sendall(b'\\0\\0\\0\\5wrong')\n"
                "print(s.recv(100))",
            ],
            stdout=subprocess.PIPE,
        )
        with pytest.raises(tcp.RefusedError, match="token"):
            tcp.accept(listener.accept()[0], TOKEN)
        process.communicate()


def test_an_agent_that_does_not_answer_is_not_said_to_have_another_token() -> None:
    """One that is too busy, or has too many connections."""
    with tcp.listen(HOST) as listener:
        closing = threading.Thread(target=lambda: listener.accept()[0].close())
        closing.start()
        with pytest.raises(tcp.RefusedError, match="does not answer"):
            tcp.connect(tcp.Address(HOST, listener.getsockname()[1]), TOKEN)
        closing.join()


def test_it_listens_on_the_given_address_only(address: tcp.Address) -> None:
    with pytest.raises(tcp.RefusedError, match="does not answer"):
        tcp.connect(tcp.Address("127.0.0.2", address.port), TOKEN)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        Agent(AgentOptions("192.0.2.1", TOKEN, "cpu")).start()


def test_an_agent_ends_with_the_process_that_started_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    agent = subprocess.Popen(
        [sys.executable, "-m", "aquifer.cluster.agent"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    print(AgentOptions(HOST, TOKEN, "cpu").to_json(), file=agent.stdin, flush=True)
    port = int(agent.stdout.readline())
    with tcp.connect(tcp.Address(HOST, port), TOKEN):
        agent.stdin.close()
        assert agent.wait(60) == 0
    eventually(lambda: not is_running(agent.pid), "it has ended")
    agent.stdout.close()


def test_times_are_moved_between_clocks() -> None:
    offset_s = 1000.0
    request = Request("r", "m", [1], SamplingParams(), 5.0)
    sent = on_their_clock(Add(request, 0), offset_s)
    assert sent == Add(replace(request, arrival_s=1005.0), 0)

    def report(oldest_s: float | None, loaded_s: float | None) -> DeviceReport:
        return DeviceReport({"m": ModelReport(1, oldest_s=oldest_s)}, 1, 1, loaded_s)

    stats = EngineStats({}, {}, {}, 0.0, {}, {})
    assert on_our_clock(Ready({}, stats, report(1005.0, None)), offset_s) == Ready(
        {}, stats, report(5.0, None)
    )
    output = TokenOutput("r", finish_reason="stop", timing=RequestTiming(1005.0, 1006.0, 1007.0))
    step = Step(Outputs(others=[(0, output)]), stats, report=report(None, 1008.0))
    moved = on_our_clock(step, offset_s)
    assert isinstance(moved, Step)
    assert moved.report == report(None, 8.0)
    assert output.timing == RequestTiming(5.0, 6.0, 7.0, None)


def test_tokens_in_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_token(file)
    assert len(read_token(file)) == 64
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(tmp_path / "none")
    for text in ("", "short", "a token of some length\nand more", "ü" * 30):
        file.write_text(text)
        with pytest.raises(ConfigError, match="at least 16 printable ASCII"):
            read_token(file)
