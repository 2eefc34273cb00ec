"""Several completions a prompt and pinned prefixes over HTTP, on an engine without a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.serve.running import RunningServer, eventually, running

COMPLETIONS, CHAT, PREFIXES = "/v1/completions", "/v1/chat/completions", "/v1/prefixes"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    with running(["-m", "tests.serve.fake_server", str(checkpoint), "0"]) as server:
        yield server
    assert server.problems == ""


@pytest.fixture(scope="module")
def server_with_keys(checkpoint: Path) -> Iterator[RunningServer]:
    """A server where the keys "one" and "two" share no prefixes."""
    with running(
        ["-m", "tests.serve.fake_server", str(checkpoint), "0", "--keys", "one, two"]
    ) as server:
        yield server
    assert server.problems == ""


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.openai()


def _complete(client: openai.OpenAI, prompt: Any = "hello", **options: Any) -> Any:
    return client.completions.create(**({"model": "fake", "prompt": prompt} | options))


def _chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**({"model": "fake", "messages": HELLO} | options))


def _metric(server: RunningServer, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    _, text, _ = server.call("GET", "/metrics")
    samples = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    return sum(float(value) for given, value in samples if wanted <= set(given.split(",")))


# ---- several completions


def test_each_completion_is_a_choice(client: openai.OpenAI):
    answer = _complete(client, n=3, max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == ["aaaaa", "bbbb", "ccc"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 12
    chat = _chat(client, n=2, max_tokens=3)
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert [choice.message.content for choice in chat.choices] == ["aaa", "bb"]
    assert chat.usage.completion_tokens == 5


def test_choices_of_several_prompts_follow_one_another(client: openai.OpenAI):
    answer = _complete(client, ["x", "y"], n=2, max_tokens=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["xaaa", "xbb", "yaaa", "ybb"]
    assert answer.usage.prompt_tokens == 2


def test_choices_are_streamed_side_by_side(client: openai.OpenAI):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = _complete(client, ["x", "y"], n=2, max_tokens=4, echo=True, **options)
    texts = [""] * 4
    reasons: list[list[str | None]] = [[], [], [], []]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index].append(choice.finish_reason)
    assert texts == ["xaaaa", "xbbb", "yaaaa", "ybbb"]
    assert all(of_choice.pop() == "length" for of_choice in reasons)
    assert not any(any(of_choice) for of_choice in reasons)
    assert chunks[1].choices[0].index != chunks[0].choices[0].index
    assert usage.choices == []
    assert usage.usage.completion_tokens == 14


def test_choices_of_a_streamed_chat_each_name_the_role(client: openai.OpenAI):
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in _chat(client, n=3, max_tokens=5, stream=True):
        seen[chunk.choices[0].index].append(chunk.choices[0])
    for index, choices in seen.items():
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (4 - index)
        assert "".join(choice.delta.content for choice in choices) == "abc"[index] * (5 - index)
        assert choices[-1].finish_reason == "length"


def test_a_stream_is_done_once(server: RunningServer):
    body = {"prompt": "hello", "n": 3, "max_tokens": 5, "stream": True}
    _, text, _ = server.call("POST", COMPLETIONS, body)
    assert text.count("data: [DONE]") == 1
    assert text.endswith("data: [DONE]\n\n")


def test_logprobs_of_each_choice(client: openai.OpenAI):
    whole = _complete(client, n=2, max_tokens=4, logprobs=0)
    assert [choice.logprobs.token_logprobs for choice in whole.choices] == [[-1] * 4, [-0.5] * 3]
    assert whole.choices[1].logprobs.text_offset == [0, 1, 2]
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for chunk in _complete(client, n=2, max_tokens=4, logprobs=0, stream=True):
        offsets[chunk.choices[0].index] += chunk.choices[0].logprobs.text_offset
    assert offsets == {0: [0, 1, 2, 3], 1: [0, 1, 2]}


def test_the_best_are_chosen_and_all_are_counted(client: openai.OpenAI):
    answer = _complete(client, n=2, best_of=4, max_tokens=6)
    # Letters a to d: 6 at -1, 5 at -1/2, 4 at -1/3, 3 at -1/4.
    assert [choice.text for choice in answer.choices] == ["ddd", "cccc"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage.completion_tokens == 18
    with_logprobs = _complete(client, n=1, best_of=2, max_tokens=3, logprobs=0)
    assert with_logprobs.choices[0].logprobs.token_logprobs == [-0.5, -0.5]


def test_all_that_were_generated_may_be_wanted(client: openai.OpenAI):
    for stream in (False, True):
        answer = _complete(client, n=2, best_of=2, max_tokens=2, stream=stream)
        chunks = list(answer) if stream else [answer]
        texts = ["", ""]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.text
        assert texts == ["aa", "b"]


def test_beams_come_whole(client: openai.OpenAI):
    options = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    answer = _complete(client, n=2, best_of=4, max_tokens=3, extra_body=options)
    assert [choice.text for choice in answer.choices] == ["aaa", "bbb"]
    assert answer.usage.completion_tokens == 6
    chat = _chat(client, n=2, max_tokens=3, extra_body=options)
    assert [choice.message.content for choice in chat.choices] == ["aaa", "bbb"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (COMPLETIONS, {"n": 0}, "n", "n is 0"),
        (COMPLETIONS, {"n": 129}, "n", "from 1 to 128"),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of", "from n, which is 3"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        (COMPLETIONS, {"length_penalty": 1e6}, "length_penalty", "length_penalty is"),
        (COMPLETIONS, {"length_penalty": 0.5}, "length_penalty", "without use_beam_search"),
        (COMPLETIONS, {"early_stopping": "soon"}, "early_stopping", "early_stopping"),
        (COMPLETIONS, {"early_stopping": True}, "early_stopping", "without use_beam_search"),
        (COMPLETIONS, {"use_beam_search": True, "logprobs": 1}, "logprobs", "use_beam_search"),
        (COMPLETIONS, {"use_beam_search": True, "stop": "x"}, "stop", "use_beam_search"),
        (COMPLETIONS, {"cache_salt": ""}, "cache_salt", "cache_salt"),
        (CHAT, {"n": 129}, "n", "from 1 to 128"),
        (CHAT, {"max_tokens": 0, "max_completion_tokens": 1}, "max_tokens", "max_tokens is 0"),
        (CHAT, {"early_stopping": "never"}, "early_stopping", "without use_beam_search"),
        (CHAT, {"use_beam_search": True, "stream": True}, "use_beam_search", "be streamed"),
    ],
)
def test_what_cannot_be_had(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, words: str
):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    status, answer, _ = server.call("POST", path, prompt | fields)
    assert status == 400
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]


def test_best_of_is_no_field_of_chat(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="no field 'best_of'"):
        _chat(client, max_tokens=2, extra_body={"best_of": 3})


def test_a_stop_string_ends_its_own_completion_only(server: RunningServer):
    options = {"n": 3, "max_tokens": 10**5, "stop": ["bbb"], "stream": True}
    with _complete(server.openai(), **options) as stream:
        for chunk in stream:
            if chunk.choices[0].finish_reason is not None:
                break
        assert chunk.choices[0].index == 1
        assert chunk.choices[0].stop_reason == "bbb"
        eventually(lambda: server.memory_in_use()["kv_bytes"] == {"fake": 2 * 1024}, "two are left")
        assert {next(stream).choices[0].index for _ in range(10)} == {0, 2}
    eventually(lambda: server.memory_in_use()["kv_bytes"] == {"fake": 0}, "none is left")


def test_all_may_end_with_stop_strings(server: RunningServer):
    options = {"n": 3, "max_tokens": 10**5, "stop": ["aaa", "bb", "cccc"]}
    answer = _complete(server.openai(), **options)
    assert [choice.text for choice in answer.choices] == ["", "", ""]
    assert [choice.stop_reason for choice in answer.choices] == ["aaa", "bb", "cccc"]
    assert answer.usage.completion_tokens == 9
    eventually(lambda: server.memory_in_use()["kv_bytes"] == {"fake": 0}, "none is left")


def test_an_error_ends_all_completions(server: RunningServer):
    body = {"prompt": "lose", "n": 3, "max_tokens": 10}
    status, answer, _ = server.call("POST", COMPLETIONS, body)
    assert (status, answer["error"]["message"]) == (503, "lost on purpose")
    _, text, _ = server.call("POST", COMPLETIONS, body | {"stream": True})
    assert "lost on purpose" in text
    assert server.call("POST", COMPLETIONS, body | {"prompt": "x"})[0] == 200


def test_metrics_count_completions(server: RunningServer):
    def counts() -> tuple[float, ...]:
        return (
            _metric(server, "aquifer:request_success_total", finished_reason="length"),
            _metric(server, "aquifer:prompt_tokens_total"),
            _metric(server, "aquifer:generation_tokens_total"),
            _metric(server, "aquifer:time_to_first_token_seconds_count"),
            _metric(server, "aquifer:request_decode_time_seconds_count"),
        )

    before = counts()
    body = {"prompt": "hello", "max_tokens": 5}
    server.call("POST", COMPLETIONS, body | {"n": 2, "best_of": 3})
    after = counts()
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 5, 12, 3, 3]
    server.call("POST", COMPLETIONS, body | {"n": 2, "use_beam_search": True})
    last = counts()
    assert [b - a for a, b in zip(after, last, strict=True)] == [2, 5, 10, 2, 0]


# ---- retained prefixes


def test_cached_tokens_are_reported(server: RunningServer):
    def cached_tokens(**options: Any) -> int:
        body = {"prompt": "what was there before", "max_tokens": 3, **options}
        _, answer, _ = server.call("POST", COMPLETIONS, body)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    before = _metric(server, "aquifer:prefix_cache_hits_total")
    num_tokens = server.call("POST", "/tokenize", {"prompt": "what was there before"})[1]["count"]
    assert [cached_tokens(), cached_tokens(), cached_tokens(n=3)] == [0, *[num_tokens - 1] * 2]
    assert _metric(server, "aquifer:prefix_cache_hits_total") - before == 2 * (num_tokens - 1)
    assert _metric(server, "aquifer:prefix_cache_queries_total") >= 3 * num_tokens
    # Requests match only prefixes with their own salt.
    assert [cached_tokens(cache_salt="s"), cached_tokens(cache_salt="s")] == [0, num_tokens - 1]
    assert cached_tokens(cache_salt="t") == 0


def test_a_prefix_is_pinned_and_unpinned(server: RunningServer):
    body = {"model": "fake", "messages": HELLO}
    status, pinned, _ = server.call("POST", PREFIXES, body)
    tokens = {"add_generation_prompt": False, **body}
    num_tokens = server.call("POST", "/tokenize", tokens)[1]["count"]
    assert status == 200
    assert pinned["object"] == "prefix"
    assert pinned["num_tokens"] == num_tokens - 1
    # The engine is asked once: it would refuse to pin the same prefix again.
    assert server.call("POST", PREFIXES, body)[1] == pinned
    assert server.call("GET", PREFIXES)[1] == {"object": "list", "data": [pinned]}
    _, other, _ = server.call("POST", PREFIXES, {"prompt": [7, 8, 9], "cache_salt": "s"})
    assert [card["id"] for card in server.call("GET", PREFIXES)[1]["data"]] == [
        pinned["id"],
        other["id"],
    ]
    for prefix in (pinned, other):
        status, answer, _ = server.call("DELETE", f"{PREFIXES}/{prefix['id']}")
        assert (status, answer["id"], answer["deleted"]) == (200, prefix["id"], True)
        status, answer, _ = server.call("DELETE", f"{PREFIXES}/{prefix['id']}")
        assert (status, answer["error"]["param"]) == (404, "prefix_id")
    assert server.call("GET", PREFIXES)[1]["data"] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "x", "messages": HELLO}, "either prompt or messages"),
        ({"prompt": ["x"]}, "must be a text or a list of token ids"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [10**6]}, "token id 1000000"),
        ({"prompt": "huge"}, "too much to keep"),
    ],
)
def test_what_cannot_be_pinned(server: RunningServer, body: dict[str, Any], words: str):
    status, answer, _ = server.call("POST", PREFIXES, body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert server.call("GET", PREFIXES)[1]["data"] == []


def test_keys_keep_prefixes_apart(server_with_keys: RunningServer):
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))

    def cached_tokens(headers: dict[str, str], **options: Any) -> int:
        body = {"prompt": "a secret", "max_tokens": 1, **options}
        _, answer, _ = server_with_keys.call("POST", COMPLETIONS, body, headers)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached_tokens(one) == 0
    assert cached_tokens(two) == 0
    assert cached_tokens(one) == cached_tokens(two) > 0
    assert cached_tokens(one, cache_salt="s") == 0
    assert cached_tokens(two, cache_salt="s") == 0

    _, pinned, _ = server_with_keys.call("POST", PREFIXES, {"prompt": "mine"}, one)
    assert server_with_keys.call("GET", PREFIXES, headers=two)[1]["data"] == []
    path = f"{PREFIXES}/{pinned['id']}"
    assert server_with_keys.call("DELETE", path, headers=two)[0] == 404
    assert server_with_keys.call("DELETE", path, headers=one)[0] == 200


def test_any_of_the_keys_is_right(server_with_keys: RunningServer):
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("one, two", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert server_with_keys.call("GET", "/v1/models", headers=headers)[0] == status
