"""Routes from the messages of the engine process to streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import QueueFullError
from aquifer.serve.messages import Outputs
from aquifer.serve.routes import Routes
from aquifer.serve.streams import Pacer, Tokens, TokenStream


class Bench:
    """Routes of two requests, "a" with two completions (numbers 0, 1) and "b" with one (2)."""

    def __init__(self) -> None:
        self.routes = Routes(0)
        self.streams = {
            name: TokenStream([self._request(name, n)], lambda *_: None, Pacer())
            for name, n in (("a", 2), ("b", 1))
        }
        numbers = [
            self.routes.add(self._request(name, n), self.streams[name])
            for name, n in (("a", 2), ("b", 1))
        ]
        assert numbers == [0, 2]

    def _request(self, name: str, n: int) -> Request:
        return Request(name, "model", [1], SamplingParams(n=n), 0.0)

    def deliver(
        self, numbers: list[int], token_ids: list[int], *others: TokenOutput, **fields: Any
    ) -> None:
        numbered = [
            ({"a": 0, "b": 2}[output.request_id] + output.index, output) for output in others
        ]
        outputs = Outputs(numbers, token_ids=token_ids, others=numbered, **fields)
        self.routes.deliver(outputs, 1.0)

    async def batch(self, name: str) -> list[tuple[int, list[int]]]:
        """The next batch of a stream: indexes of completions, and tokens."""
        async with asyncio.timeout(60):
            arrived = await anext(self.streams[name])
        return [
            (item.index, item.token_ids)
            if isinstance(item, Tokens)
            else (item.output.index, item.output.token_ids)
            for item in arrived
            if self.streams[name].accepts(item)
        ]


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await test(Bench())

    asyncio.run(main())


def test_tokens_go_to_their_completions_and_are_collected():
    async def test(bench: Bench) -> None:
        bench.deliver([0, 1, 2], [10, 20, 30])
        bench.deliver([2, 0], [31, 11])
        assert await bench.batch("a") == [(0, [10, 11]), (1, [20])]
        bench.deliver([0], [12])
        assert await bench.batch("a") == [(0, [12])]
        assert await bench.batch("b") == [(0, [30, 31])]

    run(test)


def test_other_outputs_stay_in_their_place():
    async def test(bench: Bench) -> None:
        bench.deliver([2], [1])
        bench.deliver([], [], TokenOutput("b", [2], num_cached_tokens=1))
        bench.deliver([2], [3])
        bench.deliver([2], [4, 5], counts=[2])
        bench.deliver([2], [6])
        bench.deliver([], [], TokenOutput("b", [7], finish_reason="stop"))
        expected = [[1], [2], [3], [4, 5], [6], [7]]
        assert [token_ids for _, token_ids in await bench.batch("b")] == expected
        assert len(bench.routes) == 1

    run(test)


def test_what_has_ended_gets_no_more():
    async def test(bench: Bench) -> None:
        assert bench.routes.end("a", 0)
        assert not bench.routes.end("a", 0)
        bench.deliver([0, 1], [1, 2], TokenOutput("a", [3], 0, finish_reason="length"))
        assert await bench.batch("a") == [(1, [2])]
        assert bench.routes.end("a")
        assert not bench.routes.end("a")
        assert len(bench.routes) == 1

    run(test)


def test_an_error_ends_a_request_whichever_completion_it_names():
    async def test(bench: Bench) -> None:
        bench.streams["a"].abort("a", 0)
        bench.routes.end("a", 0)
        bench.deliver([], [], TokenOutput("a", finish_reason="error", error="lost"))
        assert await bench.batch("a") == [(0, [])]
        assert len(bench.routes) == 1
        with pytest.raises(StopAsyncIteration):
            await bench.batch("a")

    run(test)


def test_a_refused_request():
    async def test(bench: Bench) -> None:
        bench.deliver([], [], refused={2: QueueFullError("full"), 9: QueueFullError("")})
        with pytest.raises(QueueFullError, match="full"):
            await bench.batch("b")
        assert len(bench.routes) == 1

    run(test)


def test_all_fail():
    async def test(bench: Bench) -> None:
        assert bench.routes.fail(QueueFullError("gone")) == ["a", "b"]
        for name in ("a", "b"):
            with pytest.raises(QueueFullError, match="gone"):
                await bench.batch(name)
        assert len(bench.routes) == 0

    run(test)
