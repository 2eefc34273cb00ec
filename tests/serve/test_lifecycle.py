"""Full queues, keys, signals, and an engine that dies."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.checkpoints import tiny_llama
from tests.serve.running import RunningServer, drain, eventually, is_running, running

from aquifer.bench.serving.target import Target
from aquifer.errors import ConfigError
from aquifer.serve.supervisor import MAX_DEATHS

LONG_TOKENS = 30_000  # an output that lasts far longer than the test that needs it
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a key where one request runs and one waits, and outputs may be long."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    checkpoint = tiny_llama(folder, max_position_embeddings=LONG_TOKENS + 100)
    command = ["-m", "aquifer", "serve", f"tiny={checkpoint}", "--port", "0", "--api-key", "secret"]
    limits = ["--max-num-seqs", "1", "--max-num-waiting", "1"]
    with running([*command, "--memory", "32M", *limits]) as server:
        server.only_model = "tiny"
        yield server


@pytest.fixture(scope="module")
def lasting_server(checkpoint: Path) -> Iterator[RunningServer]:
    """A fake server for tests that do not end it."""
    with running(["-m", "tests.serve.fake_server", str(checkpoint), "30"]) as server:
        yield server


@pytest.fixture
def fake_server(checkpoint: Path) -> Iterator[RunningServer]:
    with running(["-m", "tests.serve.fake_server", str(checkpoint), "30"]) as server:
        yield server


@pytest.fixture
def impatient_server(checkpoint: Path) -> Iterator[RunningServer]:
    """A fake server that gives running requests no time when it is told to stop."""
    with running(["-m", "tests.serve.fake_server", str(checkpoint), "0"]) as server:
        yield server


def test_key(narrow_server: RunningServer):
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        status, answer, _ = narrow_server.call("POST", "/v1/completions", body, headers)
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/memory"):
        assert narrow_server.call("GET", path)[0] == 401
    for path in ("/health", "/metrics", "/version"):
        assert narrow_server.call("GET", path)[0] == 200
    assert narrow_server.call("POST", "/v1/completions", body, KEY)[0] == 200


def test_more_requests_than_may_wait(narrow_server: RunningServer):
    """One request runs until it was seen that another one waits and that a third is refused."""
    body = {"prompt": "x", "max_tokens": 1}

    def post() -> int:
        return narrow_server.call("POST", "/v1/completions", body, KEY)[0]

    def num_waiting() -> int:
        return int(narrow_server.call("GET", "/memory", headers=KEY)[1]["requests_waiting"])

    with ThreadPoolExecutor(1) as threads:
        options: dict[str, Any] = {"max_tokens": LONG_TOKENS, "extra_body": {"ignore_eos": True}}
        runs = narrow_server.stream("x", **options)
        waits = threads.submit(post)
        eventually(lambda: num_waiting() == 1, "a request waits")
        assert post() == 429
        runs.close()
        assert waits.result() == 200


def test_a_stream_goes_on_after_sigterm(fake_server: RunningServer):
    stream = fake_server.stream("x", max_tokens=500)
    fake_server.process.send_signal(signal.SIGTERM)
    assert drain(stream) == "length"
    assert fake_server.wait() == 0
    assert fake_server.problems == ""


def test_requests_leave_nothing_to_the_garbage_collector(checkpoint: Path):
    """All streams wait while it runs, the longer the more it finds."""
    command = ["-m", "tests.serve.fake_server", str(checkpoint), "30", "--report-garbage"]
    with running(command) as server:
        for endpoint, prompt in (
            ("completions", {"prompt": "x"}),
            ("completions", {"prompt": ["x", "y"], "n": 2}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            for stream in (False, True):
                body = {**prompt, "max_tokens": 5, "stream": stream}
                assert server.call("POST", f"/v1/{endpoint}", body)[0] == 200
        drain(server.stream("x", max_tokens=50))
        server.stream("x").close()  # the client leaves
        eventually(lambda: server.memory_in_use()["running"] == 0, "its request ends")
        assert server.call("POST", "/v1/completions", {"prompt": "lose"})[0] == 503
        assert server.call("POST", "/v1/completions", {"prompt": "x", "n": 0})[0] == 400
        assert server.stop() == 0
    assert server.problems == ""


def test_full_queue_says_when_to_retry(lasting_server: RunningServer):
    status, answer, headers = lasting_server.call("POST", "/v1/completions", {"prompt": "refuse"})
    assert status == 429
    assert answer["error"]["code"] == "queue_full"
    assert headers["retry-after"] == "1"


def test_a_lost_request_is_an_error_in_its_stream(lasting_server: RunningServer):
    status, answer, _ = lasting_server.call("POST", "/v1/completions", {"prompt": "lose"})
    assert status == 503
    assert answer["error"]["message"] == "lost on purpose"
    with pytest.raises(openai.APIError, match="lost on purpose"):
        drain(lasting_server.stream("lose"))
    assert lasting_server.call("POST", "/v1/completions", {"prompt": "x"})[0] == 200


def test_an_engine_that_crashes(fake_server: RunningServer):
    """What runs gets an error; another process serves soon, with what was pinned in the first."""
    pinned = {"prompt": "a long prefix"}
    assert fake_server.call("POST", "/v1/prefixes", pinned)[0] == 200
    stream = fake_server.stream("an innocent one")
    status, answer, headers = fake_server.call("POST", "/v1/completions", {"prompt": "crash"})
    assert status == 503
    assert "the engine process died" in answer["error"]["message"]
    assert int(headers["retry-after"]) > 0
    with pytest.raises(openai.APIError, match="the engine process died"):
        drain(stream)
    fake_server.wait_healthy()
    status, answer, _ = fake_server.call("POST", "/v1/completions", pinned)
    assert status == 200
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1
    assert "\naquifer:engine_restarts_total 1.0\n" in fake_server.call("GET", "/metrics")[1]
    assert fake_server.stop() == 0
    assert "told to crash" in fake_server.stderr
    assert "the engine process died (exit code 1) while it computed 'fake'" in fake_server.stderr


def test_an_engine_process_that_is_killed(fake_server: RunningServer):
    """The kernel kills like this when memory runs out. It may happen again and again."""
    for _ in range(MAX_DEATHS + 1):
        engine = fake_server.engine_process()
        stream = fake_server.stream("x")
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine process died"):
            drain(stream)
        _, metrics, _ = fake_server.call("GET", "/metrics")
        assert 'aquifer:num_requests_running{model_name="fake"} 0.0' in metrics
        fake_server.wait_healthy()
        assert fake_server.call("POST", "/v1/completions", {"prompt": "x"})[0] == 200
        assert not is_running(engine)
    assert fake_server.stop() == 0


def test_a_model_that_ends_every_engine_process_is_taken_out_of_service(
    fake_server: RunningServer,
):
    for _ in range(MAX_DEATHS):
        status, _, _ = fake_server.call("POST", "/v1/completions", {"prompt": "crash"})
        assert status == 503
        _while_restarting(fake_server)
    status, answer, headers = fake_server.call("POST", "/v1/completions", {"prompt": "x"})
    assert status == 503
    assert "restart the server" in answer["error"]["message"]
    assert "retry-after" not in headers
    assert fake_server.call("GET", "/health")[0] == 503
    assert fake_server.stop() == 0
    assert "taken out of service" in fake_server.stderr


def test_an_engine_that_does_not_answer(fake_server: RunningServer):
    engine = fake_server.engine_process()
    os.kill(engine, signal.SIGSTOP)
    eventually(lambda: fake_server.call("GET", "/health")[0] == 503, "the server says so")
    for method, path in (("GET", "/memory"), ("POST", "/v1/completions")):
        status, answer, _ = fake_server.call(method, path, {"prompt": "x"})
        assert status == 503
        assert "has not answered" in answer["error"]["message"]
    os.kill(engine, signal.SIGCONT)
    fake_server.wait_healthy()
    assert fake_server.call("POST", "/v1/completions", {"prompt": "x"})[0] == 200


def test_a_server_that_is_told_to_stop_while_the_engine_hangs(impatient_server: RunningServer):
    engine = impatient_server.engine_process()
    os.kill(engine, signal.SIGSTOP)
    assert impatient_server.stop() == 0
    eventually(lambda: not is_running(engine), "the engine process is gone")


def test_requests_are_refused_while_models_load(checkpoint: Path):
    """It listens before it loads, so that a second server on the port fails at once."""
    command = ["-m", "tests.serve.fake_server", str(checkpoint), "30", "--load"]
    server = RunningServer(command)
    try:
        server.wait_listening()
        for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
            status, answer, headers = server.call(method, path, {"prompt": "x"})
            assert status == 503
            assert "the server is starting" in answer["error"]["message"]
            assert int(headers["retry-after"]) > 0
        with pytest.raises(ConfigError, match=r"is not ready: .*the server is starting"):
            Target.reach(str(server.url)).model_names()
        second = RunningServer([*command, "--port", str(server.port)])
        assert second.wait() == 1
        assert "choose another with --port" in second.stderr
        server.wait_loading()  # earlier, the signal would end the engine process
        os.kill(server.engine_process(), signal.SIGUSR1)
        server.wait_healthy()
    finally:
        assert server.stop() == 0


def test_a_stream_that_outlasts_the_timeout_gets_an_error(impatient_server: RunningServer):
    stream = impatient_server.stream("x")
    impatient_server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shut down before the request finished"):
        drain(stream)
    assert impatient_server.wait() == 0
    assert impatient_server.problems == ""


def test_no_new_requests_while_stopping_and_a_second_signal_ends_at_once(
    fake_server: RunningServer,
):
    connection = http.client.HTTPConnection(str(fake_server.host), fake_server.port)
    connection.connect()
    stream = fake_server.stream("x")
    fake_server.process.send_signal(signal.SIGTERM)
    eventually(lambda: not _accepts(fake_server), "the server accepts no more connections")
    next(stream)  # while this one goes on
    engine = fake_server.engine_process()
    assert fake_server.stop() == 1
    eventually(lambda: not is_running(engine), "the engine process is gone")
    connection.close()


def test_the_engine_process_ends_with_its_parent(fake_server: RunningServer):
    engine = fake_server.engine_process()
    fake_server.process.kill()
    fake_server.wait()
    eventually(lambda: not is_running(engine), "the engine process is gone")


def test_ctrl_c_in_a_terminal_reaches_both_processes(impatient_server: RunningServer):
    engine = impatient_server.engine_process()
    os.kill(engine, signal.SIGINT)
    os.kill(engine, signal.SIGTERM)
    assert impatient_server.call("POST", "/v1/completions", {"prompt": "x"})[0] == 200
    assert impatient_server.stop(signal.SIGINT) == 0


def _while_restarting(server: RunningServer) -> None:
    def is_settled() -> bool:
        status, answer, _ = server.call("GET", "/health")
        return status == 200 or "started again" not in answer["error"]["message"]

    eventually(is_settled, "another engine process has started")


def _accepts(server: RunningServer) -> bool:
    try:
        socket.create_connection((str(server.host), server.port)).close()
    except ConnectionResetError:
        pass  # the listener is being closed: the next one is refused
    except ConnectionRefusedError:
        return False
    return True


def test_a_web_side_that_cannot_be_imported_ends_the_server(
    checkpoint: Path, tmp_path: Path
) -> None:
    """With its reason, and no engine process is left that would keep the command from ending."""
    (tmp_path / "fastapi.py").write_text("raise ImportError('half installed')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "aquifer", "serve", str(checkpoint), "--port", "0"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "cannot be imported (half installed)" in done.stderr
