"""Concurrent streams from a real server: `aquifer serve` in its processes, over HTTP.

The client is small, because it shares the machine with the server: one thread, which notes when
each event of a stream arrives and reads only the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from asyncio import StreamReader
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from aquifer.bench.result import summarize
from aquifer.bench.workload import LengthRange, Workload
from aquifer.errors import EngineError

_READY = re.compile(r"ready on (http://\S+)")
_BUSY = "while True: pass"


@dataclass(frozen=True, slots=True)
class Stream:
    """One streamed completion: tokens that the server counted, and times in seconds."""

    num_tokens: int
    sent_s: float
    events_s: list[float]  # arrival of each piece of text

    @property
    def first_token_s(self) -> float:
        """Time to the first piece of text."""
        return self.events_s[0] - self.sent_s

    @property
    def per_token_s(self) -> float:
        """Time of an output token after the first."""
        return (self.events_s[-1] - self.events_s[0]) / max(self.num_tokens - 1, 1)

    @property
    def between_s(self) -> list[float]:
        """Times between neighbouring pieces of text."""
        return np.diff(self.events_s).tolist()


@dataclass(frozen=True, slots=True)
class Run:
    """Streams that were requested at once."""

    streams: list[Stream]

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last stream."""
        ends = (stream.events_s[-1] for stream in self.streams)
        return max(ends) - min(stream.sent_s for stream in self.streams)

    @property
    def output_throughput(self) -> float:
        """Output tokens a second."""
        return sum(stream.num_tokens for stream in self.streams) / self.seconds


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Results of repeats of one measurement, by the names of `vllm bench serve`.

    Rates are those of the median run; latencies are taken over the streams of all runs.
    """
    seconds = float(np.median([run.seconds for run in runs]))
    streams = [stream for run in runs for stream in run.streams]
    latencies_s = {
        "ttft": [stream.first_token_s for stream in streams],
        "tpot": [stream.per_token_s for stream in streams],
        "itl": [gap_s for stream in streams for gap_s in stream.between_s] or [0.0],
        "e2el": [stream.events_s[-1] - stream.sent_s for stream in streams],
    }
    return {
        "completed": len(streams),
        "total_output_tokens": sum(stream.num_tokens for stream in streams),
        "request_throughput": len(runs[0].streams) / seconds,
        "output_throughput": float(np.median([run.output_throughput for run in runs])),
        **{
            f"{statistic}_{name}_ms": 1e3 * value
            for name, values in latencies_s.items()
            for statistic, value in summarize(values).items()
        },
        "output_throughputs": [run.output_throughput for run in runs],
    }


@contextlib.contextmanager
def serving(
    model: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run `aquifer serve` on a free port, and stop it in the end.

    Args:
        model: what to serve.
        arguments: further arguments of the command.
        environment: variables that are added to those of this process.

    Yields: its URL.

    Raises:
        EngineError: it did not start; its messages are on standard error.
    """
    command = [sys.executable, "-m", "aquifer", "serve", model, "--port", "0", *arguments]
    server = subprocess.Popen(
        command,
        env={**os.environ, "AQUIFER_LOG_LEVEL": "error", **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield _url(server)
    finally:
        server.terminate()
        server.communicate()  # reads what it writes, so that it never waits for this process


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that each keep a core busy."""
    with contextlib.ExitStack() as processes:
        for _ in range(count):
            process = processes.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            processes.callback(process.kill)
        yield


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: streams at once, of which lengths, beside how many busy processes."""

    concurrencies: Sequence[int]
    busy: Sequence[int]
    inputs: LengthRange
    outputs: LengthRange
    vocab_size: int
    seed: int

    def workload(self, concurrency: int, repeat: int) -> Workload:
        """The requests of one run. Each repeat has other prompts, so that none is cached."""
        seed = self.seed + repeat
        return Workload.random(concurrency, self.inputs, self.outputs, self.vocab_size, seed)


def measure(urls: Mapping[str, str], load: Load, repeats: int) -> list[dict[str, Any]]:
    """Measure servers in turns, so that other load on the machine hits all alike.

    Args:
        urls: the servers, by name.
        load: what to measure.
        repeats: runs of each kind, after one that does not count.

    Returns: for each number of busy processes, number of streams, and server: its `figures`.
    """
    results = []
    for num_busy in load.busy:
        runs: dict[tuple[int, str], list[Run]] = {}
        with busy(num_busy):
            for repeat in range(repeats + 1):
                order = list(urls) if repeat % 2 else list(urls)[::-1]
                for concurrency, name in itertools.product(load.concurrencies, order):
                    run = run_streams(urls[name], load.workload(concurrency, repeat))
                    if repeat:
                        runs.setdefault((concurrency, name), []).append(run)
        results += [
            {
                "server": name,
                "busy": num_busy,
                "concurrency": concurrency,
                **figures(runs[concurrency, name]),
            }
            for concurrency, name in itertools.product(load.concurrencies, urls)
        ]
    return results


def run_streams(url: str, workload: Workload) -> Run:
    """Request all prompts at once, each as a stream.

    Raises:
        EngineError: the server refused one, or ended its stream early.
    """

    async def run() -> list[Stream]:
        requests = zip(workload.prompts, workload.output_lengths, strict=True)
        return await asyncio.gather(*(_complete(url, *request) for request in requests))

    return Run(asyncio.run(run()))


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        found = _READY.search(line)
        if found is not None:
            return found[1]
    raise EngineError("aquifer serve ended before it was ready")


async def _complete(url: str, prompt: list[int], num_tokens: int) -> Stream:
    address = urlsplit(url)
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {address.netloc}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    with contextlib.closing(writer):
        sent_s = time.perf_counter()
        writer.write("\r\n".join((*head, "", body)).encode())
        status = await reader.readline()
        while await reader.readline() not in (b"\r\n", b""):
            pass
        if b" 200 " not in status:
            answer = (status + await reader.read()).decode()
            raise EngineError(f"the server refused a request: {answer}")
        events_s, last = [], b""
        async for event in _events(reader):
            if event == b"data: [DONE]":
                break
            events_s.append(time.perf_counter())
            last = event
        else:
            raise EngineError(f"the server ended a stream early: {last.decode()}")
    usage = json.loads(last.removeprefix(b"data: "))["usage"]
    return Stream(usage["completion_tokens"], sent_s, events_s[:-1])


async def _events(reader: StreamReader) -> AsyncIterator[bytes]:
    """The server-sent events of a chunked body."""
    buffer = b""
    while size := int(await reader.readline() or b"0", 16):
        buffer += (await reader.readexactly(size + 2))[:-2]
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            yield event
