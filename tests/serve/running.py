"""A server in a subprocess, on a real socket, with helpers for tests."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from urllib.parse import urlsplit

import openai
from openai import Stream

ROOT = Path(__file__).parents[2]
_INFO = re.compile(r"^[\d-]+ [\d:]+ INFO aquifer\..*\n", re.MULTILINE)
ORIGIN = "https://chat.example.org"
"""The one whose pages may call the server with a key."""
PATIENCE_S = 300.0  # for what must happen; only a failing test waits that long


class RunningServer:
    """A server process whose output is collected."""

    only_model = "fake"

    def __init__(self, command: list[str]) -> None:
        python_path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        environment.pop("AQUIFER_API_KEY", None)
        environment.pop("AQUIFER_GUARD_PAGES", None)  # servers say how large their memory is
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stderr = ""
        self._stdout: Queue[str | None] = Queue()
        self._threads = [
            threading.Thread(target=self._collect_stdout, daemon=True),
            threading.Thread(target=self._collect_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Wait until it serves."""
        self._wait_for("is ready")

    def wait_listening(self) -> None:
        """Wait until it listens, which only the fake server says."""
        self._wait_for("listens")

    def wait_loading(self) -> None:
        """Wait until its engine process loads, which only the fake server with --load says."""
        self._wait_for("loads")

    def _wait_for(self, state: str) -> None:
        """Wait for the line that says where the server is."""
        while True:
            try:
                line = self._stdout.get(timeout=PATIENCE_S)
            except Empty:
                line = None
            if line is None:
                self.process.kill()
                raise AssertionError(f"the server did not start:\n{self.stderr}")
            match = re.fullmatch(rf"Aquifer {state} on (http://\S+)\n", line)
            if match is not None:
                self.url = match[1]
                self.host, self.port = urlsplit(self.url).hostname, urlsplit(self.url).port
                return

    @property
    def problems(self) -> str:
        """What it wrote to standard error, without messages of level info."""
        return _INFO.sub("", self.stderr)

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
        return openai.OpenAI(base_url=f"{self.url}/v1", **(defaults | options))

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request; (status, parsed JSON or text, headers). JSON unless the body is bytes."""
        connection = http.client.HTTPConnection(str(self.host), self.port, timeout=PATIENCE_S)
        try:
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            connection.request(
                method, path, body, {"Content-Type": "application/json", **(headers or {})}
            )
            response = connection.getresponse()
            content = response.read()
            lowered = {name.lower(): value for name, value in response.getheaders()}
            is_json = lowered.get("content-type", "").startswith("application/json")
            return response.status, json.loads(content) if is_json else content.decode(), lowered
        finally:
            connection.close()

    def children(self, parent: int | None = None) -> list[int]:
        """Process ids of the processes that the server, or another process, has started."""
        return [
            int(status.parent.name)
            for status in Path("/proc").glob("[0-9]*/status")
            if f"PPid:\t{parent or self.process.pid}\n" in _text_of(status)
        ]

    def spawned(self, parent: int | None = None) -> list[int]:
        """Process ids of its running Python processes, the first one first: that is the engine; or
        those of that another process has started. Sandboxes are not among them.

        It waits until each one has told by its name what it is.
        """
        names: dict[int, str] = {}

        def are_named() -> bool:
            names.clear()
            for process in self.children(parent):
                is_one = "spawn_main" in _text_of(Path(f"/proc/{process}/cmdline"))
                if is_one and is_running(process):
                    names[process] = _text_of(Path(f"/proc/{process}/comm"))
            return all(name.startswith("aquifer-") for name in names.values())

        eventually(are_named, "its processes have names")
        return sorted((p for p, name in names.items() if "sandbox" not in name), key=_started)

    def engine_process(self) -> int:
        """Process id of the engine, as long as it was not started again."""
        return self.spawned()[0]

    def stream(self, prompt: str, **options: Any) -> Stream[Any]:
        """A stream of which the first chunk has arrived."""
        defaults: dict[str, Any] = {"model": self.only_model, "max_tokens": 10**5}
        client = self.openai(api_key="secret")
        stream: Stream[Any] = client.completions.create(
            **(defaults | options), prompt=prompt, stream=True
        )
        next(stream)
        return stream

    def wait_healthy(self) -> None:
        """Wait until it accepts requests."""
        eventually(lambda: self.call("GET", "/health")[0] == 200, "the server serves")

    def memory_in_use(self) -> dict[str, Any]:
        """Memory in use without retained prefixes: the same whenever the server is idle."""
        _, memory, _ = self.call("GET", "/memory")
        retained_bytes = sum(model["prefix_bytes"] for model in memory["models"].values())
        return {
            "used_bytes": memory["used_bytes"] - retained_bytes,
            "running": memory["requests_running"],
            "waiting": memory["requests_waiting"],
            "kv_bytes": {name: model["kv_bytes"] for name, model in memory["models"].items()},
        }

    def token_counts(self) -> tuple[float, float]:
        """Tokens of prompts and of completions that all models have counted so far."""
        _, text, _ = self.call("GET", "/metrics")
        prompts, completions = (
            sum(
                float(line.rpartition(" ")[2])
                for line in text.splitlines()
                if line.startswith(f"aquifer:{name}_tokens_total{{")
            )
            for name in ("prompt", "generation")
        )
        return prompts, completions

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process has ended; the exit code."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for thread in self._threads:
            thread.join()
        return code

    def _collect_stdout(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._stdout.put(line)
        self._stdout.put(None)

    def _collect_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line


def _text_of(file: Path) -> str:
    """Text of a file of /proc; empty if its process has ended."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(process: int) -> bool:
    """Whether there is a process, and it has not ended."""
    text = _text_of(Path(f"/proc/{process}/status"))
    return bool(text) and "\nState:\tZ" not in text


def _started(process: int) -> int:
    """When a process was started, in clock ticks; 0 if it has ended."""
    fields = _text_of(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return int(fields[19]) if fields else 0


def drain(stream: Stream[Any]) -> str | None:
    """Read a stream to its end; the finish reason."""
    reasons: list[str | None] = [chunk.choices[0].finish_reason for chunk in stream]
    return reasons[-1]


@contextmanager
def running(command: list[str]) -> Iterator[RunningServer]:
    """A ready server, stopped at the end if it has not stopped before."""
    server = RunningServer(command)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds.

    What takes long is looked at less often: each look takes time from the processes that it waits
    for.
    """
    begun_s = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - begun_s
        assert waited_s < PATIENCE_S, f"it did not happen that {what}"
        time.sleep(min(max(0.02, waited_s / 10), 0.2))
