"""Models that are registered and removed while others are served."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from starlette.requests import Request
from tests.checkpoints import tiny_llama
from tests.serve.running import RunningServer, eventually, running

from aquifer.config import EngineConfig
from aquifer.errors import EngineError
from aquifer.serve.endpoints import models
from aquifer.serve.link import EngineProcess

COMPLETIONS = "/v1/completions"
OPTIONS = ["--port", "0", "--page-size", "4K", "--max-model-len", "256", "--memory", "64M"]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    """One model behind two web processes."""
    options = [*OPTIONS, "--api-server-count", "2"]
    with running(["-m", "aquifer", "serve", f"a={checkpoint}", *options]) as server:
        yield server


@pytest.fixture(scope="module")
def open_to_all(other: Path) -> Iterator[RunningServer]:
    """A server that other machines reach too, and that has from the start what is added to ours."""
    with running(["-m", "aquifer", "serve", f"b={other}", *OPTIONS, "--host", "0.0.0.0"]) as server:
        yield server


def add(server: RunningServer, model: str, **fields: Any) -> tuple[int, Any]:
    status, answer, _ = server.call("POST", "/models", {"model": model, **fields})
    return status, answer


def remove(server: RunningServer, name: str) -> tuple[int, Any]:
    status, answer, _ = server.call("DELETE", f"/models/{name}")
    return status, answer


def names(server: RunningServer) -> set[str]:
    """Each call is another connection, which either web process may accept."""
    _, listed, _ = server.call("GET", "/v1/models")
    _, states, _ = server.call("GET", "/models")
    found = {model["id"] for model in listed["data"]}
    assert found == {model["name"] for model in states["models"]}
    return found


def wait_removed(server: RunningServer) -> None:
    """Wait until "a" alone is left in both web processes: one may hear of it after the answer."""
    eventually(lambda: all(names(server) == {"a"} for _ in range(6)), "the others are removed")


def complete(server: RunningServer, model: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": "x", "max_tokens": 3, **fields}
    status, answer, _ = server.call("POST", COMPLETIONS, body)
    return status, answer


def test_a_model_comes_and_goes(server: RunningServer, checkpoint: Path, other: Path):
    """All web processes serve it, the metrics have it, and its name may be used again."""
    for path in (other, checkpoint):
        status, answer = add(server, f"b={path}")
        assert status == 200
        assert (answer["name"], answer["path"], answer["loads"]) == ("b", str(path), 0)
        for _ in range(6):
            assert names(server) == {"a", "b"}
            status, answer = complete(server, "b")
            assert (status, answer["model"]) == (200, "b")
        _, metrics, _ = server.call("GET", "/metrics")
        assert 'aquifer:num_requests_running{model_name="b"} 0.0' in metrics
        assert remove(server, "b") == (200, {"id": "b", "object": "model", "deleted": True})
        wait_removed(server)
        for _ in range(6):
            assert complete(server, "b")[0] == 404
        _, metrics, _ = server.call("GET", "/metrics")
        assert 'aquifer:num_requests_running{model_name="b"}' not in metrics
        assert 'aquifer:prompt_tokens_total{model_name="b"}' in metrics
    assert complete(server, "a")[0] == 200


def test_the_answers_are_those_of_a_server_that_had_it_from_the_start(
    server: RunningServer, open_to_all: RunningServer, other: Path
):
    assert add(server, f"b={other}")[0] == 200
    try:
        ours = complete(server, "b", max_tokens=8, temperature=0)[1]["choices"][0]["text"]
    finally:
        assert remove(server, "b")[0] == 200
    theirs = complete(open_to_all, "b", max_tokens=8, temperature=0)[1]["choices"][0]["text"]
    assert ours == theirs


def test_an_alias_is_known_while_it_names_one_model(server: RunningServer, other: Path):
    assert add(server, str(other))[0] == 200
    assert complete(server, "other")[0] == 200
    assert remove(server, "other")[1]["id"] == str(other)
    wait_removed(server)
    assert complete(server, "other")[0] == 404


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("b=/nowhere", "/nowhere does not exist"),
        ("a={other}", "a model named 'a' is registered already"),
        ("b=", "names no model"),
        ("b={broken}", "tokenizer"),
        ("b={empty}", "config.json"),
    ],
)
def test_what_cannot_be_registered(
    server: RunningServer, other: Path, tmp_path: Path, model: str, words: str
):
    broken = shutil.copytree(other, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    (tmp_path / "empty").mkdir()
    written = model.format(other=other, broken=broken, empty=tmp_path / "empty")
    status, answer = add(server, written)
    assert status == 400
    assert answer["error"]["param"] == "model"
    assert words in answer["error"]["message"]
    wait_removed(server)
    assert add(server, f"b={other}")[0] == 200  # nothing is left of the attempt
    assert remove(server, "b")[0] == 200


def test_requests_of_a_model_that_is_removed_end(server: RunningServer, other: Path):
    assert add(server, f"b={other}")[0] == 200
    ended: list[tuple[int, Any]] = []

    def ask() -> None:
        ended.append(complete(server, "b", max_tokens=200, ignore_eos=True, n=8, temperature=1))

    asking = threading.Thread(target=ask)
    asking.start()

    def runs() -> bool:
        states = server.call("GET", "/models")[1]["models"]
        return bool({m["name"]: m for m in states}["b"]["requests_running"]) or bool(ended)

    eventually(runs, "it runs")
    assert remove(server, "b")[0] == 200
    asking.join(60)
    ((status, answer),) = ended
    assert status == 200 or "was removed" in answer["error"]["message"]


def test_the_next_engine_process_has_what_was_registered(server: RunningServer, other: Path):
    assert add(server, f"b={other}")[0] == 200
    assert add(server, f"c={other}")[0] == 200
    assert remove(server, "c")[0] == 200
    os.kill(server.engine_process(), signal.SIGKILL)
    eventually(lambda: server.call("GET", "/health")[0] != 200, "the death was noticed")
    eventually(lambda: server.call("GET", "/health")[0] == 200, "it serves again")
    assert complete(server, "b")[0] == 200
    assert names(server) == {"a", "b"}
    assert add(server, f"c={other}")[0] == 200
    for name in ("b", "c"):
        assert remove(server, name)[0] == 200


def test_a_checkpoint_that_is_gone_when_the_engine_process_died(
    checkpoint: Path, other: Path, tmp_path: Path
):
    """The model is out of service, and the others are served; it can be removed and added again."""
    gone = shutil.copytree(other, tmp_path / "gone")
    with running(["-m", "aquifer", "serve", f"a={checkpoint}", *OPTIONS]) as server:
        assert add(server, f"b={gone}")[0] == 200
        assert complete(server, "b")[0] == 200
        shutil.rmtree(gone)
        os.kill(server.engine_process(), signal.SIGKILL)
        eventually(lambda: server.call("GET", "/health")[0] != 200, "the death was noticed")
        eventually(lambda: server.call("GET", "/health")[0] == 200, "it serves again")
        assert complete(server, "a")[0] == 200
        status, answer = complete(server, "b")
        assert status == 503
        assert "'b' is out of service: it could not be loaded again (" in answer["error"]["message"]
        assert server.call("POST", "/models/b/load")[0] == 503
        assert remove(server, "b")[0] == 200
        assert add(server, f"b={other}")[0] == 200
        assert complete(server, "b")[0] == 200


def test_a_web_process_that_is_started_again_has_it_too(server: RunningServer, other: Path):
    assert add(server, f"b={other}")[0] == 200
    before = server.spawned()
    os.kill(before[1], signal.SIGKILL)  # the engine is the first, or the last if it died before

    def is_replaced() -> bool:
        now = server.spawned()
        return len(now) == 3 and before[1] not in now

    eventually(is_replaced, "another one is started")
    for _ in range(8):
        assert complete(server, "b")[0] == 200
    assert remove(server, "b")[0] == 200


def test_who_may_change_the_models(
    server: RunningServer, open_to_all: RunningServer, checkpoint: Path, other: Path
):
    """Nobody else than users of this machine, or those with a key."""
    body = {"model": f"b={other}"}
    headers = {"Sec-Fetch-Site": "cross-site"}
    assert server.call("POST", "/models", body, headers=headers)[0] == 403
    assert server.call("DELETE", "/models/a", headers=headers)[0] == 403
    body = {"model": f"a={checkpoint}"}
    for method, path in (("POST", "/models"), ("DELETE", "/models/b")):
        status, answer, _ = open_to_all.call(method, path, body)
        assert status == 403
        assert "--api-key" in answer["error"]["message"]
    assert names(open_to_all) == {"b"}


def test_commands(server: RunningServer, other: Path):
    def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aquifer", *arguments, "--url", server.url]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd)

    added = run("add", f"b={other.name}", cwd=other.parent)  # not the server's folder
    assert (added.returncode, added.stdout) == (0, f"b is served, from {other}\n")
    assert names(server) == {"a", "b"}
    again = run("add", f"b={other}")
    assert again.returncode == 2
    assert again.stderr.startswith("error: a model named 'b' is registered already")
    removed = run("remove", "b")
    assert (removed.returncode, removed.stdout) == (0, "b is removed\n")
    wait_removed(server)
    assert run("remove", "b").returncode == 2


def test_a_body_is_checked(server: RunningServer):
    for body in ({}, {"model": 3}, {"model": "b=x", "load": True}):
        status, answer, _ = server.call("POST", "/models", body)
        assert status == 400, json.dumps(answer)


def test_an_engine_that_dies_once_a_model_is_registered() -> None:
    """The client reads that it is, since to repeat the request would be refused."""
    backend = mock.AsyncMock()
    backend.register.return_value = "b"
    backend.memory.side_effect = EngineError("the engine process died")
    service = SimpleNamespace(may_change_models=True, backend=backend)
    request = Request({"type": "http", "headers": []})
    with pytest.raises(EngineError, match="'b' is registered; its state is not known: the engine"):
        asyncio.run(models.add(request, SimpleNamespace(model="path"), service))  # type: ignore[arg-type]


def test_a_process_that_was_not_started_can_be_killed() -> None:
    """As when a second signal comes while the process is being made."""
    connection = mock.Mock()
    process = EngineProcess(connection, EngineConfig(()), mock.Mock(), "info", reports=False)
    process.kill()
    assert process.exit_code is None
