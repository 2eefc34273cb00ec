"""Requests for many models of a server, whose answers are known."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.serve.running import RunningServer

_MAX_TOKENS = 12


def body_of(number: int, num_models: int) -> dict[str, Any]:
    """A request: the models in turn, and prompts and lengths that differ."""
    return {
        "model": f"m{number % num_models}",
        "prompt": f"{'x' * (number % 7)} prompt {number // num_models}",
        "max_tokens": 1 + number * 5 % _MAX_TOKENS,
        "temperature": 0,
    }


def answers_of(server: RunningServer, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts that a server answers."""
    return [_text(server, body) for body in bodies]


def _text(server: RunningServer, body: dict[str, Any]) -> str:
    status, answer, _ = server.call("POST", "/v1/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


@dataclass
class Load:
    """Threads that send requests, again and again, until they are told to stop.

    Args:
        server: the server.
        bodies: the requests.
        expected: their answers.
        num_threads: requests at a time.
        pause_s: of each thread after an answer.
    """

    server: RunningServer
    bodies: Sequence[dict[str, Any]]
    expected: Sequence[str]
    num_threads: int = 4
    pause_s: float = 0.02
    num_right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # by the reason
    longest_failed_s: float = 0.0
    longest_s: float = 0.0

    def __enter__(self) -> Load:
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.num_threads)
        self._sending = [
            self._threads.submit(self._send, first) for first in range(self.num_threads)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._threads.shutdown()
        for sending in self._sending:
            sending.result()

    @contextmanager
    def calm(self, pause_s: float) -> Iterator[None]:
        """Send fewer requests while processes start, which need the CPUs too."""
        before_s, self.pause_s = self.pause_s, pause_s
        yield
        self.pause_s = before_s

    def wait_for(self, num_right: int) -> None:
        """Wait until so many more answers were right."""
        until = self.num_right + num_right
        while self.num_right < until:
            for sending in self._sending:
                if sending.done():
                    sending.result()
            time.sleep(0.02)

    def _send(self, first: int) -> None:
        number = first
        while not self._stopping.is_set():
            index = number % len(self.bodies)
            number += self.num_threads
            begun_s = time.monotonic()
            status, answer, _ = self.server.call("POST", "/v1/completions", self.bodies[index])
            seconds = time.monotonic() - begun_s
            with self._lock:
                self.longest_s = max(self.longest_s, seconds)
                if status == 200:
                    text = answer["choices"][0]["text"]
                    if text == self.expected[index]:
                        self.num_right += 1
                    else:
                        self.wrong.append(f"{self.bodies[index]}: {text!r}")
                else:
                    self.failed[str(answer["error"]["message"])] += 1
                    self.longest_failed_s = max(self.longest_failed_s, seconds)
            time.sleep(self.pause_s)
