"""README's requests, sent as they are written there to a server of the bundled model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from tests.serve.running import ROOT, RunningServer, running

README = (ROOT / "README.md").read_text(encoding="utf-8")
_CURL = re.compile(r"^curl (?:-X (?P<method>\w+) )?http://127\.0\.0\.1:8000(?P<path>\S+)", re.M)


def _requests() -> list[tuple[str, str, bytes | None]]:
    """Method, path and body of each request with curl."""
    found = []
    for match in _CURL.finditer(README):
        command = README[match.start() : README.index("```", match.start())]
        words = shlex.split(command, comments=True)
        # The command ends where the next one begins.
        end = words.index("curl", 1) if "curl" in words[1:] else len(words)
        data = words[: end - 1].index("-d") + 1 if "-d" in words[:end] else None
        body = None if data is None else words[data].encode()
        found.append((match["method"] or ("POST" if body else "GET"), match["path"], body))
    return found


@pytest.fixture(scope="module")
def demo_server() -> Iterator[RunningServer]:
    (name,) = set(re.findall(r'"model": "([^"]+)"', README))
    command = ["-m", "aquifer", "serve", "demo", "--served-model-name", name]
    with running([*command, "--port", "0"]) as server:
        yield server


def test_the_requests_are_found():
    assert [request[:2] for request in _requests()] == [
        ("POST", "/v1/chat/completions"),
        ("GET", "/memory"),
        ("POST", "/v1/prefixes"),
        ("DELETE", "/v1/prefixes/prefix-..."),
    ]


def test_the_requests_are_answered(demo_server: RunningServer):
    ids: list[str] = []
    for method, path, body in _requests():
        if path.endswith("prefix-..."):
            path = path.replace("prefix-...", ids.pop())
        status, answer, _ = demo_server.call(method, path, body)
        assert status == 200, (path, answer)
        if path == "/v1/prefixes":
            ids.append(answer["id"])
    assert not ids  # the prefix was pinned, and given up again
