"""Chat templates in worker processes, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from inspect import signature

import pytest

from aquifer.errors import LimitError, RequestError
from aquifer.serve.templates import Templates
from aquifer.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = ChatTemplate("{{ messages[0].content }}{{ bos_token }}{{ mood }}", {"bos_token": "<s>"})
ENDLESS = ChatTemplate(
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", {}
)
UNINTERRUPTIBLE = ChatTemplate("{{ (3 ** (10 ** 8)) % 7 }}", {})
LARGE = ChatTemplate("{{ 'a' * (10 ** 10) }}", {})


@asynccontextmanager
async def templates(max_s: float = 10.0) -> AsyncIterator[Templates]:
    renderer = Templates(max_s)
    try:
        yield renderer
    finally:
        renderer.close()


def test_conversations_are_rendered_with_variables() -> None:
    async def run() -> None:
        async with templates() as renderer:
            texts = await asyncio.gather(
                *(
                    renderer.render(f"model {i % 2}", GOOD, MESSAGES, True, {"mood": f" {i}"})
                    for i in range(40)
                )
            )
            assert texts == [f"hi<s> {i}" for i in range(40)]
            refusing = ChatTemplate("{{ raise_exception('no') }}", {})
            with pytest.raises(RequestError, match=r"refused the messages: no$") as caught:
                await renderer.render("a", refusing, MESSAGES, True, {})
            assert not isinstance(caught.value, LimitError)
            assert renderer.separated == frozenset()

    asyncio.run(run())
    assert signature(Templates).parameters["max_s"].default == 10.0


def test_a_worker_that_was_started_before_renders() -> None:
    async def run() -> None:
        async with templates() as renderer:
            renderer.start()
            renderer.start()  # is no change
            assert await renderer.render("a", GOOD, MESSAGES, True, {"mood": "!"}) == "hi<s>!"

    asyncio.run(run())


@pytest.mark.parametrize("template", [ENDLESS, UNINTERRUPTIBLE, LARGE])
def test_a_template_that_exceeds_a_limit_gets_its_own_worker(template: ChatTemplate) -> None:
    async def run() -> None:
        async with templates(max_s=0.5) as renderer:
            bad = [renderer.render("bad", template, MESSAGES, True, {}) for _ in range(3)]
            good = [renderer.render("good", GOOD, MESSAGES, True, {}) for _ in range(3)]
            answers = await asyncio.gather(*bad, *good, return_exceptions=True)
            for error in answers[:3]:
                assert isinstance(error, LimitError)
                assert "the chat template of 'bad' takes " in error.message
                assert error.param == "messages"
            assert answers[3:] == ["hi<s>"] * 3
            assert renderer.separated == {"bad"}
            renderer.forget("bad")
            assert await renderer.render("bad", GOOD, MESSAGES, True, {}) == "hi<s>"
            assert renderer.separated == frozenset()

    asyncio.run(run())
