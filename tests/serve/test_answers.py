"""Events of streams: those made from a template are those made from objects."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquifer.engine.params import SamplingParams
from aquifer.serve.answers import ChatWriter, CompletionWriter, Piece, PieceBuffer, event_of
from aquifer.serve.generation import EncodedPrompt, Job
from aquifer.serve.models import TextModel
from aquifer.text import Delta

MODEL = 'a "model"\nwith \\ signs'
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1)


def job() -> Job:
    model = TextModel(MODEL, Path(), None, {})
    return Job.prepare(
        model, EncodedPrompt(None, [1]), SamplingParams(n=2), "id", 0.0, None, "client"
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
