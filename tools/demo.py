"""Demonstration: serve a model, send two requests over HTTP, and show its memory meanwhile.

    python tools/demo.py [ARGUMENTS OF aquifer serve]

The bundled model is the default. On any error it prints the server's messages and exits with 1.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

_READY = "Aquifer is ready on "
_PATIENCE_S = 300.0
_BAR_CELLS = 30
_MIDDLE_CHUNK = 100

_console = Console(highlight=False)


class _DemoError(Exception):
    """The demonstration failed."""


def main() -> int:
    """Run the demonstration; return the exit code."""
    arguments = sys.argv[1:] or ["demo", "--memory", "64M"]
    command = [sys.executable, "-m", "aquifer", "serve", *arguments, "--port", "0"]
    with tempfile.TemporaryFile("w+") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            address = _wait_ready(server)
            _show_completion(address)
            _show_memory(_show_chat(address))
            server.send_signal(signal.SIGTERM)
            if server.wait(_PATIENCE_S) != 0:
                raise _DemoError(f"the server ended with exit code {server.returncode}")
        except (_DemoError, OSError, subprocess.TimeoutExpired) as error:
            server.kill()
            server.wait()
            errors.seek(0)
            print(f"{errors.read()}error: {error}", file=sys.stderr)
            return 1
    return 0


def _wait_ready(server: subprocess.Popen[str]) -> str:
    """Wait until the server accepts connections; return its address."""
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith(_READY):
            _console.print(line.strip())
            return urlsplit(line.removeprefix(_READY).strip()).netloc
    raise _DemoError("the server did not start")


def _show_completion(address: str) -> None:
    prompt = "Once upon a time"
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0.7, "seed": 3}
    with _call(address, "POST", "/v1/completions", body) as response:
        answer = json.load(response)
    _title("A completion")
    print(prompt + answer["choices"][0]["text"])


def _show_chat(address: str) -> dict[str, Any]:
    """Print a streamed answer; return the memory report taken in the middle of it."""
    report = _memory(address)
    question = "Tell me a story about a small boat."
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 400,
        "temperature": 0.7,
        "seed": 1,
        "stream": True,
    }
    with _call(address, "POST", "/v1/chat/completions", body) as response:
        _title("A chat, as it comes")
        print(f"user: {question}\nassistant: ", end="", flush=True)
        for index, chunk in enumerate(_events(response)):
            if index == _MIDDLE_CHUNK:
                report = _memory(address)
            if "error" in chunk:
                raise _DemoError(chunk["error"]["message"])
            print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)
    print()
    return report


def _memory(address: str) -> dict[str, Any]:
    with _call(address, "GET", "/memory") as response:
        report: dict[str, Any] = json.load(response)
    return report


def _show_memory(report: dict[str, Any]) -> None:
    running = report["requests_running"]
    table = Table(
        title=f"The pool with {running} running: {report['budget']} in pages of {report['page']}"
    )
    for column in ("owner", "size", "share"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for name, model in report["models"].items():
        for kind in ("weights", "kv", "state", "prefix"):
            if kind == "weights" or model[f"{kind}_bytes"]:
                row = f"{name} / {kind}", model[kind]
                table.add_row(*row, _bar(model[f"{kind}_bytes"] / report["budget_bytes"]))
    table.add_row("free", report["free"], _bar(report["free_bytes"] / report["budget_bytes"]))
    print()
    _console.print(table)


def _bar(share: float) -> str:
    return f"{'█' * max(round(share * _BAR_CELLS), share > 0):{_BAR_CELLS}} {share:6.1%}"


def _title(text: str) -> None:
    _console.print(f"\n[bold]{text}[/bold]")


def _call(
    address: str, method: str, path: str, body: dict[str, Any] | None = None
) -> http.client.HTTPResponse:
    """Send a request; return the response with its body unread. Its status must be 200."""
    connection = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
    content = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request(method, path, content, headers)
    response = connection.getresponse()
    if response.status != 200:
        raise _DemoError(f"{method} {path}: {response.status} {response.read().decode()}")
    return response


def _events(response: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event, until the stream is done."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data.startswith("{"):
            yield json.loads(data)
    raise _DemoError("the stream ended early")


if __name__ == "__main__":
    sys.exit(main())
