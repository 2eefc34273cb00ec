"""Outputs of a step as lists of numbers."""

from __future__ import annotations

from typing import Any

from aquifer.engine.outputs import TokenLogprobs, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.engine.reports import EngineStats
from aquifer.serve.messages import Step
from aquifer.serve.process import Numbers

STATS = EngineStats({}, {}, {}, 0.0, {}, {})


def numbers_of(**first: int) -> Numbers:
    """Requests of two completions each, by the number of the first one."""
    numbers = Numbers()
    for request_id, number in first.items():
        numbers.add(Request(request_id, "model", [1], SamplingParams(n=2), 0.0), number)
    return numbers


def output(request_id: str, *token_ids: int, index: int = 0, **fields: Any) -> TokenOutput:
    return TokenOutput(request_id, list(token_ids), index, **fields)


def test_tokens_alone_are_numbers_and_the_rest_are_objects():
    last = output("a", 9, index=1, finish_reason="length")
    scored = output("b", 9, logprobs=[TokenLogprobs([9], [-1.0], [1])])
    first = output("b", 9, index=1, num_cached_tokens=3)
    numbers = numbers_of(a=4, b=6)
    outputs = [output("a", 7), last, output("b", 8, index=1), scored, first]
    assert numbers.pack(outputs) == ([4, 7], [], [7, 8], [last, scored, first])


def test_several_tokens_at_once():
    packed = numbers_of(a=4, b=6).pack([output("a", 1, 2, 3), output("b", 4, index=1)])
    step = Step(*packed, {}, STATS)
    assert list(step.tokens()) == [(4, [1, 2, 3]), (7, [4])]


def test_what_has_ended_is_forgotten():
    numbers = numbers_of(a=0, b=2, c=4)
    numbers.pack([output("a", 1, finish_reason="stop")])
    assert len(numbers) == 3
    numbers.pack([output("a", 1, index=1, finish_reason="stop")])
    assert len(numbers) == 2
    numbers.pack([output("b", finish_reason="error", error="lost")])
    numbers.end("c", 0)
    numbers.end("c", 0)
    assert len(numbers) == 1
    numbers.end("c", None)
    numbers.end("c", None)
    assert len(numbers) == 0
    assert numbers.pack([output("c", 1)]) == ([], [], [], [])
