"""A cluster of four nodes of Ray on this machine, with engines on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.checkpoints import tiny_llama
from tests.cluster.four_nodes import NUM_NODES, FourNodes, four_nodes
from tests.cluster.load import Load, answers_of, body_of
from tests.serve.running import ROOT, RunningServer, eventually, running

from aquifer.cluster.token import write_token

NUM_MODELS = 12
NUM_REQUESTS = 120
OPTIONS = ["--port", "0", "--page-size", "4K", "--max-model-len", "256"]
BODIES = [body_of(number, NUM_MODELS) for number in range(NUM_REQUESTS)]

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [f"m{seed}={tiny_llama(folder / str(seed), seed=seed)}" for seed in range(NUM_MODELS)]


@pytest.fixture(scope="module")
def expected(models: list[str]) -> tuple[list[str], int]:
    """Answers of a server with memory for all models, and the bytes of a model."""
    with running(["-m", "aquifer", "serve", *models, *OPTIONS, "--memory", "64M"]) as server:
        _, memory, _ = server.call("GET", "/memory")
        return answers_of(server, BODIES), int(memory["models"]["m0"]["weights_total_bytes"])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourNodes]:
    token_file = tmp_path_factory.mktemp("cluster") / "token"
    write_token(token_file)
    with four_nodes(token_file) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def cluster(
    nodes: FourNodes, models: list[str], expected: tuple[list[str], int]
) -> Iterator[RunningServer]:
    """Twelve models on four workers, of which each has memory for one and a half."""
    own = ["--cluster", nodes.address, "--token-file", str(nodes.token_file), "--workers", "4"]
    memory = ["--memory", str(int(1.5 * expected[1]))]
    command = ["-m", "aquifer", "cluster", "start", *models, *OPTIONS, *memory, *own]
    with running([*command, "--api-server-count", "2"]) as server:
        eventually(lambda: len(_workers(server)) == 4, "all workers serve")
        yield server
    assert server.process.returncode == 0
    eventually(lambda: not nodes.processes("aquifer"), "the workers have ended")


def _workers(server: RunningServer) -> list[str]:
    status, memory, _ = server.call("GET", "/memory")
    return list(memory["devices"]) if status == 200 else []


def _status(nodes: FourNodes) -> str:
    command = [sys.executable, "-m", "aquifer", "cluster", "status"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    own = ["--token-file", str(nodes.token_file), "--address", nodes.address]
    done = subprocess.run([*command, *own], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_answers_are_those_of_one_server(
    cluster: RunningServer, expected: tuple[list[str], int]
) -> None:
    with Load(cluster, BODIES, expected[0]) as load:
        load.wait_for(2 * NUM_REQUESTS)
    assert load.wrong == []
    assert not load.failed
    _, states, _ = cluster.call("GET", "/models")
    loads = [sum(of["loads"] for of in model["devices"].values()) for model in states["models"]]
    assert len(loads) == NUM_MODELS
    assert sum(loads) > NUM_MODELS  # they do not all fit


@pytest.mark.parametrize("victim", ["worker", "engine", "node", "controller"])
def test_what_is_killed_is_replaced(
    cluster: RunningServer,
    nodes: FourNodes,
    expected: tuple[list[str], int],
    victim: str,
) -> None:
    """No answer is wrong, every request ends, and the service is whole again."""
    before = _workers(cluster)
    with Load(cluster, BODIES, expected[0]) as load:
        load.wait_for(20)
        match victim:
            case "worker":
                nodes.kill_process("ray::Worker")
            case "engine":
                nodes.kill_process("spawn_main")
            case "node":
                nodes.kill_node()
            case "controller":
                old = nodes.processes("ray::Controller")
                nodes.kill_process("ray::Controller")
                eventually(
                    lambda: (
                        bool(nodes.processes("ray::Controller"))
                        and nodes.processes("ray::Controller") != old
                    ),
                    "the controller is there again",
                )
        load.wait_for(100)
        eventually(lambda: len(_workers(cluster)) == 4, "four workers serve")
        if victim in ("worker", "node"):
            eventually(lambda: _workers(cluster) != before, "there is another worker")
            eventually(lambda: len(_workers(cluster)) == 4, "four workers serve again")
        load.wait_for(100)
    assert load.wrong == []
    for reason in load.failed:
        assert "before the request finished" in reason or "worker" in reason, reason
    if victim == "controller":
        assert _workers(cluster) == before
    if victim == "node":
        nodes.add_node()


def test_a_registration_outlives_the_controller_and_reaches_new_workers(
    cluster: RunningServer, nodes: FourNodes, models: list[str]
) -> None:
    def added(*arguments: str) -> str:
        command = [sys.executable, "-m", "aquifer", "cluster", *arguments, "--url", cluster.url]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def answer() -> Any:
        body = {"model": "new", "prompt": "x", "max_tokens": 3, "temperature": 0}
        return cluster.call("POST", "/v1/completions", body)

    path = models[0].partition("=")[2]
    assert "new is served" in added("add", f"new={path}")
    nodes.kill_process("ray::Controller")
    nodes.kill_process("ray::Worker")
    before = _workers(cluster)
    eventually(lambda: _workers(cluster) != before, "the worker is missed")
    eventually(lambda: len(_workers(cluster)) == 4, "there is another one")
    assert answer()[0] == 200
    _, states, _ = cluster.call("GET", "/models")
    (new,) = (model for model in states["models"] if model["name"] == "new")
    assert len(new["devices"]) == 4
    status = _status(nodes)
    assert path in status
    assert f"The server is on {cluster.url}" in status
    assert status.count(" alive ") == NUM_NODES
    assert status.count(" there") == 4
    assert "new is removed" in added("remove", "new")
    assert answer()[0] == 404
    assert "new" not in _status(nodes)
