"""The worker process for clients' input, without a server."""

from __future__ import annotations

import asyncio
import os
import signal
from inspect import signature
from pathlib import Path

import pytest
from tests.serve.running import eventually, is_running

from aquifer.errors import LimitError, RequestError
from aquifer.serve.sandbox import Sandbox
from aquifer.text.chat_template import RENDERER, ChatTemplate


def test_what_takes_too_long_is_given_up() -> None:
    """`test_errors.py` has a function that takes too much memory, over HTTP."""
    template = ChatTemplate("{{ (3 ** (10 ** 8)) % 7 }}", {})

    async def run() -> None:
        sandbox = Sandbox([RENDERER], max_s=0.5)
        try:
            with pytest.raises(
                RequestError, match=r"the chat template takes longer than 0\.5 s"
            ) as e:
                await sandbox.run(
                    "the chat template", "chat_template", template.render, [], True, {}
                )
            assert e.value.param == "chat_template"
        finally:
            sandbox.close()

    asyncio.run(run())
    assert signature(Sandbox).parameters["max_s"].default == 10.0


def test_a_worker_stays_though_its_parent_was_large() -> None:
    large = b"1" * (600 << 20)
    del large

    async def run() -> None:
        sandbox = Sandbox([])
        try:
            workers = {await sandbox.run("a number", None, os.getpid) for _ in range(3)}
            assert len(workers) == 1
            assert workers != {os.getpid()}
        finally:
            sandbox.close()

    asyncio.run(run())


def test_a_worker_that_was_killed_is_started_again() -> None:
    async def run() -> None:
        sandbox = Sandbox([])
        try:
            worker = await sandbox.run("a number", None, os.getpid)
            os.kill(worker, signal.SIGKILL)
            eventually(lambda: not is_running(worker), "it has ended")
            assert await sandbox.run("a number", None, os.getpid) != worker
        finally:
            sandbox.close()

    asyncio.run(run())


def _kill_itself(counted: Path, times: int) -> int:
    """Kill the process so many times; then return how often this was called."""
    calls = counted.stat().st_size + 1 if counted.exists() else 1
    counted.write_bytes(b"x" * calls)
    if calls <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return calls


@pytest.mark.parametrize("times", [1, 2])
def test_a_job_whose_worker_is_killed_runs_once_more(tmp_path: Path, times: int) -> None:
    """If that kills the second worker too, the job is at fault."""

    async def run() -> None:
        sandbox = Sandbox([])
        counted = tmp_path / "calls"
        try:
            if times == 1:
                assert await sandbox.run("a job", None, _kill_itself, counted, times) == 2
            else:
                with pytest.raises(LimitError, match="a job takes too much memory"):
                    await sandbox.run("a job", None, _kill_itself, counted, times)
                assert counted.stat().st_size == 2
            assert await sandbox.run("a number", None, int, "3") == 3
        finally:
            sandbox.close()

    asyncio.run(run())
