"""Ray's settings for a cluster of Aquifer, among them the token that all processes share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from aquifer.cluster.token import read_token
from aquifer.errors import ConfigError

_TOKEN, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def ray_environment(token_file: Path, *, on_loopback: bool = False) -> dict[str, str]:
    """Variables for all processes of Ray.

    Args:
        token_file: holds the token.
        on_loopback: whether the cluster is this machine alone. Its processes then have the address
            127.0.0.1, and listen on no other one.
    """
    return {
        # Ray's processes listen on the loopback interface alone if their node has its address. They
        # never have it where this is not 0, whatever address they are given.
        **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if on_loopback else {}),
        "RAY_AUTH_MODE": "token",
        _TOKEN_FILE: str(token_file.resolve()),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A node that does not answer is dead after two seconds, in place of half a minute.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "4",
        "RAY_enable_metrics_collection": "0",
        # A node that is told to end does so at once: its workers were drained before, and where the
        # server was killed none of its engine processes must stay.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Ray would kill workers on a machine that is short of memory; models fill it on purpose.
        "RAY_memory_monitor_refresh_ms": "0",
    }


def token_of_node(variables: Mapping[str, str] = os.environ) -> str:
    """The token that Ray's processes of this node were started with.

    Raises:
        ConfigError: there is none.
    """
    if token := variables.get(_TOKEN):
        return token
    if file := variables.get(_TOKEN_FILE):
        return read_token(Path(file))
    raise ConfigError(
        f"Ray was started without a token; set RAY_AUTH_MODE=token and {_TOKEN_FILE} on each node"
    )
