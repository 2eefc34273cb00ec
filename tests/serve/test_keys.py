"""Several API keys: quotas, and a key with few requests beside one with many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.checkpoints import tiny_llama
from tests.serve.running import RunningServer, eventually, running

LONG_TOKENS = 30_000  # an output that lasts far longer than the test that needs it
PREFIX = list(range(40, 60)) * 60


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server for the keys "a" and "b", where two requests run and one of each key may wait."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    checkpoint = tiny_llama(folder, max_position_embeddings=LONG_TOKENS + 100)
    command = ["-m", "aquifer", "serve", f"tiny={checkpoint}", "--port", "0", "--api-key", "a,b"]
    limits = ["--max-num-seqs", "2", "--max-num-waiting", "4", "--max-share-by-key", "0.25"]
    with running([*command, "--memory", "32M", *limits]) as server:
        yield server


def begin(server: RunningServer, key: str, max_tokens: int = LONG_TOKENS) -> openai.Stream[Any]:
    """A stream, which may have to wait for its first token."""
    client = server.openai(api_key=key)
    return client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def is_idle(server: RunningServer) -> bool:
    """Whether no request runs or waits."""
    _, memory, _ = server.call("GET", "/memory", headers={"Authorization": "Bearer a"})
    return bool(memory["requests_running"] == memory["requests_waiting"] == 0)


def test_a_key_takes_a_place_and_may_not_fill_the_queue(shared_server: RunningServer):
    streams = [begin(shared_server, "a") for _ in range(2)]
    for stream in streams:
        next(stream)
    body = {"prompt": "x", "max_tokens": LONG_TOKENS, "ignore_eos": True}
    # Both slots are taken by key "a"; "b" gets one of them at once, and its owner waits.
    chunks = list(begin(shared_server, "b", max_tokens=3))
    assert chunks[-1].choices[0].finish_reason == "length"
    # Two running and one waiting: "a" may have no more.
    other = begin(shared_server, "b")
    next(other)
    headers = {"Authorization": "Bearer a"}
    status, answer, _ = shared_server.call("POST", "/v1/completions", body, headers)
    assert status == 429
    assert "of this API key are waiting already" in answer["error"]["message"]
    for stream in (*streams, other):
        stream.close()
    eventually(lambda: is_idle(shared_server), "the closed streams have ended")


def test_a_key_may_pin_its_share(shared_server: RunningServer):
    def pin(key: str, first: int) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": [first, *PREFIX]}
        while True:
            status, answer, _ = shared_server.call("POST", "/v1/prefixes", body, headers)
            if status != 429:  # the KV of the one before is still to be computed
                return status, answer

    pinned = []
    for first in range(1, 40):
        status, answer = pin("a", first)
        if status != 200:
            break
        pinned.append(answer["id"])
    assert status == 400
    assert "that one key may pin" in answer["error"]["message"]
    assert len(pinned) > 1
    status, answer = pin("b", 1)
    assert status == 200, "another key has a share of its own"
    headers = {"Authorization": "Bearer a"}
    assert shared_server.call("DELETE", f"/v1/prefixes/{pinned[0]}", headers=headers)[0] == 200
    status, answer = pin("a", 39)
    assert status == 200
    for prefix_id in [*pinned[1:], answer["id"]]:
        assert shared_server.call("DELETE", f"/v1/prefixes/{prefix_id}", headers=headers)[0] == 200
