"""Commands to a running server: what they send, and what they say about servers that do not fit."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from aquifer.errors import ConfigError
from aquifer.operate import add, fetch_memory


class _Server(HTTPServer):
    """A server that notes what it is asked, and answers every request with an empty report."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.keys: list[str | None] = []
        self.bodies: list[Any] = []
        self.speaks_http = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if not self.server.speaks_http:
            self.wfile.write(b"SSH-2.0-Server\r\n")
            return
        self.server.keys.append(self.headers["Authorization"])
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"] or 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"models": {}}')

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_server_of_something_else_is_an_error_in_a_line(server: _Server) -> None:
    server.speaks_http = False
    with pytest.raises(ConfigError, match=r"no server of Aquifer answers at .*SSH.*--url"):
        fetch_memory(server.url, None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://127.0.0.1:1/a b"])
def test_what_is_no_url_is_an_error_in_a_line(url: str) -> None:
    with pytest.raises(ConfigError, match=r"no server of Aquifer answers at .*--url"):
        fetch_memory(url, None)


def test_one_of_several_keys_is_sent(server: _Server) -> None:
    for key in (None, "alice", "alice, bob"):  # the last as a server reads it from the environment
        fetch_memory(server.url, key)
    assert server.keys == [None, "Bearer alice", "Bearer alice"]


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("a=b", "a=b"),
        ("here", "{cwd}/here"),
        ("name=here", "name={cwd}/here"),
        ("name=with=sign", "name={cwd}/with=sign"),
        ("demo", "demo"),
        ("org/name", "org/name"),
    ],
)
def test_paths_are_sent_in_full(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, sent: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("here", "with=sign", "demo"):
        (tmp_path / name).mkdir()
    add(server.url, None, written)
    (body,) = server.bodies
    assert json.loads(body)["model"] == sent.format(cwd=tmp_path.resolve())
