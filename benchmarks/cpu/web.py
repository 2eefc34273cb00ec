"""CPU time of the web process for a streamed token: `make bench-web`.

    python benchmarks/cpu/web.py [--before PATH] [--output FILE]

The web process is the real one, with real sockets. The engine process is real too, but its engine
has no model: every running request gets a token at each step, and steps begin at a fixed interval.
The client is a process that only reads bytes, and counts events. In a window in which all streams
run, the CPU time of the web process (`/proc/PID/stat`, all threads) is divided by the events that
the client got. An event is a token: the tokens are those of an English text, and no character of it
takes two.

`--before` is another checkout, whose server is measured in turns with this one's. `--processes` is
the number of web processes; where there are several, the CPU time is that of all of them and of the
server's first process, which divides the engine's messages among them. Each measurement has new
processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.table import Table

from aquifer.bench.result import commit, environment, save
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine import reports
from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.engine.policies.placement import DeviceReport, ModelReport
from aquifer.engine.reports import (
    EngineStats,
    KVCapacity,
    LoadProgress,
    MemoryReport,
    ModelInfo,
    ModelMemory,
)
from aquifer.memory.owners import Kind
from aquifer.predict.ended import EndedOutput
from aquifer.serve.config import ServerConfig
from aquifer.serve.fleet import LocalFleet
from aquifer.serve.process import EngineLike
from aquifer.serve.server import serve
from aquifer.text import Tokenizer

_ROOT = Path(__file__).resolve().parents[2]
_MODEL = "demo"
_TEXT = "Once upon a time there was a little girl named Lily, who loved to play in the park. "
_READY = re.compile(r"ready on (http://\S+) ([\d ]+)")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SETTLE_S = 1.0
_EXIT_S = 8.0
_READ_BYTES = 1 << 16
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: which endpoint, how many streams, the interval of the steps, processes."""

    endpoint: str
    streams: int
    step_ms: float
    processes: int = 1


_LOADS = tuple(
    Load(endpoint, streams, step_ms)
    for streams, step_ms in ((512, 5.0), (512, 30.0), (64, 5.0), (8, 5.0))
    for endpoint in _PATHS
)

# ---- the server


