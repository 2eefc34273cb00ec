"""What the server logs, and what it must not."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.running import RunningServer, eventually, running

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.reports import EngineStats
from aquifer.serve.engine_metrics import request_counts
from aquifer.serve.metrics import Metrics
from aquifer.serve.stats_log import StatsLog

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def logging_server(checkpoint: Path) -> Iterator[RunningServer]:
    """A server that logs requests, and prompts in part, but no throughput."""
    command = ["-m", "aquifer", "serve", f"tiny={checkpoint}", "--port", "0", "--memory", "32M"]
    options = ["--enable-log-requests", "--max-log-len", "6", "--disable-log-stats"]
    with running([*command, *options]) as server:
        yield server


# ---- at the start


def _start(server: RunningServer) -> str:
    """What a server of several models has logged at its start, to the last line of that."""
    eventually(lambda: "The models share the KV cache memory" in server.stderr, "it is logged")
    return server.stderr


def test_the_start_says_what_fits(idle_server: RunningServer):
    log = _start(idle_server)
    _, memory, _ = idle_server.call("GET", "/memory")
    for name in ("tiny", "other"):
        model = memory["models"][name]
        assert f"Model {name}: served as {name}; LlamaForCausalLM, float32, " in log
        assert f"weights {model['weights']}" in log
        assert f"Model {name}: CPU KV cache size: {model['kv_capacity_tokens']:,} tokens\n" in log
        assert (
            f"Model {name}: Maximum concurrency for 2,048 tokens per request: "
            f"{model['max_concurrency']:.2f}x\n"
        ) in log
    assert "on cpu: memory budget 64.00 MiB in " in log


def test_the_kv_cache_holds_what_is_said(idle_server: RunningServer):
    """The capacity is that of what its own weights leave: those of other models give way."""
    _, memory, _ = idle_server.call("GET", "/memory")
    (size,) = re.findall(r"Model tiny: served as .*KV (\S+) B per token", _start(idle_server))
    token_bytes = int(size)
    tiny = memory["models"]["tiny"]
    left_bytes = memory["budget_bytes"] - tiny["weights_total_bytes"]
    assert left_bytes - memory["page_bytes"] < tiny["kv_capacity_tokens"] * token_bytes
    assert tiny["kv_capacity_tokens"] * token_bytes <= left_bytes
    assert tiny["max_concurrency"] == pytest.approx(left_bytes / (2047 * token_bytes), rel=0.1)


# ---- load


def _stats(running: int = 0, waiting: int = 0, queried: int = 0, hits: int = 0) -> EngineStats:
    return EngineStats({"m": running}, {"m": waiting}, {"m": 0}, 0.125, {"m": queried}, {"m": hits})


def test_a_line_has_what_happened_since_the_line_before(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "aquifer.serve.stats_log")
    metrics = Metrics({"m": 100})
    log = StatsLog(["m"], "cuda:0")
    request = Request("r", "m", [1] * 30, SamplingParams(), 0.0)
    watch = metrics.watch(request)
    watch.output(TokenOutput("r", [1]), 1.0)
    watch.tokens(0, [2.0] * 9)
    counts = request_counts(metrics.families())
    log.log(_stats(2, 3, queried=40, hits=10), counts, 5.0)
    log.log(_stats(2, 3, queried=40, hits=10), counts, 5.0)
    log.log(_stats(queried=60, hits=30), counts, 5.0)
    log.log(_stats(queried=60, hits=30), counts, 5.0)
    log.log(_stats(1, queried=10, hits=5), counts, 5.0)  # the engine process was started again
    assert [record.getMessage() for record in caplog.records] == [
        f"Model m: Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: "
        f"{generated} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
        f"GPU KV cache usage: 12.5%, Prefix cache hit rate: {hit_rate}%"
        for prompt, generated, running, waiting, hit_rate in (
            ("6.0", "2.0", 2, 3, "25.0"),
            ("0.0", "0.0", 2, 3, "25.0"),
            ("0.0", "0.0", 0, 0, "100.0"),
            ("0.0", "0.0", 0, 0, "100.0"),
            ("0.0", "0.0", 1, 0, "50.0"),
        )
    ]
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "INFO", "INFO", "DEBUG", "INFO"]


def test_a_server_with_traffic_says_so(idle_server: RunningServer):
    line = re.compile(
        r"INFO aquifer\S+ Model tiny: Avg prompt throughput: \d+\.\d tokens/s, "
        r"Avg generation throughput: \d+\.\d tokens/s, Running: \d+ reqs, Waiting: \d+ reqs, "
        r"CPU KV cache usage: \d+\.\d%, Prefix cache hit rate: \d+\.\d%\n"
    )
    before = len(idle_server.stderr)
    idle_server.call("POST", COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 2})
    eventually(lambda: bool(line.search(idle_server.stderr[before:])), "a line is logged")


# ---- requests


def _lines(server: RunningServer, answer: Any) -> list[str]:
    """The two lines of the only prompt of a request; its id is in the answer."""
    name = f"request {answer['id']}-0:"

    def found() -> list[str]:
        return [line for line in server.stderr.splitlines() if name in line]

    eventually(lambda: len(found()) == 2, "the request is logged")
    return found()


def test_each_request_has_two_lines(logging_server: RunningServer):
    body = {"prompt": "Once\nupon", "max_tokens": 3, "stop": ["secret"], "seed": 5}
    _, answer, _ = logging_server.call("POST", COMPLETIONS, body | {"ignore_eos": True})
    received, finished = _lines(logging_server, answer)
    assert "Received" in received
    assert "model tiny, 8 prompt tokens, params: seed=5, stop=(1 texts), max_tokens=3" in received
    assert received.endswith(r", prompt 'Once\nu'")
    assert re.search(r"3 output tokens in \d+\.\d{3} s, finish reason length$", finished)
    assert "secret" not in logging_server.stderr


def test_prompts_without_a_text_are_logged_as_token_ids(logging_server: RunningServer):
    tokens = list(range(80, 90))
    _, answer, _ = logging_server.call("POST", COMPLETIONS, {"prompt": tokens, "max_tokens": 1})
    assert _lines(logging_server, answer)[0].endswith(f", prompt {tokens[:6]}")
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    _, answer, _ = logging_server.call("POST", CHAT, chat)
    assert re.search(r", prompt \[\d+(, \d+)*\]$", _lines(logging_server, answer)[0])


def test_requests_that_do_not_finish_are_logged(logging_server: RunningServer):
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    stream = logging_server.openai().completions.create(
        model="tiny", prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    name = next(stream).id
    stream.close()
    (_, ended) = _lines(logging_server, {"id": name})
    assert ended.endswith("finish reason abort")
    status, _, _ = logging_server.call("POST", COMPLETIONS, body | {"max_tokens": 10**6})
    assert status == 400
    eventually(lambda: " s, refused\n" in logging_server.stderr, "the refusal is logged")


def test_stats_are_not_logged_where_they_are_disabled(logging_server: RunningServer):
    eventually(lambda: "KV cache size" in logging_server.stderr, "the start is logged")
    assert "throughput" not in logging_server.stderr
    assert logging_server.problems == ""


def test_neither_requests_nor_prompts_are_logged_by_default(idle_server: RunningServer):
    body = {"model": "tiny", "prompt": "confidential", "max_tokens": 1}
    assert idle_server.call("POST", COMPLETIONS, body)[0] == 200
    assert "confidential" not in idle_server.stderr
    assert "Received request" not in idle_server.stderr


def test_a_level_hides_what_is_below_it(checkpoint: Path):
    command = ["-m", "aquifer", "serve", f"tiny={checkpoint}", "--port", "0", "--memory", "16M"]
    with running([*command, "--log-level", "warning", "--max-model-len", "64"]) as server:
        assert server.call("GET", "/tokenizer_info")[0] == 404
        assert server.stop() == 0
    assert server.stderr == ""
