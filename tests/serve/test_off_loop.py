"""Work on texts beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aquifer.errors import RequestError
from aquifer.serve.off_loop import OffLoop


def refuse() -> None:
    raise RequestError("no")


def test_only_long_texts_go_to_a_thread() -> None:
    async def run() -> None:
        off_loop, here = OffLoop(slow_s=1e9), threading.get_ident()
        assert await off_loop.run(4096, threading.get_ident) == here
        assert await off_loop.run(4097, threading.get_ident) != here
        assert not off_loop.is_slow

    asyncio.run(run())


def test_a_model_that_was_slow_once_gets_threads() -> None:
    """Whether it was slow with a text or in refusing one."""

    async def run() -> None:
        here = threading.get_ident()
        off_loop = OffLoop(slow_s=0.0)
        assert await off_loop.run(1, threading.get_ident) == here
        assert off_loop.is_slow
        assert await off_loop.run(1, threading.get_ident) != here
        off_loop = OffLoop(slow_s=0.0)
        with pytest.raises(RequestError):
            await off_loop.run(1, refuse)
        assert await off_loop.run(1, threading.get_ident) != here

    asyncio.run(run())


def test_models_do_not_wait_for_the_threads_of_others() -> None:
    async def run() -> None:
        slow, other, may_end = OffLoop(), OffLoop(), threading.Event()
        running = [asyncio.create_task(slow.run(5000, may_end.wait)) for _ in range(100)]
        try:
            assert await other.run(5000, lambda: "done") == "done"
        finally:
            may_end.set()
        assert all(await asyncio.gather(*running))

    asyncio.run(run())
