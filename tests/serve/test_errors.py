"""Every failure has OpenAI's form, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from tests.checkpoints import VOCAB_SIZE
from tests.serve.running import RunningServer, eventually

from aquifer.serve.limits import MAX_HEADER_BYTES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def _check(
    answer: tuple[int, Any, dict[str, str]], status: int, words: str, param: str | None = None
) -> None:
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -1, "temperature is -1"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", float("inf"), "temperature is inf"),
        ("temperature", "warm", "temperature: "),
        ("top_k", 2**70, "top_k is"),
        ("min_tokens", 2**63 - 1, "min_tokens is"),
        ("max_tokens", 2**40, "max_tokens is"),
        ("stop", ["a"] * 33, "stop: List should have at most 32"),
        ("stop", "a" * 257, "of 1 to 256"),
        ("logit_bias", {str(i): 0 for i in range(2**18 + 1)}, "at most 262144"),
        ("stop_token_ids", [0] * (2**18 + 1), "at most 262144"),
        ("cache_salt", "a" * 257, "at most 256"),
        ("max_tokns", 3, "do you mean 'max_tokens'"),
        ("guided_json", {}, "guided_json is not supported"),
        ("prompt", "x" * 10**6, "shorten the prompt"),
        ("top_p", 0, "top_p is 0"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("top_k", -2, "top_k is -2"),
        ("min_p", 2, "min_p is 2"),
        ("max_tokens", 0, "needs echo"),
        ("max_tokens", -5, "max_tokens is -5"),
        ("max_tokens", 10**6, "context length of 2048"),
        ("max_tokens", "many", "max_tokens: "),
        ("min_tokens", 99, "min_tokens is 99"),
        ("seed", 2**70, "seed is"),
        ("n", 0, "n is 0"),
        ("best_of", 129, "best_of is 129"),
        ("suffix", "the end", "suffix is not supported"),
        ("logprobs", 21, "logprobs is 21"),
        ("presence_penalty", 3, "presence_penalty is 3"),
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("stop", "", "stop contains ''"),
        ("stop", [1], "stop: "),
        ("logit_bias", {"1": 1000}, "logit_bias[1] is 1000"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("allowed_token_ids", [], "allowed_token_ids is []"),
        ("stream_options", {"include_usage": True}, "stream to be true"),
        ("prompt", "", "prompt is empty"),
        ("prompt", [], "prompt is empty"),
        ("prompt", [[]], "prompt is empty"),
        ("prompt", ["fine", ""], "prompt is empty"),
        ("prompt", ["x"] * 1025, "at most 1024"),
        ("prompt", None, "must be a text"),
        ("prompt", {"text": "x"}, "must be a text"),
        ("prompt", [1, "x"], "must be a text"),
        ("prompt", [1.5], "must be a text"),
        ("prompt", [[1], "x"], "must be a text"),
        ("prompt", [1, VOCAB_SIZE], f"token id {VOCAB_SIZE}"),
        ("prompt", [1, -1], "token id -1"),
        ("prompt", [2**80], "token id"),
        ("prompt", [1] * 2048, "context length is 2048"),
        ("prompt", "\ud800", "Unicode"),
    ],
)
def test_bad_fields_of_completions(idle_server: RunningServer, field: str, value: Any, words: str):
    body = {"model": "tiny", "prompt": "hello", field: value}
    _check(idle_server.call("POST", COMPLETIONS, body), 400, words, field)


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_completions_of_several_prompts_are_bounded(idle_server: RunningServer, field: str):
    body = {"model": "tiny", "prompt": ["x"] * 9, field: 128}
    answer = idle_server.call("POST", COMPLETIONS, body)
    _check(answer, 400, "1152 completions (9 prompts, 128 completions of each)", "prompt")
    assert "at most 1024" in answer[1]["error"]["message"]


def test_token_ids_of_parameters_must_exist(idle_server: RunningServer):
    for field, value in (
        ("stop_token_ids", [VOCAB_SIZE]),
        ("allowed_token_ids", [-1]),
        ("logit_bias", {str(VOCAB_SIZE): 1}),
    ):
        answer = idle_server.call(
            "POST", COMPLETIONS, {"model": "tiny", "prompt": "x", field: value}
        )
        assert answer[0] == 400, answer


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("messages", [], "messages"),
        ("messages", "hello", "messages"),
        ("messages", [{"content": "no role"}], "messages"),
        ("messages", [{"role": "user", "content": "x" * 3000}], "context length is 2048"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "'image_url' is not supported",
        ),
        ("tools", [{"type": "function"}], "tools is not supported"),
        ("tool_choice", "required", "tool_choice is not supported"),
        ("response_format", {"type": "json_object"}, "response_format is not supported"),
        ("top_logprobs", 2, "needs logprobs"),
        ("n", 0, "n is 0"),
        ("max_tokens", 0, "max_tokens is 0"),
        ("max_completion_tokens", 0, "max_completion_tokens is 0"),
        ("chat_template_kwargs", {"messages": []}, "must not contain 'messages'"),
    ],
)
def test_bad_fields_of_chat(idle_server: RunningServer, field: str, value: Any, words: str):
    body = {"model": "tiny", "messages": HELLO, field: value}
    _check(idle_server.call("POST", CHAT, body), 400, words, field)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ messages[7].x.y }}",
        "{{ 1 + '' }}",
        "{{ raise_exception('\ud800') }}",
    ],
)
def test_bad_chat_templates(idle_server: RunningServer, template: str):
    body = {"model": "tiny", "messages": HELLO, "chat_template": template}
    _check(idle_server.call("POST", CHAT, body), 400, "chat template", "messages")


def test_a_chat_template_that_takes_too_much_memory(idle_server: RunningServer):
    """`test_sandbox.py` has one that takes too long."""
    template = "{{ [1]|batch(10**9, 0)|first|length }}"
    body = {"model": "tiny", "messages": HELLO, "chat_template": template}
    words = "more memory than 2.00 GiB"
    _check(idle_server.call("POST", CHAT, body), 400, words, "chat_template")


def test_null_is_the_default_and_bookkeeping_fields_are_accepted(idle_server: RunningServer):
    body = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 2,
        "temperature": None,
        "top_p": None,
        "n": None,
        "stop": None,
        "stream": None,
        "response_format": {"type": "text"},
        "tools": [],
        "user": "user-1",
        "store": False,
        "service_tier": "auto",
    }
    assert idle_server.call("POST", CHAT, body)[0] == 200


def test_errors_before_the_first_token_are_http_errors(idle_server: RunningServer):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 10**6, "stream": True}
    _check(idle_server.call("POST", COMPLETIONS, body), 400, "context length", "max_tokens")


def test_unknown_model(idle_server: RunningServer):
    for path, body in (
        (COMPLETIONS, {"model": "gpt-5", "prompt": "x"}),
        (CHAT, {"model": "gpt-5", "messages": HELLO}),
        ("/tokenize", {"model": "gpt-5", "prompt": "x"}),
    ):
        answer = idle_server.call("POST", path, body)
        _check(answer, 404, "no model 'gpt-5' is served here", "model")
        assert answer[1]["error"]["code"] == "model_not_found"
    _check(idle_server.call("GET", "/v1/models/gpt-5"), 404, "no model 'gpt-5'", "model")
    _check(idle_server.call("POST", COMPLETIONS, {"prompt": "x"}), 404, "name the model", "model")


def test_malformed_json(idle_server: RunningServer):
    for body in (b"{", b"\xff\xfe", b"[" * 100_000):
        answer = idle_server.call("POST", COMPLETIONS, body)
        assert answer[0] == 400
        assert "error" in answer[1]
    _check(idle_server.call("POST", COMPLETIONS, b"[]"), 400, "must be a JSON object")
    _check(idle_server.call("POST", COMPLETIONS, b""), 400, "")


def test_wrong_content_type(idle_server: RunningServer):
    answer = idle_server.call(
        "POST", COMPLETIONS, {"prompt": "x"}, {"Content-Type": "application/x-www-form-urlencoded"}
    )
    _check(answer, 400, "Content-Type: application/json")


def test_unknown_path_and_method(idle_server: RunningServer):
    _check(idle_server.call("GET", "/v2/nothing"), 404, "/v2/nothing")
    _check(idle_server.call("GET", COMPLETIONS), 405, "GET")


def test_body_too_large(idle_server: RunningServer):
    body = b'{"model": "tiny", "prompt": "' + b"x" * (50 << 20) + b'"}'
    _check(idle_server.call("POST", COMPLETIONS, body), 413, "larger than")


def test_body_too_large_without_a_length(idle_server: RunningServer):
    chunk = b"x" * (1 << 20)
    with socket.create_connection((str(idle_server.host), idle_server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(20):
            connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("num_bytes", [12 << 10, 100 << 10])
def test_headers_too_long(keyed_server: RunningServer, num_bytes: int):
    with socket.create_connection((str(keyed_server.host), keyed_server.port)) as connection:
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * num_bytes
        connection.sendall(head + b"\r\nConnection: close\r\n\r\n")
        answer = b""
        while received := connection.recv(4096):
            answer += received
    if num_bytes < MAX_HEADER_BYTES:
        assert answer.startswith(b"HTTP/1.1 200")
    else:
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"headers are larger than 16.00 KiB" in answer


def _post_and_leave(server: RunningServer, body: dict[str, Any], num_events: int) -> None:
    """Send a request on a raw socket, read some events of its stream, and hang up."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection((str(server.host), server.port)) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        eventually(lambda: server.memory_in_use()["running"] > 0, "the request runs")
        received = b""
        while received.count(b"data: ") < num_events:
            received += connection.recv(4096)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(idle_server: RunningServer, stream: bool):
    body = {
        "model": "tiny",
        "prompt": ["one", "two"],
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": stream,
    }
    for _ in range(3):
        _post_and_leave(idle_server, body, num_events=2 if stream else 0)
    # idle_server asserts that the memory comes back, long before 2000 tokens.


