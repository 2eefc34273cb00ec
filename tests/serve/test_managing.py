"""Models over HTTP: their states, loads and unloads, pins, and keep-alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama
from tests.serve.running import RunningServer, eventually, running

COMPLETIONS = "/v1/completions"
OPTIONS = ["--port", "0", "--page-size", "4K", "--max-model-len", "256"]


@pytest.fixture(scope="module")
def narrow(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two models in memory for one and a half, behind two web processes."""
    other = tiny_llama(tmp_path_factory.mktemp("models") / "b", seed=1)
    sizes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    models = [f"a={checkpoint}", f"b={other}"]
    options = [*OPTIONS, "--memory", str(int(1.5 * sizes)), "--api-server-count", "2"]
    with running(["-m", "aquifer", "serve", *models, *options]) as server:
        yield server


def states(server: RunningServer) -> dict[str, Any]:
    """What GET /models says of each model."""
    status, answer, _ = server.call("GET", "/models")
    assert status == 200
    return {model["name"]: model for model in answer["models"]}


def manage(server: RunningServer, model: str, verb: str) -> tuple[int, Any]:
    status, answer, _ = server.call("POST", f"/models/{model}/{verb}")
    return status, answer


def complete(server: RunningServer, model: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": "x", "max_tokens": 3, **fields}
    status, answer, _ = server.call("POST", COMPLETIONS, body)
    return status, answer


def test_models_are_loaded_and_unloaded(narrow: RunningServer):
    for name, other in (("b", "a"), ("a", "b"), ("b", "a")):
        status, answer = manage(narrow, name, "load")
        assert status == 200
        assert (answer["name"], answer["status"], answer["error"]) == (name, "resident", None)
        assert answer["weights_resident_bytes"] == answer["weights_total_bytes"]
        assert states(narrow)[other]["status"] in ("partly resident", "registered")
    status, answer = manage(narrow, "b", "unload")
    assert (status, answer["status"], answer["weights_resident_bytes"]) == (200, "registered", 0)
    assert complete(narrow, "b")[0] == 200


def test_a_pinned_model_stays(narrow: RunningServer):
    """Another one that does not fit beside it may not be lost by that."""
    status, answer = manage(narrow, "a", "pin")
    assert status == 400
    assert "b could not be loaded beside what is pinned (a)" in answer["error"]["message"]
    assert not states(narrow)["a"]["pinned"]
    assert manage(narrow, "a", "unpin")[0] == 200


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/models/c/load", 404, "no model 'c' is served here"),
        ("/models/a/explode", 404, "'explode' is none of load, unload, pin, unpin"),
    ],
)
def test_what_cannot_be_done(narrow: RunningServer, path: str, status: int, words: str):
    found, answer, _ = narrow.call("POST", path)
    assert (found, words in answer["error"]["message"]) == (status, True)


def test_pages_of_other_sites_manage_nothing(narrow: RunningServer):
    manage(narrow, "a", "load")
    for site, expected in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        headers = {"Sec-Fetch-Site": site}
        assert narrow.call("POST", "/models/a/load", headers=headers)[0] == expected


def test_keep_alive_of_a_request(narrow: RunningServer):
    """0 gives the weights back at once, and a later request says otherwise."""
    assert complete(narrow, "a", keep_alive=0)[0] == 200
    eventually(lambda: states(narrow)["a"]["status"] == "registered", "it is unloaded")
    assert complete(narrow, "a", keep_alive="1h")[0] == 200
    state = states(narrow)["a"]
    assert state["keep_alive_seconds"] == 3600
    assert 0 < state["seconds_left"] <= 3600
    # Longer than a pipe can be waited for, which is what an idle engine does.
    assert complete(narrow, "a", keep_alive="30d")[0] == 200
    assert narrow.call("GET", "/health")[0] == 200
    assert complete(narrow, "a", keep_alive=-1)[0] == 200
    state = states(narrow)["a"]
    assert (state["keep_alive_seconds"], state["seconds_left"]) == (None, None)
    status, answer = complete(narrow, "a", keep_alive="soon")
    assert status == 400
    assert answer["error"]["param"] == "keep_alive"
    assert "'soon' is not a duration" in answer["error"]["message"]


def test_commands(narrow: RunningServer):
    """`aquifer load`, `unload` and the others do the same."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aquifer", *arguments, "--url", narrow.url]
        return subprocess.run(command, capture_output=True, text=True)

    loaded = run("load", "b")
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert loaded.stdout.startswith("b is resident: ")
    assert states(narrow)["b"]["status"] == "resident"
    unloaded = run("unload", "b")
    assert unloaded.stdout.startswith("b is registered: ")
    assert run("unpin", "b").returncode == 0
    refused = run("pin", "b")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: a could not be loaded beside what is pinned (b)")
    assert run("load", "c").returncode == 2


def test_a_server_that_keeps_nothing(checkpoint: Path):
    """`--keep-alive 0`; what is pinned stays, also in the next engine process."""
    options = [*OPTIONS, "--memory", "64M", "--keep-alive", "0"]
    with running(["-m", "aquifer", "serve", f"a={checkpoint}", *options]) as server:
        eventually(lambda: states(server)["a"]["status"] == "registered", "it is unloaded")
        assert complete(server, "a")[0] == 200
        eventually(lambda: states(server)["a"]["status"] == "registered", "it is unloaded")
        status, answer = manage(server, "a", "pin")
        assert (status, answer["status"], answer["pinned"]) == (200, "resident", True)
        status, answer = manage(server, "a", "unload")
        assert status == 400
        assert "is pinned; unpin it first" in answer["error"]["message"]
        os.kill(server.engine_process(), signal.SIGKILL)
        eventually(lambda: server.call("GET", "/health")[0] != 200, "the death was noticed")
        eventually(lambda: server.call("GET", "/health")[0] == 200, "it serves again")
        assert states(server)["a"]["pinned"]
        eventually(lambda: states(server)["a"]["status"] == "resident", "it is loaded again")
        assert manage(server, "a", "unpin")[0] == 200
        eventually(lambda: states(server)["a"]["status"] == "registered", "it is unloaded")
