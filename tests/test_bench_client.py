"""The client of `aquifer bench serve`: streams read from sockets, and when requests are sent."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from tests.fake_openai import DONE, Answer, FakeServer, event, fake_server, text, usage

from aquifer.bench.serving.load import Load, Run, arrival_times, send
from aquifer.bench.serving.options import CHAT, COMPLETIONS
from aquifer.bench.serving.target import Target
from aquifer.errors import ConfigError

pytestmark = pytest.mark.usefixtures("imports_left_out")  # a load begins with a full collection

THREE = text("a", "b", "c")


def run(server: FakeServer, count: int = 1, endpoint: str = COMPLETIONS, **load: Any) -> Run:
    arrivals_s = load.pop("arrivals_s", [0.0] * count)
    return send(Target.reach(server.url), Load(endpoint, [b"{}"] * count, arrivals_s, **load))


# --- streams ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer((text("a"), text("b"), text("c"), usage(7), DONE)),
        Answer((THREE + usage(7) + DONE,)),
        Answer((THREE[:2], THREE[2:9], THREE[9:-1], b"\n" + usage(7)[:30], usage(7)[30:] + DONE)),
        Answer((THREE + usage(7), DONE), is_chunked=False),
        Answer(((b": comment\n\n" + THREE + usage(7) + DONE).replace(b"\n", b"\r\n"),)),
        Answer((b"".join(b"id: 1\n" + text(letter) for letter in "abc"), usage(7), DONE)),
    ],
    ids=["an event each", "one chunk", "parts", "not chunked", "CRLF", "other fields"],
)
def test_events_are_found_however_they_are_divided(answer: Answer) -> None:
    with fake_server(answer) as server:
        result = run(server)
    (stream,) = result.streams
    assert (stream.num_input_tokens, stream.num_tokens) == (3, 7)
    assert len(stream.events_s) == 3
    assert stream.sent_s <= stream.events_s[0] <= stream.events_s[1] <= stream.events_s[2]
    assert stream.per_token_s == pytest.approx((stream.end_s - stream.events_s[0]) / 6)
    assert not result.failures
    assert result.client_cpu_s >= 0


def test_a_role_alone_is_no_output() -> None:
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    both = event(choices=[{"delta": {"role": "assistant", "content": "a"}}])
    more = event(choices=[{"delta": {"content": "b"}}])
    for first, num_events in ((role, 1), (both, 2)):
        with fake_server(Answer((first, more, usage(2), DONE))) as server:
            (stream,) = run(server, endpoint=CHAT).streams
        assert len(stream.events_s) == num_events


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer((b'{"error": {"message": "too\\nbusy"}}',), 429), "HTTP 429: too busy"),
        (Answer((b"<html>",), 502, is_chunked=False), "HTTP 502: <html>"),
        (Answer((), 500), "HTTP 500"),
        (Answer(()), "the server ended the stream early"),
        (Answer((THREE,)), "the server ended the stream early"),
        (Answer((THREE + usage(3),)), "the server ended the stream early"),
        (
            Answer((b'event: error\ndata: {"error": {"message": "lost"}}\n\n',)),
            "in the stream: lost",
        ),
        (Answer((THREE, event(error={"message": "lost"}), DONE)), "in the stream: lost"),
        (Answer((THREE, DONE)), "the stream has no usage"),
        (Answer((THREE, event(choices=[], usage={}), DONE)), "usage has no counts"),
        (Answer((usage(0), DONE)), "the stream has no output"),
    ],
)
def test_a_failed_request_has_its_reason(answer: Answer, message: str) -> None:
    with fake_server(answer) as server:
        result = run(server)
    assert not result.streams
    (failure,) = result.failures
    assert message in failure.message
    assert "\n" not in failure.message


def test_a_server_that_is_gone_is_a_failure() -> None:
    with fake_server(Answer((THREE, usage(3), DONE))) as server:
        target = Target.reach(server.url)
    result = send(target, Load(COMPLETIONS, [b"{}"], [0.0]))
    assert "cannot connect" in result.failures[0].message


# --- when requests are sent ------------------------------------------------------------------


def test_requests_do_not_wait_for_each_other() -> None:
    """The server answers nothing until all requests are there."""
    barrier = threading.Barrier(5, timeout=60)

    def answer(_: dict[str, Any]) -> Answer:
        barrier.wait()
        return Answer((THREE, usage(3), DONE))

    ended = []
    with fake_server(answer) as server:
        load = Load(COMPLETIONS, [b"{}"] * 5, [0.0, 0.001, 0.002, 0.02, 0.02])
        result = send(Target.reach(server.url), load, lambda: ended.append(1))
    assert len(result.streams) == len(ended) == 5
    assert result.seconds >= 0.02
    assert result.max_send_lag_s >= 0


def test_a_request_is_sent_before_many_others_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    num_connecting = 0
    connect, post_head = asyncio.BaseEventLoop.create_connection, Target.post_head
    connecting_at_heads: list[int] = []

    def counted_connect(*arguments: Any, **options: Any) -> Any:
        nonlocal num_connecting
        num_connecting += 1
        return connect(*arguments, **options)

    def counted_head(*arguments: Any) -> bytes:
        connecting_at_heads.append(num_connecting)
        return post_head(*arguments)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", counted_connect)
    monkeypatch.setattr(Target, "post_head", counted_head)
    with fake_server(Answer((THREE, usage(3), DONE))) as server:
        assert len(run(server, 32).streams) == 32
    assert connecting_at_heads[0] < 16


def test_no_more_than_max_concurrency_at_once() -> None:
    lock, running, most = threading.Lock(), 0, 0
    pairs = threading.Barrier(2, timeout=60)

    def answer(_: dict[str, Any]) -> Answer:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pairs.wait()
        with lock:
            running -= 1
        return Answer((THREE, usage(3), DONE))

    with fake_server(answer) as server:
        assert len(run(server, 6, max_concurrency=2).streams) == 6
    assert most == 2


def test_some_failures_do_not_stop_the_others() -> None:
    bodies = [b'{"good": true}', b'{"good": false}', b'{"good": true}']

    def answer(body: dict[str, Any]) -> Answer:
        return Answer((THREE, usage(3), DONE)) if body["good"] else Answer((), 503)

    with fake_server(answer) as server:
        result = send(Target.reach(server.url), Load(COMPLETIONS, bodies, [0.0] * 3))
    assert (len(result.streams), len(result.failures)) == (2, 1)
    assert result.failures[0].status == 503


def test_sending_stops_when_every_request_would_be_refused() -> None:
    with fake_server(Answer((), 404)) as server:
        result = run(server, 50, max_concurrency=1)
        assert len(server.requests) == len(result.failures) == 1
    assert result.is_hopeless


# --- the target ------------------------------------------------------------------------------


def test_urls_and_keys() -> None:
    with fake_server(Answer((THREE, usage(3), DONE)), key="secret") as server:
        for url in (server.url, server.url + "/v1", server.url + "/v1/"):
            target = Target.reach(url, "secret")
            assert target.url == server.url
            assert target.model_names() == ["tiny"]
        below = Target.reach(server.url + "/below/v1", "secret")
        assert send(below, Load(COMPLETIONS, [b"{}"], [0.0])).streams
        assert server.paths == ["/below/v1/completions"]
        for key in (None, "other"):
            with pytest.raises(ConfigError, match="refused the API key: HTTP 401: wrong key"):
                Target.reach(server.url, key).model_names()
        with pytest.raises(ConfigError, match="header cannot have"):
            Target.reach(server.url, "a\r\nb")


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://a:b@x", "http://x?y"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write the server's address"):
        Target.reach(url)


def test_a_host_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot connect to http://a.*--base-url"):
        Target.reach(f"http://{64 * 'a'}")


def test_lists_of_models() -> None:
    with fake_server(Answer(()), models=None) as server:
        assert Target.reach(server.url).model_names() is None
    with fake_server(Answer(()), models=()) as server:
        assert Target.reach(server.url).model_names() == []


# --- arrivals --------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times_s = arrival_times(20_000, 8.0, burstiness, seed=3)
    gaps_s = np.diff(times_s, prepend=0.0)
    assert times_s[-1] == pytest.approx(20_000 / 8.0)
    assert gaps_s.min() >= 0
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_arrivals_in_a_second_have_the_variance_of_their_mean() -> None:
    counts = np.bincount(arrival_times(40_000, 10.0, 1.0, seed=5).astype(int), minlength=4000)
    assert counts[:4000].var() / counts[:4000].mean() == pytest.approx(1.0, abs=0.1)


def test_arrivals_depend_on_the_seed_only() -> None:
    first, again, other = (arrival_times(50, 2.0, 1.0, seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_arrivals_at_the_limits() -> None:
    assert arrival_times(3, float("inf"), 1.0, 0).tolist() == [0, 0, 0]
    assert arrival_times(4, 2.0, float("inf"), 0).tolist() == [0.5, 1.0, 1.5, 2.0]
    assert arrival_times(1, 2.0, 1.0, 0).tolist() == [0.5]
