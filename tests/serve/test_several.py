"""Several completions a prompt, beam search and retained prefixes, over the real engine."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.serve.running import RunningServer, eventually

from aquifer import LLM, BeamSearchParams, RequestError, SamplingParams

COMPLETIONS, PREFIXES = "/v1/completions", "/v1/prefixes"
LONG = "A prompt that takes several pages of the cache. " * 15
# Token ids of letters: outputs of seeded requests over these have no partial characters.
LETTERS = list(range(6 + 64, 6 + 64 + 20))
SEEDED: dict[str, Any] = {"seed": 5, "extra_body": {"allowed_token_ids": LETTERS}}


@pytest.fixture
def client(idle_server: RunningServer) -> openai.OpenAI:
    return idle_server.openai()


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, memory="64MiB", seed=1) as llm:
        yield llm


def _complete(client: openai.OpenAI, prompt: Any = "Once", **options: Any) -> Any:
    return client.completions.create(**({"model": "tiny", "prompt": prompt} | options))


def test_completions_differ_and_are_reproducible(client: openai.OpenAI):
    answer = _complete(client, **SEEDED, n=4, max_tokens=20)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 4
    assert answer.usage.completion_tokens == 80
    streamed = [""] * 4
    for chunk in _complete(client, **SEEDED, n=4, max_tokens=20, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    # The first completion equals that of a request with n=1.
    assert _complete(client, **SEEDED, max_tokens=20).choices[0].text == texts[0]


def test_greedy_completions_are_alike(client: openai.OpenAI):
    options = {"temperature": 0, "extra_body": SEEDED["extra_body"], "max_tokens": 12}
    texts = {choice.text for choice in _complete(client, **options, n=3).choices}
    assert texts == {_complete(client, **options).choices[0].text}


def test_the_best_of_several(client: openai.OpenAI):
    all_of_them = _complete(client, **SEEDED, n=5, max_tokens=12, logprobs=0).choices
    by_logprob = sorted(all_of_them, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    answer = _complete(client, **SEEDED, n=2, best_of=5, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in by_logprob[:2]]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage.completion_tokens == 60


def test_a_stop_string_ends_one_completion(client: openai.OpenAI):
    texts = [choice.text for choice in _complete(client, **SEEDED, n=3, max_tokens=30).choices]
    stop = texts[1][4:8]
    for stream in (False, True):
        stopped = ["", "", ""]
        answer = _complete(client, **SEEDED, n=3, max_tokens=30, stop=stop, stream=stream)
        for part in list(answer) if stream else [answer]:
            for choice in part.choices:
                stopped[choice.index] += choice.text
        assert stopped == [text.partition(stop)[0] for text in texts]


def test_chat_with_several_answers(client: openai.OpenAI):
    messages: list[Any] = [{"role": "user", "content": "Tell me a story."}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, n=2, max_tokens=10, **SEEDED
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len({choice.message.content for choice in answer.choices}) == 2


def test_beam_search_is_the_same_over_http(client: openai.OpenAI, llm: LLM):
    params = BeamSearchParams(beam_width=3, max_tokens=10, length_penalty=0.7)
    (expected,) = llm.beam_search("Once", params, use_tqdm=False)
    scores = [completion.cumulative_logprob or 0.0 for completion in expected.outputs]
    lengths = [len(completion.token_ids) ** 0.7 for completion in expected.outputs]
    ranked = [score / length for score, length in zip(scores, lengths, strict=True)]
    assert ranked == sorted(ranked, reverse=True)
    body = {"use_beam_search": True, "length_penalty": 0.7}
    answer = _complete(client, n=3, max_tokens=10, extra_body=body)
    assert [choice.text for choice in answer.choices] == [c.text for c in expected.outputs]


def test_all_methods_in_one_batch(llm: LLM):
    beams = BeamSearchParams(beam_width=2, max_tokens=9).sampling_params()
    several = SamplingParams(n=2, best_of=3, seed=1, max_tokens=12)
    greedy = SamplingParams(temperature=0, max_tokens=15)
    params = [beams, greedy, several, beams, greedy]
    prompts = ["Once", "upon", "a", "time", "there"]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, one, use_tqdm=False)
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=2),
        SamplingParams(best_of=2),
        SamplingParams(use_beam_search=True),
    ],
)
def test_streams_have_one_completion(llm: LLM, params: SamplingParams):
    with pytest.raises(RequestError, match=r"stream\(\) gives one completion"):
        next(llm.stream("Once", params))


def test_a_client_of_several_completions_leaves(idle_server: RunningServer):
    body = {"model": "tiny", "prompt": "x", "n": 4, "max_tokens": 2000, "ignore_eos": True}
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection((str(idle_server.host), idle_server.port)) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        eventually(lambda: idle_server.memory_in_use()["running"] > 0, "the request runs")
        received = b""
        while received.count(b"data: ") < 8:
            received += connection.recv(4096)
    # idle_server asserts that the memory comes back, long before 2000 tokens.


def test_a_second_prompt_of_the_same_tokens_is_cached(idle_server: RunningServer):
    def cached_tokens(**options: Any) -> tuple[int, str]:
        body = {"model": "tiny", "prompt": LONG, "temperature": 0, "max_tokens": 8, **options}
        _, answer, _ = idle_server.call("POST", COMPLETIONS, body)
        details = answer["usage"]["prompt_tokens_details"]
        return details["cached_tokens"], answer["choices"][0]["text"]

    hits_before = _counter(idle_server, "aquifer:prefix_cache_hits_total")
    (first, text), (second, same), (third, _) = (cached_tokens() for _ in range(3))
    assert first == 0 < second == third
    assert same == text
    assert _counter(idle_server, "aquifer:prefix_cache_hits_total") - hits_before == second * 2
    assert cached_tokens(cache_salt="own") == (0, text)
    assert cached_tokens(cache_salt="own") == (second, text)
    assert cached_tokens(n=3)[0] == second


def test_a_pinned_prefix_is_found(idle_server: RunningServer):
    prompt = "Pinned: " + LONG
    body = {"model": "tiny", "prompt": prompt, "cache_salt": "pinned"}
    status, prefix, _ = idle_server.call("POST", PREFIXES, body)
    assert status == 200
    assert prefix["num_tokens"] > 0
    prompts = {**body, "prompt": [prompt, prompt + " and then"], "max_tokens": 4}
    idle_server.call("POST", COMPLETIONS, prompts)
    _, answer, _ = idle_server.call("POST", COMPLETIONS, prompts)
    cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached_tokens >= 2 * prefix["num_tokens"] - 2  # each prompt computes its last token
    assert idle_server.call("DELETE", f"{PREFIXES}/{prefix['id']}")[0] == 200


def test_a_prefix_is_pinned_in_process(llm: LLM):
    with pytest.raises(RequestError, match=r"it must have at least \d+, since blocks of KV"):
        llm.pin_prefix([1])
    num_tokens = llm.pin_prefix({"prompt": LONG, "cache_salt": "pinned"})
    assert num_tokens > 0
    prompt = {"prompt": LONG + "And?", "cache_salt": "pinned"}
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.num_cached_tokens >= num_tokens
    llm.unpin_prefix({"prompt": LONG, "cache_salt": "pinned"})


def _counter(server: RunningServer, name: str) -> float:
    """A counter of the model "tiny"."""
    _, text, _ = server.call("GET", "/metrics")
    found = re.search(rf'^{name}{{model_name="tiny"}} (\S+)$', text, re.MULTILINE)
    assert found is not None
    return float(found[1])
