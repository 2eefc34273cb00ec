"""The names by which clients ask for a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.running import RunningServer, running


@pytest.fixture(scope="module")
def named_server(checkpoint: Path) -> Iterator[RunningServer]:
    """A server of one checkpoint twice: by its path, with a slash at the end, and by a name."""
    command = ["-m", "aquifer", "serve", f"{checkpoint}/", f"process={checkpoint}"]
    with running([*command, "--port", "0", "--memory", "64M"]) as server:
        yield server


def test_the_path_and_its_last_part_name_the_model(named_server: RunningServer, checkpoint: Path):
    path = str(checkpoint)
    _, models, _ = named_server.call("GET", "/v1/models")
    assert [card["id"] for card in models["data"]] == [path, "process"]
    for name in (path, f"{path}/", checkpoint.name):
        body = {"model": name, "prompt": "x", "max_tokens": 1}
        status, answer, _ = named_server.call("POST", "/v1/completions", body)
        assert (status, answer["model"]) == (200, path)
        status, answer, _ = named_server.call("GET", f"/v1/models/{name}")
        assert (status, answer["id"]) == (200, path)


def test_what_is_served_is_what_is_said(named_server: RunningServer, checkpoint: Path):
    body = {"model": "tinier", "prompt": "x", "max_tokens": 1}
    status, answer, _ = named_server.call("POST", "/v1/completions", body)
    assert status == 404
    assert f"served models: '{checkpoint}', 'process'" in answer["error"]["message"]


def test_names_that_the_operator_gives(checkpoint: Path):
    names = ("--served-model-name", "a", "--served-model-name", "b")
    command = ["-m", "aquifer", "serve", str(checkpoint), "--port", "0", "--memory", "16M"]
    with running([*command, *names]) as server:
        for name, status in {
            "a": 200,
            "b": 200,
            checkpoint.name: 404,
            str(checkpoint): 404,
        }.items():
            body = {"model": name, "prompt": "x", "max_tokens": 1}
            got, answer, _ = server.call("POST", "/v1/completions", body)
            assert got == status, name
            if status == 200:
                assert answer["model"] == "a"
        _, models, _ = server.call("GET", "/v1/models")
        assert [card["id"] for card in models["data"]] == ["a"]
