"""`aquifer bench serve`: its client, its figures, and streams from a real server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama

from aquifer.bench.serving import Load, Run, Stream, busy, figures, measure, run_streams
from aquifer.bench.workload import LengthRange, Workload
from aquifer.cli import app
from aquifer.errors import ConfigError, EngineError

ROOT = Path(__file__).parents[1]

Answers = Callable[..., str]


class Handler(BaseHTTPRequestHandler):
    """Answers with the chunks that the server has, and remembers the requests."""

    protocol_version = "HTTP/1.1"
    server: Fake

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        self.send_response(self.server.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in (*self.server.chunks, b""):
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")

    def log_message(self, *_: object) -> None:
        pass


class Fake(HTTPServer):
    """A server that answers each request alike."""

    def __init__(self, status: int, chunks: tuple[bytes, ...]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = status
        self.chunks = chunks
        self.requests: list[dict[str, Any]] = []


@pytest.fixture
def answers() -> Iterator[Answers]:
    """Starts a server with its answer; returns its URL."""
    running = []

    def start(*chunks: bytes, status: int = 200) -> str:
        fake = Fake(status, chunks)
        thread = threading.Thread(target=fake.serve_forever)
        thread.start()
        running.append((fake, thread))
        return f"http://127.0.0.1:{fake.server_port}"

    yield start
    for fake, thread in running:
        fake.shutdown()
        thread.join()
        fake.server_close()


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"
ONE = Workload([[1, 2, 3]], [7])


# --- the client ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunks",
    [
        (b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n", USAGE, DONE),
        (b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + USAGE + DONE,),
        (b"data: 1\n\nda", b"ta: 2\n", b"\ndata: 3\n\n" + USAGE[:30], USAGE[30:] + DONE),
    ],
)
def test_events_are_found_however_they_are_divided(
    answers: Answers, chunks: tuple[bytes, ...]
) -> None:
    (stream,) = run_streams(answers(*chunks), ONE).streams
    assert stream.num_tokens == 7
    assert len(stream.events_s) == 3
    assert stream.sent_s <= stream.events_s[0] <= stream.events_s[1] <= stream.events_s[2]


def test_all_prompts_are_requested(answers: Answers) -> None:
    workload = Workload([[1, 2], [3], [4, 5, 6]], [4, 5, 6])
    run = run_streams(answers(b"data: 1\n\n", USAGE, DONE), workload)
    assert [stream.num_tokens for stream in run.streams] == [7, 7, 7]


def test_a_refusal_is_an_error(answers: Answers) -> None:
    url = answers(b'{"error": {"message": "too many requests"}}', status=429)
    with pytest.raises(EngineError, match=r"(?s)429.*too many requests"):
        run_streams(url, ONE)


@pytest.mark.parametrize("chunks", [(), (b"data: 1\n\n",), (b'event: error\ndata: {"e": 1}\n\n',)])
def test_a_stream_that_ends_early_is_an_error(answers: Answers, chunks: tuple[bytes, ...]) -> None:
    with pytest.raises(EngineError, match="ended a stream early"):
        run_streams(answers(*chunks), ONE)


def test_servers_take_turns_and_no_prompt_comes_twice(answers: Answers) -> None:
    urls = {name: answers(b"data: 1\n\n", USAGE, DONE) for name in ("a", "b")}
    load = Load([1, 2], [0, 0], LengthRange(4, 4), LengthRange(7, 7), vocab_size=99, seed=3)
    results = measure(urls, load, repeats=2)
    assert [(r["concurrency"], r["server"]) for r in results] == 2 * [
        *((1, "a"), (1, "b"), (2, "a"), (2, "b")),
    ]
    assert [r["completed"] for r in results] == 2 * [2, 2, 4, 4]
    prompts = [load.workload(2, repeat).prompts for repeat in range(4)]
    assert len({tuple(prompt) for two in prompts for prompt in two}) == 8


def test_busy_processes_end_with_their_context() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    with busy(2):
        assert len(children() - before) == 2
    assert children() == before


# --- the figures -----------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    first = Run([Stream(5, 10.0, [10.5, 10.6, 11.0]), Stream(3, 10.1, [10.4, 12.0])])
    second = Run([Stream(5, 20.0, [20.1, 20.5]), Stream(3, 20.0, [21.0])])
    assert (first.seconds, second.seconds) == pytest.approx((2.0, 1.0))
    result = figures([first, second])
    assert (result["completed"], result["total_output_tokens"]) == (4, 16)
    assert result["output_throughputs"] == pytest.approx([4.0, 8.0])
    assert result["output_throughput"] == pytest.approx(6.0)
    assert result["request_throughput"] == pytest.approx(2 / 1.5)
    assert result["median_ttft_ms"] == pytest.approx(400)
    assert result["mean_tpot_ms"] == pytest.approx((125 + 800 + 100 + 0) / 4)
    assert result["mean_itl_ms"] == pytest.approx((100 + 400 + 1600 + 400) / 4)
    assert result["mean_e2el_ms"] == pytest.approx((1000 + 1900 + 500 + 1000) / 4)


# --- the command -----------------------------------------------------------------------------


def test_streams_from_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    checkpoint, output = tiny_llama(tmp_path / "tiny"), tmp_path / "s.json"
    options = ("--input-len", "5-9", "--output-len", "6", "--repeats", "2", "--threads", "2")
    app(
        [
            *("bench", "serve", str(checkpoint), "--concurrency", "1,3", *options),
            *("--memory", "64MiB", "--output", str(output)),
        ],
        standalone_mode=False,
    )
    result = json.loads(output.read_text())
    assert (result["threads"], result["memory"]) == (2, 64 << 20)
    assert [run["concurrency"] for run in result["runs"]] == [1, 3]
    for run in result["runs"]:
        assert run["completed"] == 2 * run["concurrency"]
        assert run["total_output_tokens"] == 6 * run["completed"]
        assert len(run["output_throughputs"]) == 2
        assert 0 < run["median_ttft_ms"] < run["median_e2el_ms"]


def test_bad_numbers_are_refused() -> None:
    for options in (("--concurrency", "0"), ("--busy", "-1"), ("--busy", "x")):
        with pytest.raises(ConfigError, match=options[0]):
            app(["bench", "serve", "demo", *options], standalone_mode=False)
