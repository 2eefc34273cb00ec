"""`aquifer bench serve`: the command, with a real server and with one that is made up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama
from tests.fake_openai import DONE, Answer, FakeServer, fake_server, text, usage

from aquifer.bench.serving.server import serving
from aquifer.cli import app
from aquifer.errors import ConfigError, EngineError

pytestmark = pytest.mark.usefixtures("imports_left_out")  # a load begins with a full collection

ROOT = Path(__file__).parents[1]
ANSWER = Answer((text("a", "b"), usage(7), DONE))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def real_url(checkpoint: Path) -> Iterator[str]:
    """A running server of the tiny checkpoint."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with serving(str(checkpoint), ["--memory", "64MiB"], {"PYTHONPATH": path}) as url:
        yield url


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(*arguments: str) -> None:
    app(["bench", "serve", *arguments], standalone_mode=False)


def result_of(file: Path, *arguments: str) -> dict[str, Any]:
    bench(*arguments, "--output", str(file))
    result: dict[str, Any] = json.loads(file.read_text())
    return result


# --- a real server ---------------------------------------------------------------------------


def test_a_server_is_started_for_a_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    for variable in ("AQUIFER_API_KEY", "AQUIFER_SERVED_MODEL_NAME"):  # of servers that it is not
        monkeypatch.setenv(variable, "other")
    options = ("--num-prompts", "5", "--input-len", "5-9", "--output-len", "6", "--threads", "2")
    result = result_of(tmp_path / "s.json", str(checkpoint), *options, "--memory", "64MiB")
    assert (result["threads"], result["memory"]) == (2, 64 << 20)
    assert result["model_id"] == str(checkpoint)
    assert (result["completed"], result["failed"]) == (5, 0)
    assert result["total_output_tokens"] == 30
    assert 25 <= result["total_input_tokens"] <= 45
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]