def test_metrics(idle_server: RunningServer):
    idle_server.call("POST", COMPLETIONS, {"model": "other", "prompt": "x", "max_tokens": 3})
    endless = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": True}
    _post_and_leave(idle_server, endless | {"stream": True}, num_events=1)
    eventually(lambda: idle_server.memory_in_use()["running"] == 0, "the request is aborted")
    status, text, _ = idle_server.call("GET", "/metrics")
    assert status == 200
    pool_bytes = [
        float(line.split(" ")[1])
        for line in text.splitlines()
        if line.startswith("aquifer:pool_bytes{")
    ]
    assert sum(pool_bytes) == 64 << 20
    assert 'aquifer:request_success_total{finished_reason="abort",model_name="tiny"}' in text


def test_memory(idle_server: RunningServer):
    _, memory, _ = idle_server.call("GET", "/memory")
    assert memory["budget_bytes"] == 64 << 20
    assert memory["budget"] == "64.00 MiB"
    assert memory["used_bytes"] + memory["free_bytes"] == memory["budget_bytes"]
    models = memory["models"].values()
    used_bytes = sum(model["weights_bytes"] + model["prefix_bytes"] for model in models)
    assert used_bytes == memory["used_bytes"]
    assert memory["mapped_pages"] + memory["free_pages"] == (64 << 20) // memory["page_bytes"]
    assert memory["process_resident_bytes"] > 0


def test_health_and_version(idle_server: RunningServer):
    assert idle_server.call("GET", "/health")[0] == 200
    assert idle_server.call("GET", "/version")[1].keys() == {"version"}
