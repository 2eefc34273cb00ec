"""When a step is to be launched before more requests are added."""

from __future__ import annotations

import pytest
from tests.engine.life import Case, Open

from aquifer.engine.pipeline import Pipeline

_STEP_TOKENS = 127
"""Tokens of a full step: more than enough for a device that idles, before one has been timed."""


def prompts_until_due(open_world: Open, cases: dict[str, list[Case]], *, is_behind: bool) -> int:
    """Add requests until a step is due, without steps; returns how many there are."""
    world = open_world(
        models={"m": "llama"},
        num_ahead=int(is_behind),
        is_behind=is_behind,
        max_num_seqs=4,
        max_num_batched_tokens=_STEP_TOKENS,
    )
    for number in range(1, 500):
        world.send("m", cases["llama"][0])
        if world.engine.should_step:
            world.step()
            is_due = bool(world.engine.should_step)
            assert not is_due, "the device works, and nothing was added"
            return number
    return 0


def test_a_device_that_idles_is_given_what_there_is(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    number = prompts_until_due(open_world, cases, is_behind=True)
    assert number > 1
    assert number * len(cases["llama"][0].prompt) < _STEP_TOKENS


def test_a_device_that_works_is_given_a_full_step(
    open_world: Open, cases: dict[str, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "are_done", property(lambda _: False))
    number = prompts_until_due(open_world, cases, is_behind=True)
    num_tokens = len(cases["llama"][0].prompt)
    assert (number - 1) * num_tokens < _STEP_TOKENS <= number * num_tokens


@pytest.mark.parametrize("is_done", [False, True])
def test_who_asks_is_told_that_a_device_that_works_is_waited_for(
    open_world: Open, cases: dict[str, list[Case]], monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    world = open_world(models={"m": "llama"}, num_ahead=1, is_behind=True)
    waits: list[bool] = []
    world.engine.on_wait = lambda: waits.append(True)
    monkeypatch.setattr(Pipeline, "are_done", property(lambda _: is_done))
    world.send("m", cases["llama"][0])
    world.finish()
    assert not waits if is_done else len(waits) > 1


def test_where_steps_are_waited_for_none_is_due(
    open_world: Open, cases: dict[str, list[Case]]
) -> None:
    assert prompts_until_due(open_world, cases, is_behind=False) == 0


def test_what_is_retained_of_a_prompt_does_not_fill_a_step(
    open_world: Open, cases: dict[str, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = open_world(
        models={"m": "llama"},
        num_ahead=1,
        is_behind=True,
        max_num_seqs=4,
        max_num_batched_tokens=_STEP_TOKENS,
    )
    longest = max(cases["llama"], key=lambda case: len(case.prompt))
    world.send("m", longest)
    world.finish()
    monkeypatch.setattr(Pipeline, "are_done", property(lambda _: False))
    number = 1
    world.send("m", longest)
    while not world.engine.should_step:
        world.send("m", longest)
        number += 1
    assert (number - 1) * len(longest.prompt) >= _STEP_TOKENS