def test_passes_of_a_running_server(
    real_url: str, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = result_of(
        tmp_path / "s.json",
        *("--base-url", real_url, "--tokenizer", str(checkpoint), "--num-prompts", "6"),
        *("--input-len", "4-8", "--output-len", "3-9", "--request-rate", "100", "--passes", "2"),
        *("--num-warmups", "2", "--max-concurrency", "3", "--temperature", "0"),
        *("--goodput", "ttft:60000", "tpot:60000", "--metric-percentiles", "50,90"),
    )
    assert len(result["passes"]) == 2
    assert result["passes"][-1].items() <= result.items()
    first, second = result["passes"]
    for key in ("completed", "total_input_tokens", "total_output_tokens", "request_rate"):
        assert first[key] == second[key]
    assert (first["completed"], first["failed"], first["max_concurrency"]) == (6, 0, 3)
    assert first["max_concurrent_requests"] <= 3
    assert first["request_goodput"] == first["request_throughput"]
    assert {"p50_ttft_ms", "p90_worst_gap_ms", "max_send_lag_ms"} <= first.keys()
    assert "memory" not in result  # of a server that is started
    printed = capfd.readouterr().out
    assert printed.count("Successful requests:                     6") == 2
    assert "pass 2 of 2" in printed


def test_chats_with_a_real_server(real_url: str, checkpoint: Path, tmp_path: Path) -> None:
    result = result_of(
        tmp_path / "s.json",
        *(str(checkpoint), "--base-url", real_url, "--backend", "openai-chat"),
        *("--num-prompts", "3", "--input-len", "8", "--output-len", "5"),
    )
    assert result["endpoint"] == "/v1/chat/completions"
    assert (result["completed"], result["total_output_tokens"]) == (3, 15)


def test_requests_that_the_server_refuses_are_counted(
    real_url: str, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some of these prompts are longer than the model's context."""
    common = ("--base-url", real_url, "--tokenizer", str(checkpoint), "--output-len", "2")
    result = result_of(
        tmp_path / "s.json", *common, "--num-prompts", "8", "--input-len", "1500-2600"
    )
    assert result["failed"] == 8 - result["completed"] > 0
    assert result["total_output_tokens"] == 2 * result["completed"]
    assert sum(result["error_counts"].values()) == result["failed"]
    assert "1 failed: HTTP 400: " in capfd.readouterr().out
    with pytest.raises(EngineError, match="no request succeeded: HTTP 400: "):
        bench(*common, "--num-prompts", "2", "--input-len", "3000")


# --- what is sent ----------------------------------------------------------------------------


def _sent(server: FakeServer, *arguments: str) -> list[dict[str, Any]]:
    server.requests.clear()
    bench("--base-url", server.url, *arguments)
    return server.requests


def test_what_requests_have(tmp_path: Path) -> None:
    with fake_server(ANSWER) as server:
        (body,) = _sent(server, "--num-prompts", "1")
        assert (len(body["prompt"]), body["max_tokens"]) == (1024, 128)
        assert (body["model"], body["ignore_eos"]) == ("tiny", True)
        assert "temperature" not in body
        (body,) = _sent(
            server,
            *("--num-prompts", "1", "--no-ignore-eos", "--temperature", "0.5"),
            *("--random-input-len", "10", "--random-output-len", "20"),
            *("--random-range-ratio", "0.5", "--dataset-name", "random", "--request-rate", "inf"),
        )
        assert "ignore_eos" not in body
        assert body["temperature"] == 0.5
        assert 5 <= len(body["prompt"]) <= 15
        assert 10 <= body["max_tokens"] <= 30
        bodies = _sent(server, "--num-prompts", "2", "--passes", "2", "--num-warmups", "3")
        assert len({tuple(body["prompt"]) for body in bodies[3:]}) == 4
        assert server.paths[-1] == "/v1/completions"


def test_names_of_models() -> None:
    with fake_server(ANSWER, models=("a", "b")) as server:
        assert _sent(server, "--num-prompts", "1")[0]["model"] == "a"
        assert _sent(server, "b", "--num-prompts", "1")[0]["model"] == "b"
        assert _sent(server, "--model", "b", "--num-prompts", "1")[0]["model"] == "b"
        named = ("demo", "--served-model-name", "b", "--num-prompts", "1")
        assert _sent(server, *named)[0]["model"] == "b"
        with pytest.raises(ConfigError, match="no model 'c'; it has a, b"):
            bench("c", "--base-url", server.url)
        with pytest.raises(ConfigError, match="no model 'c'"):
            bench("demo", "--served-model-name", "c", "--base-url", server.url)
    with fake_server(ANSWER, models=None) as server:
        assert _sent(server, "c", "--num-prompts", "1")[0]["model"] == "c"
        with pytest.raises(ConfigError, match="has no list of models"):
            bench("--base-url", server.url)
    with fake_server(ANSWER, models=()) as server, pytest.raises(ConfigError, match="no model"):
        bench("--base-url", server.url)


def test_host_and_port() -> None:
    with fake_server(ANSWER) as server:
        bench("--port", str(server.server_port), "--num-prompts", "1")
        bench("--host", "localhost", "--port", str(server.server_port), "--num-prompts", "1")
        assert len(server.requests) == 2


# --- results ---------------------------------------------------------------------------------


def test_files_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["aquifer", "bench", "serve", "--num-prompts", "1", "--api-key", "secret"]
    monkeypatch.setattr("sys.argv", arguments)
    folder = tmp_path / "results"
    with fake_server(ANSWER, key="secret") as server:
        common = ("--base-url", server.url, *arguments[3:], "--save-result")
        bench(*common, "--result-dir", str(folder))
        (file,) = folder.iterdir()
        assert file.name.startswith("openai-infqps-")
        bench(*common, "--result-dir", str(folder), "--result-filename", "r.json")
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        bench("--base-url", server.url, "--num-prompts", "1")
    content = (folder / "r.json").read_text()
    assert "secret" not in content
    result = json.loads(content)
    assert result["request_rate"] == "inf"
    assert "--api-key ..." in result["environment"]["command"]


def test_several_tokens_in_an_event(tmp_path: Path) -> None:
    with fake_server(ANSWER) as server:
        result = result_of(tmp_path / "r.json", "--base-url", server.url, "--num-prompts", "4")
    assert (result["total_output_tokens"], result["total_input_tokens"]) == (28, 12)
    # One gap, in which all tokens after the first came.
    assert result["mean_tpot_ms"] == pytest.approx(result["mean_itl_ms"] / 6)


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --base-url of a running one, or a MODEL"),
        (("demo", "--model", "other"), "leave out one of them"),
        (("nowhere",), "no such model"),
        (("--base-url", "x"), "--base-url is 'x'; write the server's address"),
        (("--base-url", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1: "),
        (("--base-url", "http://x", "--port", "1"), "leave out --host and --port"),
        (("--port", "1", "--memory", "1GiB"), "--memory is for a server that is started here"),
        (("demo", "--num-prompts", "0"), "--num-prompts"),
        (("demo", "--request-rate", "0"), "--request-rate is 0.0; it must be a number above 0"),
        (("demo", "--request-rate", "-inf"), "--request-rate"),
        (("demo", "--request-rate", "nan"), "--request-rate"),
        (("demo", "--burstiness", "0"), "--burstiness"),
        (("demo", "--max-concurrency", "0"), "--max-concurrency"),
        (("demo", "--passes", "0"), "--passes"),
        (("demo", "--input-len", "9-1"), "'9-1' is not a range of lengths"),
        (("demo", "--input-len", "9", "--random-input-len", "9"), "leave out one of them"),
        (("demo", "--random-range-ratio", "0.5"), "--random-range-ratio is of"),
        (("demo", "--backend", "tgi"), "choose openai, vllm or openai-chat"),
        (("demo", "--dataset-name", "sharegpt"), "choose random"),
        (("demo", "--endpoint", "/v1/chat/completions"), "add --backend openai-chat"),
        (("demo", "--endpoint", "x"), "--endpoint is 'x'; write a path"),
        (("demo", "--goodput", "ttft:500", "tpot:x"), "--goodput"),
        (("demo", "--goodput", "ttft:inf"), "--goodput"),
        (("demo", "--percentile-metrics", "ttft,x"), "--percentile-metrics"),
        (("demo", "--metric-percentiles", "101"), "--metric-percentiles"),
        (("demo", "--result-dir", "x"), "are for --save-result"),
        (("demo", "--save-result", "--output", "x.json"), "leave out one"),
        (("demo", "--temperature", "-1"), "--temperature"),
    ],
)
def test_bad_input_is_refused_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bench(*arguments)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_servers_that_do_not_fit_are_named() -> None:
    with fake_server(ANSWER, key="secret") as server:
        with pytest.raises(ConfigError, match="refused the API key: HTTP 401: wrong key"):
            bench("--base-url", server.url)
        chat = ("--base-url", server.url, "--api-key", "secret", "--backend", "openai-chat")
        with pytest.raises(ConfigError, match="its ORG/NAME with --tokenizer"):
            bench(*chat)
    few = Answer((b'{"error": {"message": "there is no token id 9996"}}',), 400)
    with fake_server(few) as server, pytest.raises(EngineError, match=r"9996; give .* --tokenizer"):
        bench("--base-url", server.url, "--num-prompts", "3")
    with fake_server(Answer((), 404)) as server:
        with pytest.raises(EngineError, match="no request succeeded: HTTP 404"):
            bench("--base-url", server.url, "--endpoint", "/nowhere", "--num-prompts", "3")
        assert server.requests
