"""The engine's options: what is refused, and what the command line makes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aquifer import ConfigError
from aquifer.cli import app
from aquifer.config import EngineConfig, ModelSpec
from aquifer.serve import server
from aquifer.serve.server import ServerConfig

MODELS = (ModelSpec("m", Path("/m")),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"swap_space_bytes": -1}, "swap_space_bytes is -1; it must be at least 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"preemption_mode": "drop"}, "preemption_mode is 'drop'"),
        ({"preemption_mode": "swap", "swap_space_bytes": 0}, "needs swap_space above 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(MODELS, **options)


def test_edges_of_what_is_possible() -> None:
    EngineConfig(MODELS, swap_space_bytes=0, enable_prefix_caching=False, seed=-1)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--enable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--prefix-cache-salt-by-key"], {"prefix_cache_salt_by_key": True}),
        (["--swap-space", "1.5G"], {"swap_space_bytes": 3 << 29}),
        (["--swap-space", "0"], {"swap_space_bytes": 0}),
        (["--preemption-mode", "recompute"], {"preemption_mode": "recompute"}),
    ],
)
def test_options_of_caching_and_preemption(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], options: dict[str, Any]
) -> None:
    got: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda *configs, **_: got.extend(configs))
    app(["serve", "m=/m", *arguments], standalone_mode=False)
    assert got[0] == EngineConfig(MODELS, **options)


def test_there_may_be_several_keys() -> None:
    assert ServerConfig().api_keys == ()
    assert ServerConfig(api_key="k").api_keys == ("k",)
    assert ServerConfig(api_key="k, l,").api_keys == ("k", "l")
    with pytest.raises(ConfigError, match="api_key contains no key"):
        ServerConfig(api_key=" ,")
