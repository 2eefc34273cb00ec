"""Several processes that serve HTTP in front of one engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.serve.running import RunningServer, drain, eventually, is_running, running

COMPLETIONS, PREFIXES = "/v1/completions", "/v1/prefixes"
NUM_PROCESSES = 3
FEW_PROCESSES = 2
"""Web processes of servers in which a test ends one of them."""


def _command(checkpoint: Path, num_processes: int) -> list[str]:
    processes = ["--processes", str(num_processes)]
    return ["-m", "tests.serve.fake_server", str(checkpoint), "0", *processes]


@pytest.fixture(scope="module")
def lasting_server(checkpoint: Path) -> Iterator[RunningServer]:
    """A server for tests that do not end any of its processes."""
    with running(_command(checkpoint, NUM_PROCESSES)) as server:
        yield server
    assert server.process.returncode == 0
    assert server.problems == ""


@pytest.fixture
def server(checkpoint: Path) -> Iterator[RunningServer]:
    with running(_command(checkpoint, FEW_PROCESSES)) as server:
        yield server


def _web_processes(server: RunningServer) -> list[int]:
    """Process ids, in the order of their start; the engine was not started again."""
    return server.spawned()[1:]


@contextmanager
def _only(process: int, server: RunningServer) -> Iterator[None]:
    """All other web processes are stopped, so that this one accepts the next connection."""
    others = [other for other in _web_processes(server) if other != process]
    for other in others:
        os.kill(other, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            os.kill(other, signal.SIGCONT)


def _a_stream_each(server: RunningServer) -> dict[int, openai.Stream[Any]]:
    """A stream from each web process, by process id."""
    streams = {}
    for process in _web_processes(server):
        with _only(process, server):
            streams[process] = server.stream("x")
    return streams


def _finished(server: RunningServer) -> dict[str, float]:
    """Completions that have finished, by reason."""
    _, text, _ = server.call("GET", "/metrics")
    name = 'aquifer:request_success_total{finished_reason="'
    lines = [line.removeprefix(name) for line in text.splitlines() if line.startswith(name)]
    return {line.partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_each_process_answers_and_all_count_together(lasting_server: RunningServer):
    before = _finished(lasting_server)["length"]
    for process in _web_processes(lasting_server):
        with _only(process, lasting_server):
            body = {"prompt": "x", "n": 2, "max_tokens": 4}
            status, answer, _ = lasting_server.call("POST", COMPLETIONS, body)
        assert status == 200
        assert [choice["text"] for choice in answer["choices"]] == ["aaaa", "bbb"]
    for _ in range(NUM_PROCESSES):
        assert _finished(lasting_server)["length"] == before + 2 * NUM_PROCESSES


def test_errors_of_the_engine_reach_the_client(lasting_server: RunningServer):
    for process in _web_processes(lasting_server):
        with _only(process, lasting_server):
            assert lasting_server.call("POST", COMPLETIONS, {"prompt": "refuse"})[0] == 429
            status, answer, _ = lasting_server.call("POST", COMPLETIONS, {"prompt": "lose"})
        assert status == 503
        assert answer["error"]["message"] == "lost on purpose"


def test_prefixes_are_the_same_for_all(lasting_server: RunningServer):
    first, second, third = _web_processes(lasting_server)
    with _only(first, lasting_server):
        status, pinned, _ = lasting_server.call("POST", PREFIXES, {"prompt": "a long prefix"})
        assert status == 200
        status, answer, _ = lasting_server.call("POST", PREFIXES, {"prompt": "huge"})
        assert status == 400
        assert answer["error"]["message"] == "that is too much to keep"
    with _only(second, lasting_server):
        assert lasting_server.call("POST", PREFIXES, {"prompt": "a long prefix"})[1] == pinned
        assert lasting_server.call("GET", PREFIXES)[1]["data"] == [pinned]
    with _only(third, lasting_server):
        assert lasting_server.call("DELETE", f"{PREFIXES}/{pinned['id']}")[0] == 200
    with _only(first, lasting_server):
        assert lasting_server.call("GET", PREFIXES)[1]["data"] == []
        assert lasting_server.call("DELETE", f"{PREFIXES}/{pinned['id']}")[0] == 404


def test_a_client_that_leaves_aborts_its_request(lasting_server: RunningServer):
    streams = _a_stream_each(lasting_server)
    assert len(streams) == NUM_PROCESSES
    assert lasting_server.memory_in_use()["running"] == NUM_PROCESSES
    for stream in streams.values():
        stream.close()
    eventually(lambda: lasting_server.memory_in_use()["running"] == 0, "all are aborted")


def test_a_process_that_is_killed_takes_its_own_requests_only(server: RunningServer):
    """Its requests are aborted, what it has counted stays, and another process is started."""
    assert server.call("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 4})[0] == 200
    assert _finished(server)["length"] == 1
    streams = _a_stream_each(server)
    assert len(streams) == FEW_PROCESSES
    killed = next(iter(streams))
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(openai.APIConnectionError):
        drain(streams.pop(killed))
    eventually(lambda: server.memory_in_use()["running"] == len(streams), "its request is aborted")
    assert _finished(server)["length"] == 1
    for stream in streams.values():
        next(stream)
        stream.close()
    eventually(lambda: len(_web_processes(server)) == FEW_PROCESSES, "another one is started")
    assert not is_running(killed)
    with _only(_web_processes(server)[-1], server):
        server.wait_healthy()
        eventually(lambda: server.call("GET", PREFIXES)[0] == 200, "it has loaded")
        assert server.call("POST", COMPLETIONS, {"prompt": "x"})[0] == 200
    assert server.stop() == 0
    assert "a web process died (exit code -9), and its connections with it" in server.stderr


def test_an_engine_that_is_killed(server: RunningServer):
    """Requests of all processes get an error, and all serve again with the engine."""
    web = _web_processes(server)
    assert server.call("POST", PREFIXES, {"prompt": "a long prefix"})[0] == 200
    streams = _a_stream_each(server)
    assert len(streams) == FEW_PROCESSES
    os.kill(server.engine_process(), signal.SIGKILL)
    for stream in streams.values():
        with pytest.raises(openai.APIError, match="the engine process died"):
            drain(stream)
    server.wait_healthy()
    for process in web:
        others = set(web) - {process}
        for other in others:
            os.kill(other, signal.SIGSTOP)
        server.wait_healthy()
        _, answer, _ = server.call("POST", COMPLETIONS, {"prompt": "a long prefix"})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        for other in others:
            os.kill(other, signal.SIGCONT)
    assert server.stop() == 0


def test_streams_of_all_processes_end_when_the_server_stops(server: RunningServer):
    streams = _a_stream_each(server)
    assert len(streams) == FEW_PROCESSES
    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    for stream in streams.values():
        with pytest.raises(openai.APIError, match="shut down before the request finished"):
            drain(stream)
    assert server.wait() == 0
    assert server.problems == ""
    eventually(lambda: not any(map(is_running, children)), "all processes are gone")


def test_all_processes_end_with_the_first(server: RunningServer):
    children = server.children()
    for process in _web_processes(server):  # as Ctrl-C in a terminal does
        os.kill(process, signal.SIGINT)
    assert server.call("POST", COMPLETIONS, {"prompt": "x"})[0] == 200
    server.process.kill()
    server.wait()
    eventually(lambda: not any(map(is_running, children)), "all processes are gone")


def test_a_tokenizer_that_cannot_be_loaded_ends_the_start(tmp_path: Path, checkpoint: Path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    server = RunningServer(_command(tmp_path, FEW_PROCESSES))
    assert server.wait() == 1
    assert "error: cannot use" in server.stderr
    assert "Traceback" not in server.stderr
