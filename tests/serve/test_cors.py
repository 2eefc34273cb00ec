"""What web pages of other origins may do."""

from __future__ import annotations

import pytest
from tests.serve.running import ORIGIN, RunningServer

OTHER = "https://evil.example.org"
KEY = {"Authorization": "Bearer secret"}


def _preflight(server: RunningServer, origin: str, method: str) -> tuple[int, dict[str, str]]:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    status, _, answered = server.call("OPTIONS", "/v1/chat/completions", headers=headers)
    return status, answered


def test_a_preflight_needs_no_key(keyed_server: RunningServer):
    status, headers = _preflight(keyed_server, ORIGIN, "POST")
    assert status == 200
    assert headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in headers["access-control-allow-headers"]
    assert "POST" in headers["access-control-allow-methods"]


@pytest.mark.parametrize(("origin", "method"), [(OTHER, "POST"), (ORIGIN, "DELETE")])
def test_what_is_not_allowed_is_refused(keyed_server: RunningServer, origin: str, method: str):
    status, headers = _preflight(keyed_server, origin, method)
    assert status == 400
    assert headers.get("access-control-allow-origin") != OTHER
    assert "DELETE" not in headers["access-control-allow-methods"]


def test_answers_and_errors_and_streams_can_be_read(keyed_server: RunningServer):
    body = {"prompt": "x", "max_tokens": 2}
    for headers, fields, expected in (
        (KEY, {}, 200),
        (KEY, {"stream": True}, 200),
        (KEY, {"max_tokens": -1}, 400),
        ({}, {}, 401),
    ):
        status, _, answered = keyed_server.call(
            "POST", "/v1/completions", body | fields, {"Origin": ORIGIN, **headers}
        )
        assert status == expected
        assert answered["access-control-allow-origin"] == ORIGIN
        assert answered["access-control-expose-headers"] == "Retry-After"
        assert "access-control-allow-credentials" not in answered
        status, _, answered = keyed_server.call(
            "POST", "/v1/completions", body | fields, {"Origin": OTHER, **headers}
        )
        assert status == expected  # browsers do not show the answer to the page
        assert "access-control-allow-origin" not in answered


def test_no_page_may_call_a_server_by_default(idle_server: RunningServer):
    assert _preflight(idle_server, ORIGIN, "POST")[0] == 405
    _, _, headers = idle_server.call("GET", "/v1/models", headers={"Origin": ORIGIN})
    assert not any(name.startswith("access-control") for name in headers)