class SteadyEngine:
    """An engine without a model: each step adds a token to every running request.

    Args:
        spec: the model whose tokenizer the web process uses.
        step_s: seconds from the start of a step to that of the next one.
    """

    def __init__(self, spec: ModelSpec, step_s: float) -> None:
        tokenizer = Tokenizer.load(spec.path)
        assert tokenizer is not None
        self.on_launch: Callable[[str, int], None] = lambda _, __: None
        self.on_wait: Callable[[], None] = lambda: None
        self._name = spec.name
        self._vocab_size = tokenizer.backend.get_vocab_size()
        self._text = tokenizer.encode(_TEXT)
        self._step_s = step_s
        self._next_s = 0.0
        self._running: dict[str, int] = {}  # tokens so far, by request id

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The only model."""
        info = ModelInfo(self._name, "", "Steady", "float32", 1 << 24, self._vocab_size, 0, 0, 1)
        return {self._name: info}

    @property
    def has_work(self) -> bool:
        """Whether a request runs."""
        return bool(self._running)

    @property
    def should_step(self) -> bool:
        """Never: there is no device that could idle."""
        return False

    def add(self, request: Request) -> None:
        """Start a request, which runs until it is aborted."""
        self._running[request.request_id] = 0

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request."""
        self._running.pop(request_id, None)

    def withdraw(self, model: str, most: int) -> list[str]:
        """Give up none: all run at once."""
        return []

    def keep_alive(self, model: str, seconds: float) -> None:
        """There are no weights."""

    def step(self) -> list[TokenOutput]:
        """Wait until the next step is due; return a token for each request."""
        now_s = time.monotonic()
        self._next_s = max(self._next_s + self._step_s, now_s - self._step_s)
        time.sleep(max(self._next_s - now_s, 0.0))
        self.on_launch(self._name, len(self._running))
        outputs = []
        for request_id, count in self._running.items():
            outputs.append(TokenOutput(request_id, [self._text[count % len(self._text)]]))
            self._running[request_id] = count + 1
        return outputs

    def stats(self) -> EngineStats:
        """Counters as an engine has them."""
        none = {self._name: 0}
        return EngineStats({self._name: len(self._running)}, none, none, 0.5, none, none)

    def share_lengths(self) -> None:
        """Nothing is learnt here."""

    def take_ended(self) -> dict[str, list[EndedOutput]]:
        """None: nothing is learnt here."""
        return {}

    def learn_lengths(self, model: str, ended: list[EndedOutput]) -> None:
        """Nothing is learnt here."""

    def device_report(self) -> DeviceReport:
        """The model is there."""
        return DeviceReport({self._name: ModelReport(0, is_resident=True)}, 1, 1)

    def memory(self) -> MemoryReport:
        """A report of a pool with one free page."""
        memory: dict[str, Any] = dict.fromkeys((f.name for f in fields(ModelMemory)), 0)
        memory |= {"bytes_by_kind": dict.fromkeys(Kind, 0), "kv_capacity": KVCapacity(1, 1.0)}
        if "status" in memory:  # older checkouts have none
            memory["status"] = reports.ModelStatus(reports.ModelState.RESIDENT, 0, 0)
        model = ModelMemory(**memory | {"num_running": len(self._running)})
        return MemoryReport(
            device="none",
            page_bytes=1,
            budget_bytes=1,
            overhead_bytes=0,
            free_bytes=1,
            idle_bytes=0,
            retired_bytes=0,
            mapped_pages=0,
            free_pages=1,
            models={self._name: model},
            process_resident_bytes=0,
        )

    def pin_prefix(self, model: str, token_ids: list[int], salt: str | None, client: str) -> int:
        """No client pins one."""
        raise NotImplementedError

    def unpin_prefix(self, model: str, token_ids: list[int], salt: str | None) -> None:
        """No client unpins one."""
        raise NotImplementedError

    idle_s = None

    def prepare(self) -> bool:
        """There is nothing to do."""
        return False

    def ask_for_model(self, name: str) -> None:
        """No client loads one."""
        raise NotImplementedError

    unload_model = pin_model = unpin_model = remove_model = ask_for_model

    def add_model(self, spec: ModelSpec, *, load: bool) -> ModelInfo:
        """No client adds one."""
        raise NotImplementedError

    def close(self) -> None:
        """End all requests."""
        self._running.clear()


def open_steady(
    step_s: float, config: EngineConfig, _: Callable[[LoadProgress], None]
) -> EngineLike:
    """Open an engine without a model, in the engine process."""
    return SteadyEngine(config.models[0], step_s)


def run_server(step_ms: float, processes: int, profile: Path | None) -> None:
    """Serve until SIGTERM; the ready line on standard output has the URL and process ids.

    Args:
        step_ms: interval of the steps.
        processes: web processes.
        profile: file for what cProfile finds in the web process; None to run without it.
    """

    config = ServerConfig(port=0, log_level="error", shutdown_timeout_s=0.0)
    if processes > 1:  # older checkouts have no such option
        config = replace(config, api_server_count=processes)

    def on_ready(url: str) -> None:
        children = multiprocessing.active_children()
        web = [child.pid for child in children if child.name.startswith("aquifer-web")]
        print(f"ready on {url}", os.getpid(), *web, flush=True)

    def run() -> None:
        engine = EngineConfig(models=(ModelSpec.parse(_MODEL),))
        serve(
            engine,
            config,
            on_progress=lambda _: None,
            on_ready=on_ready,
            fleet=LocalFleet(engine, config, partial(open_steady, step_ms / 1e3)),
        )

    if profile is None:
        run()
        return
    import cProfile

    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(run)
    profiler.dump_stats(profile)


# ---- the client


