"""Outputs of a step as lists of numbers."""

from __future__ import annotations

from typing import Any

from aquifer.engine.outputs import TokenLogprobs, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import QueueFullError
from aquifer.serve.messages import Outputs, first_number, process_of
from aquifer.serve.open_completions import OpenCompletions


def numbers_of(**first: int) -> OpenCompletions:
    """Requests of two completions each, by the number of the first one."""
    numbers = OpenCompletions()
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
    others = [(5, last), (6, scored), (7, first)]
    expected = Outputs([4, 7], token_ids=[7, 8], others=others)
    assert numbers.pack(outputs) == (expected, frozenset({"model"}))


def test_several_tokens_at_once():
    packed, completed = numbers_of(a=4, b=6).pack([output("a", 1, 2, 3), output("b", 4, index=1)])
    assert list(packed.tokens()) == [(4, [1, 2, 3]), (7, [4])]
    assert not completed


def test_what_has_ended_is_forgotten():
    numbers = numbers_of(a=0, b=2, c=4)
    numbers.pack([output("a", 1, finish_reason="stop")])
    assert len(numbers) == 3
    numbers.pack([output("a", 1, index=1, finish_reason="stop")])
    assert len(numbers) == 2
    _, completed = numbers.pack([output("b", finish_reason="error", error="lost")])
    assert not completed
    numbers.end("c", 0)
    numbers.end("c", 0)
    assert len(numbers) == 1
    numbers.end("c", None)
    numbers.end("c", None)
    assert len(numbers) == 0
    assert numbers.pack([output("c", 1), output("c", finish_reason="stop")]) == (
        Outputs(),
        frozenset(),
    )


def test_the_last_outputs_end_completions_elsewhere_too():
    """The first process sees nothing but packed outputs."""
    theirs, ours = numbers_of(a=0, b=2, c=4), numbers_of(a=0, b=2, c=4)
    for step in (
        [output("a", 1, finish_reason="stop"), output("b", 1)],
        [output("a", 1, index=1, finish_reason="length")],
        [output("b", finish_reason="error", error="lost")],
    ):
        packed, _ = theirs.pack(step)
        ours.end_with(packed)
        assert len(ours) == len(theirs)
    assert ("a" in ours, "b" in ours, "c" in ours) == (False, False, True)
    assert ours.num_requests == {"model": 1}
    ours.end_with(Outputs(refused={4: QueueFullError("full"), 99: QueueFullError("unknown")}))
    assert len(ours) == ours.num_requests.total() == 0


def test_one_number_of_each_request_is_left_when_all_are_lost():
    numbers = numbers_of(a=0, b=2)
    numbers.end("a", 0)
    assert numbers.take_all() == [1, 2]
    assert len(numbers) == numbers.num_requests.total() == 0
    assert numbers.take_all() == []


def test_each_web_process_gets_its_own():
    """Numbers say which process a completion is of, however many it has numbered before."""
    one, two = first_number(1) + 10**6, first_number(2)
    assert [process_of(number) for number in (0, one, two - 1, two)] == [0, 1, 1, 2]
    last, error = output("b", finish_reason="stop"), QueueFullError("full")
    outputs = Outputs([one, two, one + 1], [], [1, 2, 3], [(two + 1, last)], {0: error})
    assert outputs.by_process() == {
        0: Outputs(refused={0: error}),
        1: Outputs([one, one + 1], [], [1, 3]),
        2: Outputs([two], [], [2], [(two + 1, last)]),
    }
    several = Outputs([one, two, one + 1], [1, 2, 1], [1, 2, 3, 4])
    assert several.by_process() == {
        1: Outputs([one, one + 1], [1, 1], [1, 4]),
        2: Outputs([two], [2], [2, 3]),
    }
    assert Outputs().by_process() == {}


def test_requests_of_a_web_process_are_found():
    assert numbers_of(a=first_number(1), b=first_number(2), c=0).of_process(2) == ["b"]
