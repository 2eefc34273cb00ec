"""Bodies that are made from templates or in parts are those made from objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoints import tiny_llama

from aquifer.config import ModelSpec
from aquifer.engine.outputs import Logprob, TokenLogprobs, TokenOutput
from aquifer.engine.params import SamplingParams
from aquifer.serve.answers import (
    ChatWriter,
    CompletionWriter,
    Piece,
    PieceBuffer,
    event_of,
    usage_of,
    whole_pieces,
)
from aquifer.serve.generation import EncodedPrompt, Job
from aquifer.serve.models import TextModel
from aquifer.serve.protocol.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletionResponse,
    CompletionResponse,
)
from aquifer.text import Delta

MODEL = 'a "model"\nwith \\ signs'
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1)


def job(**params: Any) -> Job:
    model = TextModel(MODEL, Path(), None, {})
    params = {"n": 2, **params}
    return Job.prepare(
        model, EncodedPrompt(None, [1]), SamplingParams(**params), "id", 0.0, None, "client"
    )


@given(texts=texts)
def test_completions(texts: list[str]):
    writer = CompletionWriter("cmpl-1", MODEL, [job(), job()])
    for job_index, index in ((0, 0), (1, 1)):
        single = [event_of(writer.chunk(job_index, index, Piece(text))) for text in texts]
        together = writer.events(job_index, index, Piece("".join(texts), texts=texts))
        assert together == b"".join(single)


@given(texts=texts)
def test_chat(texts: list[str]):
    writer, same = (ChatWriter("chatcmpl-1", MODEL, job()) for _ in range(2))
    for index in (0, 1):
        for _ in range(2):  # the first one has the role
            single = [event_of(same.chunk(index, Piece(text))) for text in texts]
            together = writer.events(index, Piece("".join(texts), texts=texts))
            # Both writers begin in the same second, or nearly.
            assert _without_time(together) == _without_time(b"".join(single))


def _without_time(events: bytes) -> list[bytes]:
    return [event.partition(b'"choices":')[2] for event in events.split(b"\n\n")]


@pytest.mark.parametrize("echo", [None, "prompt"])
def test_a_buffer_keeps_steps_apart_unless_the_prompt_precedes_them(echo: str | None):
    buffer = PieceBuffer(job(), echo)
    delta = Delta("ab", [1, 2], None, texts=["a", "b"])
    piece = buffer.add(delta)
    assert piece is not None
    assert (piece.text, list(piece.texts)) == (
        ("ab", ["a", "b"]) if echo is None else ("promptab", [])
    )
    piece = buffer.add(delta)
    assert piece is not None
    assert list(piece.texts) == ["a", "b"]


# --- whole responses -----------------------------------------------------------------------


def pieces_with(num_tokens: int, num_top: int | None) -> list[Piece]:
    """Two completions with so many tokens; their text looks like parts of JSON."""
    pieces = []
    for index in range(2):
        logprobs: list[dict[int, Logprob] | None] = [
            {
                entry: Logprob(
                    float("-inf") if entry == 1 else -0.1 * token, entry + 1, f'"{entry}é'
                )
                for entry in range((num_top or 0) + 1)
            }
            for token in range(num_tokens)
        ]
        text = '"logprobs":null, "choices":[] {"content":[]}' * index
        pieces.append(
            Piece(text, [0] * num_tokens, () if num_top is None else logprobs, "length", None)
        )
    return pieces


async def with_turns(body: Awaitable[bytes]) -> tuple[bytes, int]:
    """Return a body, and how many turns another task had meanwhile."""
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    content = await body
    task.cancel()
    return content, num_turns


sizes = pytest.mark.parametrize(
    ("num_tokens", "num_top"), [(3, None), (0, 2), (3, 0), (3, 2), (700, 20), (5000, 1)]
)


@sizes
def test_whole_completions_are_written_in_parts(num_tokens: int, num_top: int | None):
    jobs = [job(logprobs=num_top), job(logprobs=num_top)]
    pieces = [pieces_with(num_tokens, num_top), pieces_with(num_tokens, num_top)]
    if num_top is not None and num_tokens:
        # The first token of a prompt that is echoed has no log probabilities.
        pieces[0][0].logprobs = [None, *pieces[0][0].logprobs[1:]]
    writer = CompletionWriter("cmpl-1", MODEL, jobs)
    chunks = [
        writer.chunk(job_index, index, pieces[job_index][index])
        for job_index in range(2)
        for index in range(2)
    ]
    whole = CompletionResponse(
        id="cmpl-1",
        created=chunks[0].created,
        model=MODEL,
        choices=[chunk.choices[0] for chunk in chunks],
        usage=usage_of(jobs),
    )
    same = CompletionWriter("cmpl-1", MODEL, jobs)
    content, num_turns = asyncio.run(with_turns(same.response(pieces)))
    assert _choices(content) == _choices(whole.model_dump_json().encode())
    assert json.loads(content).keys() == whole.model_dump().keys()
    assert num_turns >= 4 * num_tokens * ((num_top or 0) + 1) // 4096


@sizes
def test_whole_conversations_are_written_in_parts(num_tokens: int, num_top: int | None):
    pieces = pieces_with(num_tokens, num_top)
    writer = ChatWriter("chatcmpl-1", MODEL, job(logprobs=num_top))
    chunks = [writer.chunk(index, piece) for index, piece in enumerate(pieces)]
    whole = ChatCompletionResponse(
        id="chatcmpl-1",
        created=chunks[0].created,
        model=MODEL,
        choices=[
            ChatChoice(
                index=chunk.choices[0].index,
                message=AssistantMessage(content=piece.text),
                logprobs=chunk.choices[0].logprobs,
                finish_reason="length",
            )
            for chunk, piece in zip(chunks, pieces, strict=True)
        ],
        usage=usage_of([job()]),
    )
    content, num_turns = asyncio.run(with_turns(writer.response(pieces)))
    assert content == whole.model_dump_json().encode()
    assert num_turns >= 2 * num_tokens * ((num_top or 0) + 1) // 4096


def test_a_token_that_is_part_of_a_character_has_its_own_bytes(tmp_path: Path):
    model = TextModel.load(ModelSpec("tiny", tiny_llama(tmp_path / "tiny")))
    token_ids = model.need_tokenizer().encode("é😀")
    params = SamplingParams(n=1, logprobs=0)
    part = Job.prepare(model, EncodedPrompt(None, [1]), params, "id", 0.0, None, "client")
    for token_id in token_ids:
        logprobs = TokenLogprobs([token_id], [-1.0], [1])
        part.push(TokenOutput("id", [token_id], logprobs=[logprobs]))
    (piece,) = whole_pieces(part)
    (choice,) = ChatWriter("chatcmpl-1", MODEL, part).chunk(0, piece).choices
    assert choice.logprobs is not None
    content = [entry.bytes for entry in choice.logprobs.content]
    assert len(content) == len(token_ids) > 2
    assert b"".join(map(bytes, content)).decode() == "é😀"


def _choices(body: bytes) -> tuple[bytes, bytes]:
    """What is before the time and after it, which differs between two writers."""
    before, _, after = body.partition(b'"created":')
    return before, after.partition(b",")[2]
