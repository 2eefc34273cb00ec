"""`aquifer cluster` without a cluster: what it refuses, and what it shows."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from tests.serve.running import eventually, is_running

from aquifer.cli import app
from aquifer.cluster import nodes
from aquifer.cluster.token import write_token
from aquifer.cluster_cli import tables_of
from aquifer.errors import ConfigError


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    file = tmp_path / "token"
    write_token(file)
    return str(file)


def _run(*arguments: str) -> None:
    app(arguments, standalone_mode=False)


def test_without_ray(monkeypatch: pytest.MonkeyPatch, token_file: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name)
    )
    for arguments in (
        ("cluster", "start", "demo", "--token-file", token_file),
        ("cluster", "join", "127.0.0.1:6379", "--token-file", token_file),
        ("cluster", "status", "--token-file", token_file),
        ("serve", "demo", "--workers", "1"),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'aquifer\[ray\]'"):
            _run(*arguments)


def test_where_nothing_listens(token_file: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        for arguments in (
            ("join", address),
            ("status", "--address", address),
            ("start", "demo", "--cluster", address),
        ):
            with pytest.raises(ConfigError, match=f"no cluster can be reached at {address}"):
                _run("cluster", *arguments, "--token-file", token_file)
    for wrong in ("10.0.0.1", "host:", ":1", "host:port"):
        with pytest.raises(ConfigError, match="write HOST:PORT"):
            _run("cluster", "join", wrong, "--token-file", token_file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster", "start", "--token-file", "TOKEN"], "no model given"),
        (["cluster", "start", "demo", "--token-file", "none"], "openssl rand -hex 32 > none"),
        (["cluster", "join", "127.0.0.1:1", "--token-file", "none"], "cannot read none"),
        (
            ["cluster", "join", "127.0.0.1:1", "--token-file", "TOKEN", "--node-address", "::1"],
            "node_address is ::1, which other machines cannot reach",
        ),
        (["cluster", "start", "demo", "--token-file", "TOKEN", "--device", "cuda:1"], "auto, cpu"),
        (
            ["serve", "demo", "--workers", "1", "--device", "cuda:1"],
            "chooses the devices",
        ),
        (["serve", "demo", "--workers", "2", "--devices", "cpu,cpu"], "are both given"),
        (["serve", "demo", "--workers", "-1"], "workers is -1"),
        *(
            (["cluster", "start", "demo", "--token-file", "TOKEN", *options], message)
            for options, message in (
                (["--node-port", "12345"], "node_port is 12345; .* none of 10001 to 19999"),
                (["--node-port", "65536"], "node_port is 65536; it must be below 65536"),
                (["--cluster", "127.0.0.1:1", "--node-port", "7000"], "node_port is for a node"),
                (["--cluster", "127.0.0.1:1", "--node-address", "::2"], "node_address is for a"),
                *(
                    (["--node-address", host], f"node_address is {host}, which .* cannot reach")
                    for host in ("127.0.0.1", "localhost", "::1")
                ),
            )
        ),
    ],
)
def test_what_cannot_be(arguments: list[str], message: str, token_file: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _run(*(token_file if argument == "TOKEN" else argument for argument in arguments))


def test_status_where_no_cluster_runs(monkeypatch: pytest.MonkeyPatch, token_file: str) -> None:
    from ray._private import services

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Clusters of other programs on this machine.
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: set[str]())
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
    match = "no cluster runs on this machine; have it join one"
    with mock.patch.dict(os.environ), pytest.raises(ConfigError, match=match):
        _run("cluster", "status", "--token-file", token_file)


def test_a_node_that_cannot_start_says_why(token_file: str) -> None:
    """Ray refuses an address that is not of this machine, or a port that is taken."""
    node = nodes.RayNode(["--nonsense"], {})
    with pytest.raises(ConfigError, match="Ray cannot start here"):
        node.start()
    assert not node.is_running


def test_a_node_that_ray_gives_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine; what is left of the first attempt ends."""
    ray, left = tmp_path / "ray", tmp_path / "left"
    ray.write_text(
        f"#!/bin/sh\nif [ -e {left} ]; then echo block forever; exec sleep 600; fi\n"
        f"sleep 600 &\necho $! > {left}\necho The current node timed out during startup.\nexit 1\n"
    )
    ray.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    node = nodes.RayNode([], {})
    node.start()
    try:
        assert node.is_running
        process = int(left.read_text())
        eventually(lambda: not is_running(process), "what was left ends")
    finally:
        node.stop()


def test_tables_of_a_cluster() -> None:
    node: Mapping[str, Any] = {"alive": True, "leaving": False, "capacity": 2}
    status = {
        "models": {"m": "/srv/m"},
        "nodes": [
            {**node, "id": "a" * 56, "address": "10.0.0.1"},
            {**node, "id": "b" * 56, "address": "10.0.0.2", "leaving": True},
            {**node, "id": "c" * 56, "address": "10.0.0.3", "alive": False},
        ],
        "workers": [
            {"name": "worker-1", "node": "a" * 56, "address": "10.0.0.1:5", "leaving": False},
            {"name": "worker-2", "node": "a" * 56, "address": None, "leaving": False},
            {"name": "worker-3", "node": "b" * 56, "address": "10.0.0.2:5", "leaving": True},
        ],
    }
    console = Console(width=100, record=True)
    for table in tables_of(status):
        console.print(table)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["aaaaaaaa", "10.0.0.1", "alive", "2", "2"] in rows
    assert ["bbbbbbbb", "10.0.0.2", "leaving", "1", "2"] in rows
    assert ["cccccccc", "10.0.0.3", "dead", "0", "2"] in rows
    assert ["worker-1", "aaaaaaaa", "10.0.0.1:5", "there"] in rows
    assert ["worker-2", "aaaaaaaa", "starting"] in rows
    assert ["worker-3", "bbbbbbbb", "10.0.0.2:5", "leaving"] in rows
    assert ["m", "/srv/m"] in rows
