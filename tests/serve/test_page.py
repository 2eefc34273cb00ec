"""The page to look at, and the events that it shows, as a client without a browser sees them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.serve.running import PATIENCE_S, RunningServer, eventually, running

from aquifer.errors import EngineError, UnavailableError
from aquifer.serve.feed import MOST_VIEWERS, Feed
from aquifer.serve.snapshots import Shared

DEMO = ["-m", "aquifer", "serve", "demo", "--port", "0", "--memory", "64M"]


class Events:
    """The events of an open stream."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> Any:
        """The content of the next event; None at the end of the stream."""
        line = self._response.readline()
        if not line:
            return None
        assert self._response.readline() == b"\n"
        return json.loads(line.removeprefix(b"data: "))


@contextmanager
def events(server: RunningServer, **headers: str) -> Iterator[Events]:
    connection = http.client.HTTPConnection(str(server.host), server.port, timeout=PATIENCE_S)
    connection.request("GET", "/events", headers=headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    try:
        yield Events(response)
    finally:
        response.close()
        connection.close()


def test_the_page_needs_nothing_else_and_may_load_nothing_else(server: RunningServer):
    status, page, headers = server.call("GET", "/")
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    addresses = set(re.findall(r"https?://[^\"' ]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "which names the format alone"
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in page, "text of the server must not become HTML"


def test_an_event_has_memory_and_counters(idle_server: RunningServer):
    with events(idle_server) as stream:
        first = stream.next()
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
        assert idle_server.call("POST", "/v1/completions", body)[0] == 200
        generated = first["counts"]["tiny"]["generated_tokens"]
        completions = first["counts"]["tiny"]["completions"]
        later = first
        while later["counts"]["tiny"]["completions"] == completions:
            before, later = later, stream.next()
            assert later["time"] > before["time"]
        assert later["counts"]["tiny"]["generated_tokens"] == generated + 4
    _, memory, _ = idle_server.call("GET", "/memory")
    assert memory.keys() == later["memory"].keys()
    assert memory["models"].keys() == later["memory"]["models"].keys()


def test_keys_guard_the_events_and_not_the_page(keyed_server: RunningServer):
    assert keyed_server.call("GET", "/")[0] == 200
    assert keyed_server.call("GET", "/events")[0] == 401
    with events(keyed_server, Authorization="Bearer secret") as stream:
        assert "tiny" in stream.next()["memory"]["models"]


def test_each_web_process_has_them_and_an_open_page_delays_no_stop():
    with running([*DEMO, "--api-server-count", "2"]) as server:
        # The system gives a connection to either process.
        streams = [events(server) for _ in range(8)]
        opened = [stream.__enter__() for stream in streams]
        for _ in range(2):
            assert all("demo" in each.next()["memory"]["models"] for each in opened)
        assert server.stop() == 0
        for each in opened:
            while each.next() is not None:
                pass
        assert server.problems == ""


def test_a_page_that_is_closed_makes_room_for_another_one(server: RunningServer):
    with ExitStack() as opened:
        first = opened.enter_context(ExitStack())
        first.enter_context(events(server)).next()
        for _ in range(MOST_VIEWERS - 1):
            opened.enter_context(events(server))
        status, answer, headers = server.call("GET", "/events")
        assert status == 503
        assert "close one of them" in answer["error"]["message"]
        assert int(headers["retry-after"]) > 0
        first.close()
        eventually(lambda: _is_let_in(server), "another page is served")


def _is_let_in(server: RunningServer) -> bool:
    connection = http.client.HTTPConnection(str(server.host), server.port, timeout=PATIENCE_S)
    connection.request("GET", "/events")
    status = connection.getresponse().status
    connection.close()
    return status == 200


class FakeBackend:
    """A backend that counts how often it is asked, and has stopped."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def snapshot(self) -> Any:
        self.num_asked += 1
        raise EngineError("the engine process died")


def test_pages_are_limited_and_share_what_is_made():
    async def run() -> None:
        backend = FakeBackend()
        feed = Feed(backend, num_processes=2)  # type: ignore[arg-type]
        for _ in range(MOST_VIEWERS // 2):
            feed.join()
        with pytest.raises(UnavailableError, match="close one of them"):
            feed.join()
        feed.leave()
        feed.join()
        streams = [feed.events() for _ in range(5)]
        found = await asyncio.gather(*(anext(stream) for stream in streams))
        assert set(found) == {b'data: {"error": {"message": "the engine process died"}}\n\n'}
        assert backend.num_asked == 1
        feed.close()
        for stream in streams:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(run())


def test_a_value_is_made_for_all_who_wait_even_if_one_leaves():
    async def run() -> None:
        made: list[int] = []
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def make() -> int:
            made.append(len(made))
            begun.set()
            await go_on.wait()
            return made[-1]

        shared = Shared(make, 3600.0)
        first, second = (asyncio.create_task(shared.get()) for _ in range(2))
        await begun.wait()
        first.cancel()
        go_on.set()
        assert await second == 0
        assert await shared.get() == 0
        stale = Shared(make, 0.0)
        assert [await stale.get(), await stale.get()] == [1, 2]

    asyncio.run(run())