def run_client(url: str, pids: list[int], load: Load, window_s: float) -> dict[str, float]:
    """Open streams and read them for a while.

    Args:
        url: the server.
        pids: its processes of which the CPU time is measured.
        load: which streams.
        window_s: seconds to measure, once each stream has had an event and things have settled.

    Returns: CPU seconds of the web processes, events and reads that had any, and seconds.
    """
    address = urlsplit(url)
    request = _request(load.endpoint)
    poller = select.epoll()
    connections = {}
    for _ in range(load.streams):
        connection = socket.create_connection((str(address.hostname), int(address.port or 0)))
        connection.sendall(request)
        connections[connection.fileno()] = connection
        poller.register(connection, select.EPOLLIN)
    silent = set(connections)
    num_events = num_reads = 0

    def read_until(is_over: Callable[[], bool]) -> None:
        nonlocal num_events, num_reads
        while not is_over():
            for number, _ in poller.poll(0.1):
                data = connections[number].recv(_READ_BYTES)
                if not data:
                    raise SystemExit("the server ended a stream")
                count = data.count(b'"choices":[{')
                num_events += count
                num_reads += 1
                if silent and count:
                    silent.discard(number)

    def wait(seconds: float) -> None:
        end_s = time.monotonic() + seconds
        read_until(lambda: time.monotonic() >= end_s)

    read_until(lambda: not silent)
    wait(_SETTLE_S)
    before = sum(map(_cpu_s, pids)), num_events, num_reads, time.monotonic()
    wait(window_s)
    after = sum(map(_cpu_s, pids)), num_events, num_reads, time.monotonic()
    cpu_s, events, reads, seconds = (b - a for a, b in zip(before, after, strict=True))
    return {"cpu_s": cpu_s, "events": events, "reads": reads, "seconds": seconds}


def _request(endpoint: str) -> bytes:
    prompt: dict[str, Any] = {"prompt": "Once"}
    if endpoint == "chat":
        prompt = {"messages": [{"role": "user", "content": "Once"}]}
    body = json.dumps({**prompt, "max_tokens": 1 << 23, "ignore_eos": True, "stream": True})
    head = (
        f"POST {_PATHS[endpoint]} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", body)).encode()


def _cpu_s(pid: int) -> float:
    """CPU time of a process: of all its threads, in user mode and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


# ---- both


def measure(tree: Path, load: Load, window_s: float, profile: Path | None = None) -> dict[str, Any]:
    """Run a server of a checkout and a client; return what the client measured."""
    with _serving(tree, load, profile) as (url, pids):
        options = ["--client", url, "--pids", *pids, "--load", json.dumps(asdict(load))]
        command = [sys.executable, __file__, *options, "--window", str(window_s)]
        done = subprocess.run(
            command, env=_environment(_ROOT), stdout=subprocess.PIPE, text=True, check=True
        )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def send_us(num_connections: int = 512, num_bytes: int = 250, rounds: int = 40) -> float:
    """CPU microseconds of one `send` of an event on this machine, to a process that reads.

    It is the floor of a token that is written by itself, before any work of Python's.
    """
    reader = "import sys, benchmarks.cpu.web as web; web.read_all(int(sys.argv[1]))"
    with socket.create_server(("127.0.0.1", 0), backlog=num_connections) as listener:
        process = subprocess.Popen(
            [sys.executable, "-c", reader, str(listener.getsockname()[1])],
            cwd=_ROOT,
            env=_environment(_ROOT),
        )
        connections = [listener.accept()[0] for _ in range(num_connections)]
    data = bytes(num_bytes)
    cpu_s = 0.0
    for _ in range(rounds):
        begin_s = time.thread_time()
        for connection in connections:
            connection.send(data)
        cpu_s += time.thread_time() - begin_s
        time.sleep(0.02)
    for connection in connections:
        connection.close()
    process.wait()
    return 1e6 * cpu_s / (rounds * num_connections)


def read_all(port: int, num_connections: int = 512) -> None:
    """Read from connections to a port until one ends: the other side of `send_us`."""
    poller = select.epoll()
    connections = {}
    for _ in range(num_connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connections[connection.fileno()] = connection
        poller.register(connection, select.EPOLLIN)
    while all(connections[number].recv(_READ_BYTES) for number, _ in poller.poll()):
        pass


@contextmanager
def _serving(tree: Path, load: Load, profile: Path | None) -> Iterator[tuple[str, list[str]]]:
    """Run the server of a checkout; its URL, and the ids of the processes to measure."""
    options = ["--server", str(load.step_ms), "--processes", str(load.processes)]
    options += ["--profile", str(profile)] if profile else []
    server = subprocess.Popen(
        [sys.executable, __file__, *options],
        env=_environment(tree),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        found = _READY.search(server.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        yield found[1], found[2].split()
    finally:
        server.terminate()
        try:
            server.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            server.kill()  # it has far more outputs to send than it can
            server.wait()


def _environment(tree: Path) -> dict[str, str]:
    path = os.pathsep.join([str(tree / "src"), str(_ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def figures_of(load: Load, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median figures of the runs of one load, and every run."""
    costs_us = [1e6 * run["cpu_s"] / run["events"] for run in runs]
    return {
        **asdict(load),
        "us_per_token": float(np.median(costs_us)),
        "tokens_per_s": float(np.median([run["events"] / run["seconds"] for run in runs])),
        "cores": float(np.median([run["cpu_s"] / run["seconds"] for run in runs])),
        "tokens_per_read": float(np.median([run["events"] / run["reads"] for run in runs])),
        "us_per_token_of_runs": costs_us,
        "runs": runs,
    }


