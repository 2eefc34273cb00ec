"""How far one client can hurt others: hostile bodies, dying processes, slow clients, a greedy key.

    python benchmarks/serve/containment.py [--model demo] [--output FILE] [--only PART]

Each part starts a server of its own, on this machine, and measures what a bystander sees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from aquifer.bench.result import save

_KILLS = 10
_STREAMS = 64
_GREEDY_REQUESTS, _GREEDY_TOKENS = 200, 300
_VISITS = 8  # of the other key
_SLOW_CONNECTIONS = 660
_FAT_REQUESTS = 60
_PATIENCE_S = 600.0


class Server:
    """A server in a process of its own."""

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "aquifer", "serve", model, "--port", "0", *options]
        environment = {**os.environ, "AQUIFER_LOG_LEVEL": "error"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (match := re.search(r"ready on (http\S+)", line)) is not None:
                self.url = match[1]
                return
        raise SystemExit("the server did not start")

    @property
    def web_bytes(self) -> int:
        """Resident memory of the web process."""
        return _resident_bytes(self.process.pid)

    @property
    def engine(self) -> int:
        """Process id of the engine: the child that holds most memory."""
        children = [
            int(status.parent.name)
            for status in Path("/proc").glob("[0-9]*/status")
            if f"PPid:\t{self.process.pid}\n" in status.read_text()
        ]
        return max(children, key=_resident_bytes)


@contextmanager
def serving(model: str, *options: str) -> Iterator[Server]:
    """A server that is stopped at the end."""
    server = Server(model, *options)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(_PATIENCE_S)


def hostile_bodies(model: str) -> dict[str, Any]:
    """Send bodies that are expensive to refuse, while others ask for health and read a stream."""
    million = 10**6
    bodies: dict[str, tuple[str, bytes]] = {
        "wrong tokens to detokenize": ("/detokenize", _json(tokens=["x"] * million)),
        "empty lists to detokenize": ("/detokenize", _json(tokens=[[]] * (3 * million))),
        "stop strings": ("/v1/completions", _json(prompt="a", stop=["ab"] * 800_000)),
        "a text of 4 MB": ("/tokenize", _json(prompt="word " * 800_000)),
        "empty messages": (
            "/v1/chat/completions",
            _json(messages=[{"role": "user", "content": ""}] * 300_000),
        ),
        "empty prompts": ("/v1/completions", _json(prompt=[[]] * (3 * million))),
        "unknown fields": (
            "/v1/completions",
            _json(prompt="a", **{f"field{i}": i for i in range(600_000)}),
        ),
        "biases": (
            "/v1/completions",
            _json(prompt="a", logit_bias={str(i): 0 for i in range(million)}),
        ),
    }
    result: dict[str, Any] = {}
    with serving(model) as server:
        before_bytes = server.web_bytes
        with _Watch(server) as watch:
            for name, (path, body) in bodies.items():
                watch.start(name)
                begin_s = time.monotonic()
                answer = httpx.post(
                    server.url + path,
                    content=body,
                    headers={"Content-Type": "application/json"},
                    timeout=_PATIENCE_S,
                )
                seconds = time.monotonic() - begin_s
                time.sleep(1)
                result[name] = {
                    "status": answer.status_code,
                    "message": answer.json()["error"]["message"][:120],
                    "answer_s": round(seconds, 3),
                    **watch.figures(),
                }
                print(f"{name}: {result[name]}", flush=True)
        result["web_mib_before"] = before_bytes >> 20
        result["web_mib_after"] = server.web_bytes >> 20
    return result


def killed_engine(model: str) -> dict[str, Any]:
    """Kill the engine process under streams, again and again."""
    rounds = []
    with serving(model) as server, ThreadPoolExecutor(_STREAMS) as threads:
        first_bytes = server.web_bytes
        for _ in range(_KILLS):
            ended_s: list[float] = []
            begun = threading.Semaphore(0)
            streams = [
                threads.submit(_read_stream, server, begun, ended_s) for _ in range(_STREAMS)
            ]
            for _ in range(_STREAMS):
                begun.acquire()
            engine = server.engine
            kill_s = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            for stream in streams:
                stream.result()
            served_s = _first_success_s(server)
            rounds.append(
                {
                    "last_client_answered_s": round(max(ended_s) - kill_s, 3),
                    "serves_again_s": round(served_s - kill_s, 3),
                    "orphan": Path(f"/proc/{engine}").exists(),
                }
            )
            print(rounds[-1], flush=True)
        return {
            "streams": _STREAMS,
            "rounds": rounds,
            "worst_answer_s": max(r["last_client_answered_s"] for r in rounds),
            "worst_serves_again_s": max(r["serves_again_s"] for r in rounds),
            "web_mib_before": first_bytes >> 20,
            "web_mib_after": server.web_bytes >> 20,
        }


def slow_clients(model: str) -> dict[str, Any]:
    """Open connections that send hardly anything, and requests with bodies where none belongs."""
    result: dict[str, Any] = {}
    with serving(model) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        before_bytes = server.web_bytes
        with _Watch(server) as watch:
            begin_s = time.monotonic()
            slow = [_connect(host, int(port), b"POST /v1/comp") for _ in range(_SLOW_CONNECTIONS)]
            opened_s = time.monotonic() - begin_s
            for connection in slow:
                connection.settimeout(_PATIENCE_S)
                connection.recv(1)  # nothing: the server closes it
            result["slow headers"] = {
                "connections": len(slow),
                "opened_s": round(opened_s, 3),
                "all_closed_s": round(time.monotonic() - begin_s, 3),
                **watch.figures(),
            }
            print(result["slow headers"], flush=True)
            watch.start("bodies")
            head = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (15 << 20)
            fat = [_connect(host, int(port), head) for _ in range(_FAT_REQUESTS)]
            with ThreadPoolExecutor(_FAT_REQUESTS) as threads:
                list(threads.map(_send_much, fat))
            time.sleep(1)
            result["bodies of GET"] = {
                "requests": len(fat),
                "web_mib_more": (server.web_bytes - before_bytes) >> 20,
                **watch.figures(),
            }
            print(result["bodies of GET"], flush=True)
            for connection in (*slow, *fat):
                connection.close()
    return result


def _connect(host: str, port: int, begin: bytes) -> socket.socket:
    """A connection that has sent the beginning of a request."""
    connection = socket.create_connection((host, port), _PATIENCE_S)
    connection.sendall(begin)
    return connection


def _send_much(connection: socket.socket) -> None:
    """Send a body of 15 MiB, as far as the server takes it."""
    connection.settimeout(5)
    with contextlib.suppress(OSError):
        connection.sendall(b"x" * (15 << 20))


def greedy_key(model: str) -> dict[str, Any]:
    """Two keys: one sends 200 long requests at once, the other a short one now and then.

    Then the same requests to a server that knows both as one key, and so serves them in order of
    arrival.
    """
    shared = _two_clients(model, "--api-key", "a,b")
    print(shared, flush=True)
    in_order = _two_clients(model, "--api-key", "a")
    print(in_order, flush=True)
    return {
        "greedy_requests": _GREEDY_REQUESTS,
        "greedy_tokens": _GREEDY_TOKENS,
        "two_keys": shared,
        "one_key": in_order,
        "throughput_ratio": round(shared["tokens_per_s"] / in_order["tokens_per_s"], 3),
    }


def _two_clients(model: str, *options: str) -> dict[str, Any]:
    """The visits of the modest client, alone and beside the greedy one, and the throughput."""
    greedy = {"prompt": "Once", "max_tokens": _GREEDY_TOKENS, "ignore_eos": True}
    with serving(model, *options) as server, ThreadPoolExecutor(_GREEDY_REQUESTS + 1) as threads:
        modest = "b" if "a,b" in options else "a"
        alone = [_visit(server, modest, None) for _ in range(_VISITS)]
        steps = _Counter()
        begin_s = time.monotonic()
        requests = [threads.submit(_complete, server, "a", greedy, steps)]
        requests += [
            threads.submit(_complete, server, "a", greedy, None)
            for _ in range(_GREEDY_REQUESTS - 1)
        ]
        while steps.count < 20:
            time.sleep(0.01)
        beside = [_visit(server, modest, steps) for _ in range(_VISITS)]
        for request in requests:
            request.result()
        seconds = time.monotonic() - begin_s
    num_tokens = _GREEDY_REQUESTS * _GREEDY_TOKENS + _VISITS * 17
    figures: dict[str, Any] = {"tokens_per_s": round(num_tokens / seconds)}
    for name, visits in (("alone", alone), ("beside", beside)):
        figures[name] = {
            key: [visit[key] for visit in visits] for key in visits[0] if visits[0][key] is not None
        }
    medians = [statistics.median(v["16_tokens_s"] for v in visits) for visits in (beside, alone)]
    figures["16_tokens_ratio"] = round(medians[0] / medians[1], 2)
    return figures


def _visit(server: Server, key: str, steps: _Counter | None) -> dict[str, Any]:
    """A request for one token, then one for 16; seconds, and the steps that the first one took."""
    before = steps.count if steps is not None else 0
    seconds = []
    num_steps = None
    for max_tokens in (1, 16):
        begin_s = time.monotonic()
        body = {"prompt": "There was", "max_tokens": max_tokens, "ignore_eos": True}
        _complete(server, key, body, None)
        seconds.append(round(time.monotonic() - begin_s, 4))
        if steps is not None and num_steps is None:
            num_steps = steps.count - before
    time.sleep(0.5)
    return {"1_token_s": seconds[0], "1_token_steps": num_steps, "16_tokens_s": seconds[1]}


class _Counter:
    """Chunks of a stream so far: one for each step that it takes part in."""

    def __init__(self) -> None:
        self.count = 0


def _complete(server: Server, key: str, body: dict[str, Any], chunks: _Counter | None) -> None:
    """Send a request and read its answer; as a stream, if its chunks are to be counted."""
    is_stream = chunks is not None
    with httpx.stream(
        "POST",
        server.url + "/v1/completions",
        json={**body, "stream": is_stream},
        headers={"Authorization": f"Bearer {key}"},
        timeout=_PATIENCE_S,
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if chunks is not None and line:
                chunks.count += 1


def _read_stream(server: Server, begun: threading.Semaphore, ended_s: list[float]) -> None:
    """Read a stream until it ends."""
    body = {"prompt": [1, 2, 3], "max_tokens": 1000, "stream": True, "ignore_eos": True}
    is_begun = False
    try:
        with httpx.stream(
            "POST", server.url + "/v1/completions", json=body, timeout=_PATIENCE_S
        ) as answer:
            for _ in answer.iter_lines():
                if not is_begun:
                    begun.release()
                    is_begun = True
    finally:
        if not is_begun:
            begun.release()
        ended_s.append(time.monotonic())


def _first_success_s(server: Server) -> float:
    """When the server has answered a request again."""
    while True:
        body = {"prompt": [1, 2, 3], "max_tokens": 1}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=_PATIENCE_S)
        if answer.status_code == 200:
            return time.monotonic()
        time.sleep(0.05)


class _Watch:
    """Asks for health and reads a stream all the time; keeps the longest waits."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._health_s: list[float] = []
        self._gaps_s: list[float] = []
        self._threads = [
            threading.Thread(target=target) for target in (self._ask_health, self._read)
        ]

    def start(self, _: str) -> None:
        """Begin a new case."""
        self._health_s.clear()
        self._gaps_s.clear()

    def figures(self) -> dict[str, float]:
        """The longest waits of this case."""
        return {
            "worst_health_s": round(max(self._health_s), 3),
            "median_health_s": round(statistics.median(self._health_s), 4),
            "worst_stream_gap_s": round(max(self._gaps_s), 3),
        }

    def __enter__(self) -> _Watch:
        for thread in self._threads:
            thread.start()
        time.sleep(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_health(self) -> None:
        with httpx.Client(timeout=_PATIENCE_S) as client:
            while not self._over.is_set():
                begin_s = time.monotonic()
                client.get(self._server.url + "/health")
                self._health_s.append(time.monotonic() - begin_s)
                time.sleep(0.02)

    def _read(self) -> None:
        body = {"prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}
        while not self._over.is_set():
            with httpx.stream(
                "POST", self._server.url + "/v1/completions", json=body, timeout=_PATIENCE_S
            ) as answer:
                last_s = time.monotonic()
                for line in answer.iter_lines():
                    if line:
                        now_s = time.monotonic()
                        self._gaps_s.append(now_s - last_s)
                        last_s = now_s
                    if self._over.is_set():
                        break


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _resident_bytes(process_id: int) -> int:
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "hostile_bodies": hostile_bodies,
    "killed_engine": killed_engine,
    "slow_clients": slow_clients,
    "greedy_key": greedy_key,
}


def main() -> None:
    """Measure, and write the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    figures = {
        name: measure(options.model)
        for name, measure in PARTS.items()
        if options.only in (None, name)
    }
    if options.output is not None:
        save(options.output, figures)


if __name__ == "__main__":
    main()
