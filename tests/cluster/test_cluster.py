"""A cluster of four nodes of Ray on this machine, with engines on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.checkpoints import tiny_llama
from tests.cluster.four_nodes import NUM_NODES, FourNodes, four_nodes
from tests.cluster.load import Load, body_of
from tests.serve.running import ROOT, RunningServer, eventually, running

from aquifer import LLM, SamplingParams
from aquifer.cluster.token import write_token

NUM_MODELS = 12
NUM_WORKERS = 4
NUM_REQUESTS = 96
OPTIONS = ["--port", "0", "--page-size", "4K", "--max-model-len", "256"]
BODIES = [body_of(number, NUM_MODELS) for number in range(NUM_REQUESTS)]
CALM_S = 0.3


def _expected(paths: list[str]) -> tuple[list[str], int]:
    """The answers of one engine for each model, with room for all; bytes of a model's weights."""
    texts = [""] * NUM_REQUESTS
    for model, path in enumerate(paths):
        numbers = range(model, NUM_REQUESTS, NUM_MODELS)
        bodies = [BODIES[number] for number in numbers]
        params = [SamplingParams(max_tokens=body["max_tokens"], temperature=0) for body in bodies]
        with LLM(path, page_size="4K", max_model_len=256, memory="64M") as llm:
            outputs = llm.generate([body["prompt"] for body in bodies], params)
            (memory,) = llm.memory().models.values()
        for number, output in zip(numbers, outputs, strict=True):
            texts[number] = output.outputs[0].text
    return texts, memory.status.weight_bytes


def _workers(server: RunningServer) -> list[str]:
    """Workers that serve."""
    status, memory, _ = server.call("GET", "/memory")
    return list(memory["devices"]) if status == 200 else []