def _table(results: dict[str, list[dict[str, Any]]], floor_us: float) -> Table:
    table = Table(title=f"CPU time of the web process; one send of an event: {floor_us:.1f} us")
    for column in (
        "endpoint",
        "streams",
        "step",
        "processes",
        "tree",
        "us a token",
        "tokens/s",
        "cores",
    ):
        table.add_column(column, justify="left" if column in ("endpoint", "tree") else "right")
    for of_load in zip(*results.values(), strict=True):
        for tree, figures in zip(results, of_load, strict=True):
            table.add_row(
                figures["endpoint"],
                str(figures["streams"]),
                f"{figures['step_ms']:g} ms",
                str(figures["processes"]),
                tree,
                f"{figures['us_per_token']:.1f}",
                f"{figures['tokens_per_s']:,.0f}",
                f"{figures['cores']:.2f}",
            )
    return table


def main() -> None:
    """Measure, write the file and print the table; or be the server or the client."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of each run")
    parser.add_argument("--streams", type=int, nargs="+", help="only these numbers of streams")
    parser.add_argument("--processes", type=int, default=1, help="web processes")
    parser.add_argument("--endpoints", nargs="+", choices=_PATHS, default=list(_PATHS))
    parser.add_argument("--profile", type=Path, help="with --server: file for cProfile's figures")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--server", type=float, metavar="MS", help="be the server, with such steps")
    parser.add_argument("--client", metavar="URL", help="be the client of this server")
    parser.add_argument("--pids", type=int, nargs="+", help="with --client: what is measured")
    parser.add_argument("--load", type=json.loads, help="with --client: which streams")
    options = parser.parse_args()
    if options.server is not None:
        run_server(options.server, options.processes, options.profile)
        return
    if options.client is not None:
        load = Load(**options.load)
        print(json.dumps(run_client(options.client, options.pids, load, options.window)))
        return
    trees = {"after": _ROOT}
    if options.before is not None:
        trees = {"before": options.before.resolve(), **trees}
    loads = [
        replace(load, processes=options.processes)
        for load in _LOADS
        if load.endpoint in options.endpoints
        and (options.streams is None or load.streams in options.streams)
    ]
    runs: dict[tuple[str, Load], list[dict[str, Any]]] = {}
    floors_us = []
    for repeat in range(options.repeats):
        floors_us.append(send_us())
        for load in loads:
            for name in list(trees)[:: 1 if repeat % 2 else -1]:
                run = measure(trees[name], load, options.window)
                runs.setdefault((name, load), []).append(run)
    results = {name: [figures_of(load, runs[name, load]) for load in loads] for name in trees}
    floor_us = float(np.median(floors_us))
    if options.output is not None:
        figures = {
            # Paths of this machine mean nothing elsewhere.
            "environment": {**environment(), "command": "web.py"},
            "benchmark": "web",
            "model": _MODEL,
            "before": None if options.before is None else commit(options.before),
            "window_s": options.window,
            "send_us": floor_us,
            "results": results,
        }
        save(options.output, figures)
    Console(width=100).print(_table(results, floor_us))


if __name__ == "__main__":
    main()
