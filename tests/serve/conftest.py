from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoints import tiny_llama
from tests.serve.running import ORIGIN, RunningServer, eventually, running


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two models in one pool, shared by all tests that do not stop the server."""
    other = tiny_llama(tmp_path_factory.mktemp("checkpoints") / "other", seed=1)
    command = ["-m", "aquifer", "serve", f"tiny={checkpoint}", f"other={other}"]
    options = ["--port", "0", "--memory", "64M", "--seed", "1"]
    endpoints = ["--trust-request-chat-template", "--enable-tokenizer-info-endpoint"]
    with running([*command, *options, *endpoints]) as server:
        yield server
    assert server.process.returncode == 0
    assert server.problems == ""


@pytest.fixture(scope="session")
def keyed_server(checkpoint: Path) -> Iterator[RunningServer]:
    """A server with the key "secret", which pages of `ORIGIN` may call."""
    command = ["-m", "aquifer", "serve", f"tiny={checkpoint}", "--port", "0", "--memory", "16M"]
    origins = ["--allowed-origins", ORIGIN, "--allowed-methods", "GET,POST"]
    with running([*command, "--api-key", "secret", *origins]) as server:
        yield server


@pytest.fixture
def idle_server(server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; checks afterwards that all memory that a test used is free again."""
    before = server.memory_in_use()
    assert before["running"] == before["waiting"] == 0
    yield server
    eventually(lambda: server.memory_in_use() == before, "the server's memory is free again")
