"""The OpenAI endpoints through the official client, over the real engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from tests.checkpoints import CHAT_TEMPLATE, EOS_TOKEN_ID, VOCAB_SIZE
from tests.serve.running import RunningServer

# Token ids of letters: greedy outputs over these have no partial characters.
LETTERS = list(range(6 + 64, 6 + 64 + 20))
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"allowed_token_ids": LETTERS}}


@pytest.fixture
def client(idle_server: RunningServer) -> openai.OpenAI:
    return idle_server.openai()


def _complete(client: openai.OpenAI, prompt: Any = "Once", **options: Any) -> Any:
    return client.completions.create(**({"model": "tiny", "prompt": prompt} | options))


def test_models(client: openai.OpenAI):
    assert {model.id for model in client.models.list()} == {"tiny", "other"}
    assert client.models.retrieve("other").id == "other"


def test_completion(client: openai.OpenAI):
    answer = _complete(client, **GREEDY, max_tokens=12)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert len(answer.choices[0].text) == 12
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 16
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_max_tokens_defaults_to_16(client: openai.OpenAI):
    answer = _complete(client, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_models_are_chosen_by_name(client: openai.OpenAI):
    texts = {_complete(client, model=name, **GREEDY).choices[0].text for name in ("tiny", "other")}
    assert len(texts) == 2


def test_stream_is_the_same_text(client: openai.OpenAI):
    whole = _complete(client, **GREEDY, max_tokens=20).choices[0].text
    chunks = list(_complete(client, **GREEDY, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 19 + ["length"]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


def test_stream_usage_comes_last(client: openai.OpenAI):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(_complete(client, **GREEDY, max_tokens=3, **options))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 7


def test_several_prompts(client: openai.OpenAI):
    prompts = ["Once", "upon", "a time"]
    single = [_complete(client, prompt, **GREEDY).choices[0].text for prompt in prompts]
    answer = _complete(client, prompts, **GREEDY)
    assert [choice.text for choice in answer.choices] == single
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    streamed = [""] * 3
    for chunk in _complete(client, prompts, **GREEDY, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == single


def test_prompts_as_token_ids(client: openai.OpenAI, idle_server: RunningServer):
    _, tokens, _ = idle_server.call("POST", "/tokenize", {"model": "tiny", "prompt": "Once"})
    text = _complete(client, "Once", **GREEDY).choices[0].text
    assert _complete(client, tokens["tokens"], **GREEDY).choices[0].text == text
    answer = _complete(client, [tokens["tokens"], tokens["tokens"]], **GREEDY)
    assert [choice.text for choice in answer.choices] == [text, text]


def test_echo(client: openai.OpenAI):
    text = _complete(client, **GREEDY).choices[0].text
    assert _complete(client, **GREEDY, echo=True).choices[0].text == "Once" + text
    chunks = _complete(client, **GREEDY, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Once" + text


def test_stop_string_ends_the_text(client: openai.OpenAI):
    text = _complete(client, **GREEDY, max_tokens=30).choices[0].text
    stop = text[5:8]
    position = text.find(stop)
    for stream in (False, True):
        answer = _complete(client, **GREEDY, max_tokens=1000, stop=["\n\n", stop], stream=stream)
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:position]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == stop


def test_logprobs_of_completions(client: openai.OpenAI):
    whole = _complete(client, **GREEDY, max_tokens=6, logprobs=2).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.text_offset == list(range(6))
    assert all(len(top) in (2, 3) for top in whole.logprobs.top_logprobs)
    for token, logprob, top in zip(
        whole.logprobs.tokens,
        whole.logprobs.token_logprobs,
        whole.logprobs.top_logprobs,
        strict=True,
    ):
        assert top[token] == logprob < 0
    chunks = list(_complete(client, **GREEDY, max_tokens=6, logprobs=2, stream=True))
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    assert tokens == whole.logprobs.tokens
    assert offsets == whole.logprobs.text_offset


def test_logprobs_of_an_echoed_prompt(client: openai.OpenAI):
    choice = _complete(client, **GREEDY, max_tokens=2, logprobs=0, echo=True).choices[0]
    assert choice.logprobs.tokens == [*"Once", *choice.text[4:]]
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs[1:])


def test_a_prompt_is_scored_without_any_output(client: openai.OpenAI):
    options = {"logprobs": 1, "echo": True, "temperature": 0}
    longer = _complete(client, "Once upon", **options, max_tokens=1).choices[0].logprobs
    num_tokens = len(longer.tokens) - 1
    answer = _complete(client, "Once upon", **options, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == "Once upon"
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens == longer.tokens[:-1]
    assert "".join(choice.logprobs.tokens) == "Once upon"
    assert choice.logprobs.token_logprobs == longer.token_logprobs[:-1]
    assert choice.logprobs.top_logprobs == longer.top_logprobs[:-1]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    assert answer.usage.completion_tokens == 0
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunk, last = _complete(client, "Once upon", **options, max_tokens=0, **usage)
    assert chunk.choices[0] == choice
    assert last.usage.completion_tokens == 0


def test_what_would_end_an_output_does_not_matter_to_a_score(client: openai.OpenAI):
    every = {"stop_token_ids": list(range(VOCAB_SIZE))}
    stopped = _complete(client, max_tokens=1, extra_body=every)
    assert stopped.choices[0].finish_reason == "stop"
    answer = _complete(client, ["Once", "upon"], max_tokens=0, echo=True, n=2, extra_body=every)
    assert [choice.text for choice in answer.choices] == ["Once"] * 2 + ["upon"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert {choice.stop_reason for choice in answer.choices} == {None}
    assert answer.usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError, match="min_tokens is 1"):
        _complete(client, max_tokens=0, echo=True, extra_body={"min_tokens": 1})


def test_held_back_tokens_bring_their_logprobs_later(client: openai.OpenAI):
    # Most sampled bytes are parts of characters.
    options = {"max_tokens": 60, "logprobs": 1, "seed": 3, "extra_body": {"ignore_eos": True}}
    chunks = list(_complete(client, **options, stream=True))
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert len(tokens) == 60
    assert len(chunks) < 60
    assert _complete(client, **options).choices[0].logprobs.tokens == tokens


def test_same_seed_same_text_in_any_batch(client: openai.OpenAI, idle_server: RunningServer):
    options = {"seed": 7, "max_tokens": 24, "temperature": 1.0}
    alone = _complete(client, **options).choices[0].text
    assert _complete(client, **options).choices[0].text == alone
    assert _complete(client, **(options | {"seed": 8})).choices[0].text != alone

    async def among_others() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{idle_server.url}/v1", api_key="none", max_retries=0
        ) as many:
            answers = await asyncio.gather(
                *(
                    many.completions.create(
                        model="tiny",
                        prompt="Once" if i == 4 else f"noise {i}" * (i + 1),
                        **(options if i == 4 else {"max_tokens": 40}),
                    )
                    for i in range(9)
                )
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(among_others())[4] == alone


MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]


def _chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**({"model": "tiny", "messages": MESSAGES} | options))


def test_chat(client: openai.OpenAI):
    answer = _chat(client, **GREEDY, max_tokens=10)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content) == 10
    assert answer.choices[0].finish_reason == "length"
    shorter = _chat(client, **GREEDY, max_tokens=10, max_completion_tokens=4)
    assert shorter.usage.completion_tokens == 4


def test_chat_fills_the_context_by_default(client: openai.OpenAI):
    messages: list[Any] = [{"role": "user", "content": "x" * 1900}]
    usage = _chat(client, messages=messages, extra_body={"ignore_eos": True}).usage
    assert usage.total_tokens == 2048


def test_chat_content_as_parts(client: openai.OpenAI):
    text = _chat(client, **GREEDY, max_tokens=10).choices[0].message.content
    parts = [{"type": "text", "text": "Tell me a story."}]
    messages = [{"role": "user", "content": parts}]
    assert (
        _chat(client, messages=messages, **GREEDY, max_tokens=10).choices[0].message.content == text
    )


def test_chat_is_its_template_applied(client: openai.OpenAI):
    text = _chat(client, **GREEDY, max_tokens=10).choices[0].message.content
    prompt = "<|user|>Tell me a story.<|end|><|assistant|>"
    assert _complete(client, prompt, **GREEDY, max_tokens=10).choices[0].text == text
    own = {"chat_template": "{{ start }}ce", "chat_template_kwargs": {"start": "On"}}
    options = GREEDY | {"extra_body": GREEDY["extra_body"] | own}
    answer = _chat(client, **options, max_tokens=10).choices[0].message.content
    assert answer == _complete(client, "Once", **GREEDY, max_tokens=10).choices[0].text


def test_chat_stream(client: openai.OpenAI):
    text = _chat(client, **GREEDY, max_tokens=10).choices[0].message.content
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 10}
    chunks = list(_chat(client, **GREEDY, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 10


def test_logprobs_of_chat(client: openai.OpenAI):
    options = {"max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    choice = _chat(client, **GREEDY, **options).choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        ordered = [top.logprob for top in entry.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)
    chunks = _chat(client, **GREEDY, **options, stream=True)
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert streamed == choice.logprobs.content


def test_64_streams_at_once(idle_server: RunningServer):
    """Each stream is complete, and so are the counts of its tokens and of all tokens."""

    async def one(many: openai.AsyncOpenAI, index: int) -> tuple[str, Any]:
        stream = await many.completions.create(
            model=("tiny", "other")[index % 2],
            prompt=f"{index} ",
            max_tokens=16 + index % 5,
            stream=True,
            stream_options={"include_usage": True},
            temperature=0,
            extra_body=GREEDY["extra_body"],
        )
        *chunks, last = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        return "".join(chunk.choices[0].text for chunk in chunks), last.usage

    async def all_of_them() -> list[tuple[str, Any]]:
        async with openai.AsyncOpenAI(
            base_url=f"{idle_server.url}/v1", api_key="none", max_retries=0
        ) as many:
            return await asyncio.gather(*(one(many, index) for index in range(64)))

    before = idle_server.token_counts()
    answers = asyncio.run(all_of_them())
    lengths = [16 + index % 5 for index in range(64)]
    prompt_lengths = [len(f"{index} ") for index in range(64)]
    assert [len(text) for text, _ in answers] == lengths
    assert [usage.completion_tokens for _, usage in answers] == lengths
    assert [usage.prompt_tokens for _, usage in answers] == prompt_lengths
    counts = idle_server.token_counts()
    assert counts[0] - before[0] == sum(prompt_lengths)
    assert counts[1] - before[1] == sum(lengths)


def test_what_lm_eval_asks_of_a_tokenizer(idle_server: RunningServer):
    status, info, _ = idle_server.call("GET", "/tokenizer_info?model=tiny")
    assert status == 200
    assert isinstance(info["tokenizer_class"], str)
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert info["chat_template"] == CHAT_TEMPLATE
    body = {"model": "tiny", "prompt": info["eos_token"], "add_special_tokens": False}
    assert idle_server.call("POST", "/tokenize", body)[1]["tokens"] == [EOS_TOKEN_ID]
    assert idle_server.call("GET", "/tokenizer_info")[0] == 404  # two models are served
    assert idle_server.call("GET", "/tokenizer_info?model=gpt-5")[0] == 404


def test_tokenize_and_back(idle_server: RunningServer):
    text = "Grüße, 世界"
    _, tokens, _ = idle_server.call("POST", "/tokenize", {"model": "tiny", "prompt": text})
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 2048
    body = {"model": "tiny", "tokens": tokens["tokens"]}
    assert idle_server.call("POST", "/detokenize", body)[1] == {"prompt": text}
    chat = {"model": "tiny", "messages": MESSAGES, "return_token_strs": True}
    _, tokens, _ = idle_server.call("POST", "/tokenize", chat)
    assert tokens["token_strs"][0] == "<|user|>"
    assert max(tokens["tokens"]) < VOCAB_SIZE
