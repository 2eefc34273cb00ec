"""Requests sent at planned times, whatever becomes of the others (an open loop)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aquifer.bench.serving.stream import Failure, Stream, open_stream
from aquifer.bench.serving.target import Target

_HOPELESS = (401, 403, 404, 405)
"""HTTP statuses that later requests would get too."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one pass, and when they are sent.

    Args:
        endpoint: the path, such as `/v1/completions`.
        bodies: the JSON of each request.
        arrivals_s: planned time of each request in seconds after the start, ascending.
        max_concurrency: most requests at once; None for no limit.
    """

    endpoint: str
    bodies: Sequence[bytes]
    arrivals_s: Sequence[float]
    max_concurrency: int | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the endpoint answers conversations."""
        return is_chat(self.endpoint)


@dataclass(slots=True)
class Run:
    """What became of the requests of one pass.

    Args:
        streams: requests that were answered.
        failures: requests that were not.
        seconds: from the start to the end of the last request.
        max_send_lag_s: greatest delay of a request behind its planned time that the client caused;
            waiting for `max_concurrency` is none.
        client_cpu_s: CPU time of the client.
    """

    streams: list[Stream] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    max_send_lag_s: float = 0.0
    client_cpu_s: float = 0.0

    @property
    def is_hopeless(self) -> bool:
        """Whether every request failed, for a reason that the next ones have too."""
        return bool(self.failures and not self.streams and self.failures[-1].status in _HOPELESS)


def is_chat(endpoint: str) -> bool:
    """Whether an endpoint answers conversations."""
    return endpoint.rstrip("/").endswith("/chat/completions")


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> npt.NDArray[np.float64]:
    """Draw the planned times of requests, as `vllm bench serve` does.

    Times between arrivals have a gamma distribution. All are then scaled so that the last request
    comes at count / rate.

    Args:
        count: number of requests.
        rate: requests a second; infinite to send all at once.
        burstiness: shape of the distribution. 1 is a Poisson process; a smaller value makes
            bursts, a greater one evens the times out, and an infinite one makes them equal.
        seed: seed of the generator.

    Returns: seconds after the start, ascending; shape (count,).
    """
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    generator = np.random.default_rng(seed)
    times_s = np.cumsum(generator.gamma(burstiness, 1 / (rate * burstiness), count))
    if times_s[-1] > 0:
        times_s *= count / rate / times_s[-1]
    return times_s


def send(target: Target, load: Load, on_end: Callable[[], None] = lambda: None) -> Run:
    """Send the requests of a pass, each as a stream, and wait for all of them.

    Sending stops early if the server refuses all requests, as it does with a wrong key.

    Args:
        target: the server.
        load: the requests.
        on_end: called at the end of each request.
    """
    _allow_sockets(len(load.bodies))
    with _no_collection():
        cpu_s = time.process_time()
        run = asyncio.run(_send(target, load, on_end))
        run.client_cpu_s = time.process_time() - cpu_s
    return run


async def _send(target: Target, load: Load, on_end: Callable[[], None]) -> Run:
    run = Run()
    limit = load.max_concurrency
    slots = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)

    async def one(body: bytes, planned_s: float) -> None:
        run.max_send_lag_s = max(run.max_send_lag_s, time.perf_counter() - planned_s)
        async with slots:
            if run.is_hopeless:
                return
            outcome = await open_stream(target, load.endpoint, body, is_chat=load.is_chat)
        if isinstance(outcome, Stream):
            run.streams.append(outcome)
        else:
            run.failures.append(outcome)
        on_end()

    begin_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for body, arrival_s in zip(load.bodies, load.arrivals_s, strict=True):
            wait_s = begin_s + arrival_s - time.perf_counter()
            # Even if it is late: earlier requests are sent before later ones connect.
            await asyncio.sleep(max(wait_s, 0))
            if run.is_hopeless:
                break
            tasks.create_task(one(body, begin_s + arrival_s))
    run.seconds = time.perf_counter() - begin_s
    return run


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage before the context, and none within it: a collection delays all streams."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _allow_sockets(count: int) -> None:
    """Raise the limit of open files, as far as this process may, to that many sockets more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
