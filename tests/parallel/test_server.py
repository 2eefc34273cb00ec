"""A server whose model is split over ranks: its answers, a rank that is killed, and its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.checkpoints import tiny_llama
from tests.serve.running import RunningServer, drain, eventually, is_running, running

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "To be", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    options = ["--port", "0", "--memory", "64M", "--device", "cpu", "-tp", "2"]
    with running(["-m", "aquifer", "serve", f"tiny={folder}", *options]) as server:
        yield server


def ranks_of(server: RunningServer) -> list[int]:
    return server.spawned(server.engine_process())


def wait_for_another(server: RunningServer, engine: int) -> None:
    """Wait until another engine process serves."""
    eventually(lambda: server.spawned()[:1] not in ([], [engine]), "another one is started")
    server.wait_healthy()


def answer(server: RunningServer) -> str:
    status, content, _ = server.call("POST", COMPLETIONS, BODY)
    assert status == 200
    text: str = content["choices"][0]["text"]
    return text


def test_answers_are_those_of_one_device(server: RunningServer, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "tiny")
    options = ["--port", "0", "--memory", "64M", "--device", "cpu"]
    with running(["-m", "aquifer", "serve", f"tiny={folder}", *options]) as alone:
        expected = answer(alone)
        assert not ranks_of(alone)
    assert answer(server) == expected
    assert len(ranks_of(server)) == 1


def test_a_rank_that_is_killed(server: RunningServer) -> None:
    """Requests end with an error, and the group is started again."""
    before = answer(server)
    options: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    streams = [server.stream("x", model="tiny", **options) for _ in range(2)]
    engine, (victim,) = server.engine_process(), ranks_of(server)
    os.kill(victim, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(openai.APIError, match="the engine process died"):
            drain(stream)
    server.wait_healthy()
    assert answer(server) == before
    assert not is_running(engine)
    assert len(ranks_of(server)) == 1
    assert f"rank 1 of 2 (cpu, process {victim}) died with exit code -9" in server.stderr


def test_a_rank_that_is_killed_while_nothing_runs(server: RunningServer) -> None:
    """It is missed without a request that has to fail first."""
    engine, (victim,) = server.engine_process(), ranks_of(server)
    os.kill(victim, signal.SIGKILL)
    wait_for_another(server, engine)
    answer(server)


def test_no_rank_outlives_its_engine(server: RunningServer) -> None:
    """Neither an engine process that is killed, nor a server that is told to stop."""
    engine, ranks = server.engine_process(), ranks_of(server)
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: not any(map(is_running, ranks)), "the ranks end")
    wait_for_another(server, engine)
    answer(server)
    ranks = ranks_of(server)
    assert server.stop() == 0
    assert not any(map(is_running, ranks))
