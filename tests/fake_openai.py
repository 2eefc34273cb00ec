"""A small OpenAI-compatible server whose answers a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(*pieces: str) -> bytes:
    """An event for each piece of a completion."""
    return b"".join(event(choices=[{"index": 0, "text": piece}]) for piece in pieces)


def usage(num_tokens: int, num_input_tokens: int = 3) -> bytes:
    """The event that counts the tokens of a stream."""
    counts = {"prompt_tokens": num_input_tokens, "completion_tokens": num_tokens}
    return event(choices=[], usage=counts)


@dataclass(frozen=True, slots=True)
class Answer:
    """Chunks of a body, with a status. A body that is not chunked ends with its connection."""

    chunks: Sequence[bytes]
    status: int = 200
    is_chunked: bool = True


class FakeServer(ThreadingHTTPServer):
    """A server that answers each request with what `answer` returns for its body."""

    request_queue_size = 64

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], Answer],
        models: Sequence[str] | None = ("tiny",),
        key: str | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.models = models
        self.key = key
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_GET(self) -> None:
        cards = [{"id": name} for name in self.server.models or ()]
        known = self.server.models is not None and self.path.endswith("/v1/models")
        self._reply(Answer([json.dumps({"data": cards}).encode()], 200 if known else 404))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.paths.append(self.path)
        self._reply(self.server.answer(body))

    def _reply(self, answer: Answer) -> None:
        key = self.server.key
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            answer = Answer([b'{"error": {"message": "wrong key"}}'], 401)
        self.close_connection = True
        self.send_response(answer.status)
        if answer.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in answer.chunks:
            framed = f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
            self.wfile.write(framed if answer.is_chunked else chunk)
        if answer.is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_server(
    answer: Callable[[dict[str, Any]], Answer] | Answer,
    models: Sequence[str] | None = ("tiny",),
    key: str | None = None,
) -> Iterator[FakeServer]:
    """Run a server for the time of the context."""
    server = FakeServer((lambda _: answer) if isinstance(answer, Answer) else answer, models, key)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