def _until_whole(server: RunningServer, without: str = "") -> None:
    """Wait until all workers serve, and one that was killed is not among them."""

    def is_whole() -> bool:
        workers = _workers(server)
        return len(workers) == NUM_WORKERS and without not in workers

    eventually(is_whole, "all workers serve")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command about the cluster."""
    return subprocess.run(
        [sys.executable, "-m", "aquifer", "cluster", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def _command(*arguments: str) -> str:
    """What a command about the cluster prints."""
    done = _run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _status(nodes: FourNodes) -> str:
    own = ["--token-file", str(nodes.token_file), "--address", nodes.address]
    return _command("status", *own)


def _another_token_is_refused(nodes: FourNodes, file: Path) -> None:
    write_token(file)
    done = _run("status", "--token-file", str(file), "--address", nodes.address)
    assert done.returncode == 2
    assert "has another token" in done.stderr


@contextmanager
def _joining(nodes: FourNodes) -> Iterator[subprocess.Popen[str]]:
    """A fifth node, which starts."""
    command = [sys.executable, "-m", "aquifer", "cluster", "join", nodes.address]
    process = subprocess.Popen(
        [*command, "--token-file", str(nodes.token_file)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def _until_joined(fifth: subprocess.Popen[str], nodes: FourNodes) -> None:
    assert fifth.stdout is not None
    said = fifth.stdout.readline()
    assert said == f"This machine has joined the cluster at {nodes.address}\n"


def _loads(server: RunningServer) -> int:
    """How often models were loaded."""
    _, states, _ = server.call("GET", "/models")
    models = states["models"]
    assert len(models) == NUM_MODELS
    return sum(of["loads"] for model in models for of in model["devices"].values())


def _check_failed(load: Load) -> None:
    """No answer is wrong, and what was not answered says why."""
    assert load.wrong == []
    for reason in load.failed:
        assert "before the request finished" in reason, reason


def _answers(server: RunningServer, expected: list[str]) -> None:
    """Twelve models on four workers with memory for six answer as one server does."""
    with Load(server, BODIES, expected) as load:
        load.wait_for(1000)
    assert load.wrong == []
    assert not load.failed
    assert _loads(server) > NUM_MODELS


def _a_worker_is_killed(
    server: RunningServer, nodes: FourNodes, fifth: subprocess.Popen[str], expected: list[str]
) -> None:
    """Its place is taken by one on a node that has joined. That leaves, and no request fails."""
    before = _workers(server)
    with Load(server, BODIES, expected) as load:
        load.wait_for(20)
        nodes.kill_process("ray::Worker")
        eventually(lambda: not {*before} <= {*_workers(server)}, "it is missed")
        with load.calm(CALM_S):
            _until_whole(server)
        load.wait_for(20)
    _check_failed(load)
    (new,) = {*_workers(server)} - {*before}
    with Load(server, BODIES, expected) as load:
        load.wait_for(20)
        fifth.send_signal(signal.SIGTERM)
        with load.calm(CALM_S):
            _until_whole(server, without=new)
        load.wait_for(20)
    assert fifth.wait() == 0
    assert load.wrong == []
    assert not load.failed


def _a_node_is_killed(server: RunningServer, nodes: FourNodes, expected: list[str]) -> None:
    """What it had is replaced on other nodes."""
    before = _workers(server)
    with Load(server, BODIES, expected) as load:
        load.wait_for(20)
        nodes.kill_node()
        eventually(lambda: not {*before} <= {*_workers(server)}, "its worker is missed")
        with load.calm(CALM_S):
            _until_whole(server)
        load.wait_for(20)
    _check_failed(load)


def _the_controller_is_killed(server: RunningServer, nodes: FourNodes, expected: list[str]) -> None:
    """It goes on, and requests do not notice."""
    before = _workers(server)
    with Load(server, BODIES, expected) as load:
        (old,) = nodes.processes("ray::Controller")
        os.kill(old, signal.SIGKILL)
        eventually(lambda: nodes.processes("ray::Controller") not in ([old], []), "it goes on")
        load.wait_for(20)
    assert load.wrong == []
    assert not load.failed
    assert _workers(server) == before


def _a_model_is_everywhere(server: RunningServer, nodes: FourNodes, path: str) -> None:
    """One that was registered before all that has happened."""
    _, states, _ = server.call("GET", "/models")
    (new,) = (model for model in states["models"] if model["name"] == "new")
    assert len(new["devices"]) == NUM_WORKERS
    status = _status(nodes)
    assert f"new    {path}" in status
    assert f"The server is on {server.url}" in status
    assert status.count(" alive ") == NUM_NODES - 1
    assert status.count(" there") == NUM_WORKERS
    assert "new is removed" in _command("remove", "new", "--url", server.url)
    body = {"model": "new", "prompt": "x"}
    assert server.call("POST", "/v1/completions", body)[0] == 404


def test_a_cluster_of_four_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One test, so that no two processes of the tests start four nodes each."""
    folder = tmp_path_factory.mktemp("models")
    paths = [str(tiny_llama(folder / str(seed), seed=seed)) for seed in range(NUM_MODELS)]
    models = [f"m{seed}={path}" for seed, path in enumerate(paths)]
    expected, weight_bytes = _expected(paths)

    token_file = folder / "token"
    write_token(token_file)
    with four_nodes(token_file) as nodes:
        own = ["--cluster", nodes.address, "--token-file", str(token_file)]
        command = ["-m", "aquifer", "cluster", "start", *models, *OPTIONS, *own]
        wanted = ["--workers", str(NUM_WORKERS), "--memory", str(3 * weight_bytes // 2)]
        with running([*command, *wanted]) as server:
            _until_whole(server)
            _answers(server, expected)
            # Not before: Ray gives up a node that does not start in 30 seconds beside all of these.
            with _joining(nodes) as fifth:
                _another_token_is_refused(nodes, folder / "another")
                assert "new is served" in _command("add", f"new={paths[0]}", "--url", server.url)
                _the_controller_is_killed(server, nodes, expected)
                _until_joined(fifth, nodes)
                _a_worker_is_killed(server, nodes, fifth, expected)
            _a_node_is_killed(server, nodes, expected)
            _a_model_is_everywhere(server, nodes, paths[0])
            assert server.stop() == 0
        eventually(lambda: not nodes.processes("aquifer"), "the workers have ended")
