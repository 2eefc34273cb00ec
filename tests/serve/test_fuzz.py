"""Generated requests, valid or not: each is answered, and leaves the server as it was."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.serve.running import RunningServer, eventually

from aquifer.serve.protocol.requests import (
    UNSUPPORTED_FIELDS,
    ChatCompletionRequest,
    CompletionRequest,
)

NUM_REQUESTS = int(os.environ.get("TEST_FUZZ_REQUESTS", "150"))
NUM_CASES = int(os.environ.get("TEST_FUZZ_CASES", "12"))
"""Cases for each operation of the API."""

EXTREMES: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(0, -1, 1, 2, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**31), -(2**63), -(2**70)),
        *(0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
        *(True, False, None, "", "a", "\x00", "\ud800", "9" * 5000, "1", "true"),
        *([], {}, [[]], [{}], [None], [""], ["a"], [0], [-1], [2**70], [0.5], ["a"] * 200),
        *({"1": 5}, {"-1": 1}, {"x": 1}, {"1": 2**70}, {"1": "a"}, {"type": "json_object"}),
    ]
)
JSON = st.recursive(
    EXTREMES | st.integers() | st.floats() | st.text(max_size=20),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=5), parts),
    max_leaves=8,
)


def bodies(kind: type[Any], **valid: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that are valid but for a few fields."""
    names = [*kind.model_fields, *UNSUPPORTED_FIELDS, "no_such_field"]
    changes = st.dictionaries(st.sampled_from(names), JSON, max_size=3)
    return changes.map(lambda changed: {"model": "tiny", "max_tokens": 3, **valid, **changed})


REQUESTS = st.one_of(
    bodies(CompletionRequest, prompt="hello").map(lambda body: ("/v1/completions", body)),
    bodies(ChatCompletionRequest, messages=[{"role": "user", "content": "hello"}]).map(
        lambda body: ("/v1/chat/completions", body)
    ),
)


def test_every_request_is_answered(idle_server: RunningServer):
    """With 2xx, or with a 4xx that names a field; the engine process stays the same."""
    before = idle_server.children()

    @given(REQUESTS)
    @settings(
        max_examples=NUM_REQUESTS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=NUM_REQUESTS < 1000,
    )
    def check(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        status, answer, _ = idle_server.call("POST", path, body)
        assert 200 <= status < 300 or 400 <= status < 500, (body, answer)
        if status >= 400:
            error = answer["error"]
            assert error["param"] in body or any(name in error["message"] for name in body), answer

    check()
    assert set(before) <= set(idle_server.children())


@pytest.fixture(scope="module")
def schema(server: RunningServer) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_answers_are_those_of_the_document(
    schema: schemathesis.BaseSchema, idle_server: RunningServer
):
    checks = [
        not_a_server_error,
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    ]
    operations = [x.ok() for x in schema.get_all_operations() if isinstance(x, Ok)]
    assert len(operations) == 20
    # An answer without an end.
    operations = [operation for operation in operations if operation.path != "/events"]
    assert len(operations) == 19
    sent: Counter[str] = Counter()

    for operation in operations:

        @given(operation.as_strategy())
        @settings(
            max_examples=NUM_CASES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=NUM_CASES < 100,
        )
        def check(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(checks=checks, timeout=300)
            sent[operation.label] += 1  # noqa: B023

        check()
    print(f"{sent.total()} cases: {dict(sent)}")
    status, prefixes, _ = idle_server.call("GET", "/v1/prefixes")
    assert status == 200
    for prefix in prefixes["data"]:
        assert idle_server.call("DELETE", f"/v1/prefixes/{prefix['id']}")[0] == 200
    eventually(lambda: idle_server.call("GET", "/health")[0] == 200, "the server serves")
