"""Streams of outputs and the pause between two batches, by a clock that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from aquifer.engine.outputs import FinishReason, TokenOutput
from aquifer.engine.params import Request, SamplingParams
from aquifer.errors import EngineError
from aquifer.serve.streams import MOST_PAUSE_S, Arrival, Output, Pacer, Tokens, TokenStream

MANY = 1000  # streams: the pause is the longest one


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s


class Bench:
    """A stream with its consumer, and a pacer that counts other streams."""

    def __init__(self, loop: Loop, num_streams: int, params: SamplingParams) -> None:
        self._loop = loop
        self.aborted: list[tuple[str, int | None]] = []
        pacer = Pacer()
        for _ in range(num_streams - 1):
            pacer.open()
        request = Request("r", "model", [1], params, 0.0)
        self.stream = TokenStream([request], self._abort, pacer)
        self.batches: list[list[list[int]]] = []
        self.consumer = loop.create_task(self._consume())

    def _abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    async def _consume(self) -> None:
        async for batch in self.stream:
            accepted = [item for item in batch if self.stream.accepts(item)]
            self.batches.append(
                [i.token_ids if isinstance(i, Tokens) else i.output.token_ids for i in accepted]
            )

    async def put(self, token_id: int, is_first: bool = False) -> None:
        tokens = Tokens("r", 0, [token_id], [self._loop.now_s])
        self.stream.put(tokens, self._loop.now_s, is_first)
        await settle()

    async def finish(self, token_id: int, reason: FinishReason = "length") -> None:
        output = TokenOutput("r", [token_id], finish_reason=reason)
        self.stream.put(Output(output, self._loop.now_s), self._loop.now_s, True)
        await settle()

    async def pass_s(self, seconds: float) -> None:
        self._loop.now_s += seconds
        await settle()


async def settle() -> None:
    """Let all tasks run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(
    test: Callable[[Bench], Awaitable[Any]],
    num_streams: int = MANY,
    params: SamplingParams | None = None,
) -> None:
    loop = Loop()

    async def main() -> None:
        bench = Bench(loop, num_streams, params or SamplingParams())
        await settle()
        try:
            await test(bench)
        finally:
            bench.consumer.cancel()
            await asyncio.gather(bench.consumer, return_exceptions=True)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_outputs_soon_after_a_batch_come_together():
    async def test(bench: Bench) -> None:
        await bench.put(1, is_first=True)
        assert bench.batches == [[[1]]]
        await bench.pass_s(0.3 * MOST_PAUSE_S)
        await bench.put(2)
        await bench.pass_s(0.3 * MOST_PAUSE_S)
        await bench.put(3)
        assert bench.batches == [[[1]]]
        await bench.pass_s(0.4 * MOST_PAUSE_S)
        assert bench.batches == [[[1]], [[2], [3]]]
        await bench.pass_s(MOST_PAUSE_S)
        await bench.put(4)  # the pause is over
        assert bench.batches[2:] == [[[4]]]

    run(test)


def test_the_last_output_waits_for_nothing():
    async def test(bench: Bench) -> None:
        await bench.put(1, is_first=True)
        await bench.put(2)
        await bench.finish(3)
        assert bench.batches == [[[1]], [[2], [3]]]
        assert bench.consumer.done()

    run(test)


def test_few_streams_have_next_to_no_pause():
    async def test(bench: Bench) -> None:
        await bench.put(1, is_first=True)
        await bench.pass_s(0.03 * MOST_PAUSE_S)
        await bench.put(2)
        assert bench.batches == [[[1]], [[2]]]

    run(test, num_streams=1)


def test_a_stream_that_stops_at_a_text_has_no_pause():
    async def test(bench: Bench) -> None:
        for token_id in (1, 2, 3):
            await bench.put(token_id)
        assert bench.batches == [[[1]], [[2]], [[3]]]

    run(test, params=SamplingParams(stop=["x"]))


def test_an_error_comes_at_once_and_after_the_outputs_before_it():
    async def test(bench: Bench) -> None:
        await bench.put(1, is_first=True)
        await bench.put(2)
        bench.stream.fail(EngineError("gone"))
        await settle()
        assert bench.batches == [[[1]], [[2]]]
        with pytest.raises(EngineError, match="gone"):
            await bench.consumer

    run(test)


def test_outputs_of_an_aborted_completion_are_not_accepted():
    async def test(bench: Bench) -> None:
        await bench.put(1, is_first=True)
        bench.stream.abort("r", 0)
        assert bench.aborted == [("r", 0)]
        for item in (Tokens("r", 0, [2], [0.0]), Output(TokenOutput("r", [2], 0), 0.0)):
            assert not bench.stream.accepts(item)
        assert bench.stream.accepts(Tokens("r", 1, [3], [0.0]))

    run(test, params=SamplingParams(n=2))


class Shortcut:
    """Takes batches of tokens while it is open."""

    def __init__(self) -> None:
        self.is_open = True
        self.error: Exception | None = None
        self.batches: list[list[int]] = []

    def __call__(self, arrived: Sequence[Arrival]) -> bool:
        if self.error is not None:
            raise self.error
        if self.is_open:
            assert all(isinstance(item, Tokens) for item in arrived)
            self.batches.append(
                [
                    token_id
                    for item in arrived
                    if isinstance(item, Tokens)
                    for token_id in item.token_ids
                ]
            )
        return self.is_open


def test_a_shortcut_gets_tokens_and_the_consumer_what_else_there_is():
    async def test(bench: Bench) -> None:
        await bench.put(1, is_first=True)
        bench.stream.shortcut = shortcut = Shortcut()
        await bench.put(2)
        await bench.put(3)
        assert shortcut.batches == []  # there is a pause before the shortcut, too
        await bench.pass_s(MOST_PAUSE_S)
        assert shortcut.batches == [[2, 3]]
        shortcut.is_open = False
        await bench.pass_s(MOST_PAUSE_S)
        await bench.put(4)
        shortcut.is_open = True
        await bench.put(5)
        await bench.finish(6)
        assert shortcut.batches == [[2, 3]]
        assert bench.batches == [[[1]], [[4]], [[5], [6]]]
        assert bench.consumer.done()

    run(test)


def test_an_exception_of_a_shortcut_is_one_of_its_stream():
    async def test(bench: Bench) -> None:
        await bench.put(1, is_first=True)
        bench.stream.shortcut = shortcut = Shortcut()
        shortcut.error = ZeroDivisionError()
        await bench.pass_s(MOST_PAUSE_S)
        await bench.put(2)
        with pytest.raises(ZeroDivisionError):
            await bench.consumer

    run(test)


def test_a_closed_stream_aborts_once():
    async def test(bench: Bench) -> None:
        await bench.stream.aclose()
        await bench.stream.aclose()
        assert bench.aborted == [("r", None)]

    run(test)


def test_closed_streams_do_not_lengthen_the_pause():
    async def test(_: Bench) -> None:
        pacer = Pacer()
        params = SamplingParams()
        streams = [
            TokenStream([Request("r", "model", [1], params, 0.0)], lambda *_: None, pacer)
            for _ in range(MANY)
        ]
        assert pacer.pause_s == MOST_PAUSE_S
        for stream in streams:
            await stream.aclose()
            await stream.aclose()
        assert pacer.pause_s == 0

    run(test)
