"""Conversations in a terminal: what the model is asked, and what is said about speed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, cast

import pytest

from aquifer import LLM, RequestError, SamplingParams
from aquifer.chat import converse, speed
from aquifer.text import Delta

PARAMS = SamplingParams(max_tokens=4)


class Echo:
    """A model that answers with the number of the request; it refuses one text."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def stream(self, prompt: Any, params: SamplingParams) -> Generator[Delta, None, None]:
        assert params is PARAMS
        self.asked.append(prompt)
        if "refuse" in str(prompt):
            raise RequestError("too long")
        for text in ("answer ", str(len(self.asked))):
            yield Delta(text, [1], None)


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], bool], list[Any]]:
    def type_lines(lines: list[str], is_chat: bool) -> list[Any]:
        typed = iter(lines)

        def next_line(_: str) -> str:
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", next_line)
        echo = Echo()
        converse(cast(LLM, echo), PARAMS, is_chat)
        assert next(typed, None) in (None, "not read")
        return echo.asked

    return type_lines


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation_goes_on_until_it_is_cleared(type_lines: Any):
    asked = type_lines(["one", " two ", "/clear", "three", "/bye", "not read"], True)
    assert asked == [
        [_user("one")],
        [_user("one"), _assistant("answer 1"), _user("two")],
        [_user("three")],
    ]


def test_what_was_refused_is_not_in_the_conversation(
    type_lines: Any, capsys: pytest.CaptureFixture[str]
):
    asked = type_lines(["refuse this", "two"], True)
    assert asked == [[_user("refuse this")], [_user("two")]]
    assert "error: too long\n" in capsys.readouterr().err


def test_without_a_template_each_line_is_alone(type_lines: Any):
    assert type_lines(["one", "two"], False) == ["one", "two"]


def test_commands_do_not_go_to_the_model(type_lines: Any, capsys: pytest.CaptureFixture[str]):
    assert type_lines(["", "/help", "/?", "/quit", "/", "/etc/hosts", "/clear it"], False) == [
        "/etc/hosts",
        "/clear it",
    ]
    said = capsys.readouterr().err
    assert said.count("/clear  forget the conversation") == 2
    assert "no command /quit; /help lists them" in said
    assert "tokens" not in said  # standard error is no terminal


def test_speed():
    assert speed(21, 0.25, 0.1) == "[21 tokens, the first after 0.25 s, then 200.0 tokens/s]"
    assert speed(1, 0.25, 0.0) == "[1 token, the first after 0.25 s]"
