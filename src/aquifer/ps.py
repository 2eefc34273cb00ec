"""`aquifer ps`: what the models of a running server do, and where its memory is."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from rich.table import Table

from aquifer.errors import ConfigError

_TIMEOUT_S = 10


def fetch_memory(url: str, api_key: str | None) -> dict[str, Any]:
    """Ask a server for its memory report.

    Args:
        url: its base URL.
        api_key: sent as the bearer token; None for none.

    Raises:
        ConfigError: there is no server, or it does not answer as Aquifer does.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    where = f"{url.rstrip('/')}/memory"
    try:
        request = urllib.request.Request(where, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            report = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise ConfigError(f"{url} requires an API key; give --api-key") from error
        raise ConfigError(f"{where} answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"no server of Aquifer answers at {url} ({reason}); give its address with --url"
        ) from error
    if not isinstance(report, dict) or not isinstance(report.get("models"), dict):
        raise ConfigError(f"{where} is no memory report; is {url} a server of Aquifer?")
    return report


def table_of(report: Mapping[str, Any]) -> Table:
    """A line for each model, and one for the pool.

    Args:
        report: as `fetch_memory` returns it.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("MODEL")
    table.add_column("STATUS")
    for column in ("WEIGHTS", "OF", "KV", "PREFIXES", "RUNNING", "WAITING"):
        table.add_column(column, justify="right")
    for name, model in report["models"].items():
        table.add_row(
            name,
            model["status"] if model["error"] is None else f"failed: {model['error']}",
            model["weights"],
            model["weights_total"],
            model["kv"],
            model["prefix"],
            str(model["requests_running"]),
            str(model["requests_waiting"]),
        )
    table.caption = (
        f"{report['device']}: {report['used']} of {report['budget']} in use, {report['free']} free"
    )
    table.caption_justify = "left"
    return table
