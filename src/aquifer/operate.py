"""Commands to a running server: `aquifer ps` tells what its models do, others manage them."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.table import Table

from aquifer.config import BUNDLED_MODELS
from aquifer.errors import ConfigError, one_line


def fetch_memory(url: str, api_key: str | None) -> dict[str, Any]:
    """Ask a server for its memory report.

    Args:
        url: its base URL.
        api_key: sent as the bearer token; None for none.

    Raises:
        ConfigError: there is no server, or it does not answer as Aquifer does.
    """
    report = _call(url, api_key, "memory")
    if not isinstance(report.get("models"), dict):
        raise ConfigError(f"{url}/memory is no memory report; is {url} a server of Aquifer?")
    return report


def manage(url: str, api_key: str | None, verb: str, model: str) -> dict[str, Any]:
    """Have a server load, unload, pin or unpin a model; returns what the model does then.

    A load may take minutes.

    Raises:
        ConfigError: it cannot be done, or as for `fetch_memory`.
    """
    return _call(url, api_key, f"models/{quote(model)}/{verb}", b"", timeout_s=None)


def add(url: str, api_key: str | None, model: str) -> dict[str, Any]:
    """Have a server register a model; returns what the model does then.

    Args:
        url: its base URL.
        api_key: sent as the bearer token; None for none.
        model: PATH, NAME=PATH or ORG/NAME. A path that exists here is sent in full: the server may
            run in another folder.

    Raises:
        ConfigError: it cannot be used, or as for `fetch_memory`.
    """
    name, separator, written = model.partition("=") if "=" in model else ("", "", model)
    path = Path(written).expanduser()
    if written not in BUNDLED_MODELS and path.exists():
        written = str(path.resolve())
    body = json.dumps({"model": f"{name}{separator}{written}"}).encode()
    return _call(url, api_key, "models", body, timeout_s=None)


def remove(url: str, api_key: str | None, model: str) -> None:
    """Have a server remove a model.

    Raises:
        ConfigError: it cannot be done, or as for `fetch_memory`.
    """
    _call(url, api_key, f"models/{quote(model)}", timeout_s=None, method="DELETE")


def _call(
    url: str,
    api_key: str | None,
    path: str,
    body: bytes | None = None,
    timeout_s: float | None = 10,
    method: str | None = None,
) -> dict[str, Any]:
    """The JSON object that a server answers.

    Raises:
        ConfigError: there is no server, or it answers with an error, or with something else.
    """
    headers = {}
    if api_key is not None:  # of the variable that a server reads several keys from, the first
        headers["Authorization"] = f"Bearer {api_key.partition(',')[0].strip()}"
    if body:
        headers["Content-Type"] = "application/json"
    where = f"{url.rstrip('/')}/{path}"
    try:
        request = urllib.request.Request(where, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise ConfigError(f"{url} requires an API key; give --api-key") from error
        raise ConfigError(
            _message(error) or f"{where} answers {error.code} {error.reason}"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        has_text = not isinstance(error, http.client.HTTPException)  # else the server's bytes
        reason = getattr(error, "reason", error) if has_text else one_line(error)
        raise ConfigError(
            f"no server of Aquifer answers at {url} ({reason}); give its address with --url"
        ) from error
    if not isinstance(answer, dict):
        raise ConfigError(f"{where} answers no object; is {url} a server of Aquifer?")
    return answer


def _message(error: urllib.error.HTTPError) -> str | None:
    """The message of an error as Aquifer answers it."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.load(error)["error"]["message"])
    return None


def table_of(report: Mapping[str, Any]) -> Table:
    """A line for each model, and one for the pool; where there are several devices, for each.

    Args:
        report: as `fetch_memory` returns it.
    """
    devices = report.get("devices") or {report["device"]: report}
    rows = [
        (name, device, of_device["models"][name])
        for name in report["models"]
        for device, of_device in devices.items()
        if name in of_device["models"]
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("MODEL")
    if len(devices) > 1:
        table.add_column("DEVICE", no_wrap=True)
    table.add_column("STATUS", no_wrap=True)
    for column in ("WEIGHTS", "OF", "KV", "PREFIXES", "RUNNING", "WAITING"):
        table.add_column(column, justify="right")
    if has_limits := any(_stays(model) for _, _, model in rows):
        table.add_column("STAYS", justify="right")
    for name, device, model in rows:
        table.add_row(
            name,
            *([device] if len(devices) > 1 else []),
            model["status"] if model["error"] is None else f"failed: {model['error']}",
            model["weights_resident"],
            model["weights_total"],
            model["kv"],
            model["prefix"],
            str(model["requests_running"]),
            str(model["requests_waiting"]),
            *([_stays(model)] if has_limits else []),
        )
    table.caption = "\n".join(
        f"{device}: {of['used']} of {of['budget']} in use, {of['free']} free"
        for device, of in devices.items()
    )
    table.caption_justify = "left"
    return table


def _stays(model: Mapping[str, Any]) -> str:
    """How long a model's weights stay in the pool."""
    if model["pinned"]:
        return "pinned"
    return "" if model["seconds_left"] is None else f"{model['seconds_left']:.0f} s"
