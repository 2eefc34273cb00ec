"""Parts `calls` and `bandwidth`: costs of the memory driver's calls, and rates of allocation."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from benchmarks.vattention import paper
from benchmarks.vattention.record import Record
from benchmarks.vattention.settings import KIB, Settings

from aquifer.bench.result import summarize
from aquifer.memory.driver import open_driver
from aquifer.memory.driver.base import Driver, Handle

GOAL_GB_PER_S = 20
"""Memory that a thread should create and map in a second, with pages of 2 MiB."""

_PRODUCT_SIZE = 8192  # rows and columns of the matrices that keep the GPU busy: 1.5 ms on an H200
_PRODUCTS = 100
_WARM_UP_CALLS = 8

_API_CALLS = {
    "cuMemAddressReserve": "reserve",
    "cuMemCreate": "create",
    "cuMemMap": "map",
    "cuMemSetAccess": "set access",
    "cuMemUnmap": "unmap",
    "cuMemRelease": "release",
    "cuMemAddressFree": "free",
}
"""Functions of CUDA, by the names of `paper.CALLS_US`."""


class Times:
    """Seconds of calls, by name; not kept while `is_kept` is False."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.is_kept = True

    @contextmanager
    def of(self, name: str, count: int = 1) -> Iterator[None]:
        """Measure a call for `count` pages; the time is that of a page."""
        start_s = time.perf_counter()
        yield
        seconds = (time.perf_counter() - start_s) / count
        if self.is_kept:
            self.seconds[name].append(seconds)

    def figures_us(self) -> dict[str, dict[str, float]]:
        """Median, mean and 99th percentile of each call, in microseconds, and how many there were.

        A name without a call has no figures.
        """
        return {
            name: {key: 1e6 * value for key, value in summarize(seconds).items()}
            | {"count": len(seconds)}
            for name, seconds in self.seconds.items()
        }


class TimedApi:
    """CUDA's driver API that measures its calls of virtual memory.

    Args:
        api: the API.
        times: gets the seconds of each call.
    """

    def __init__(self, api: Any, times: Times) -> None:
        self._api = api
        self._times = times

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._api, name)
        if name not in _API_CALLS:
            return found

        def timed(*arguments: Any) -> Any:
            with self._times.of(_API_CALLS[name]):
                return found(*arguments)

        return timed


class Work:
    """Matrix products on another stream of the GPU."""

    def __init__(self, device: str) -> None:
        size = (_PRODUCT_SIZE, _PRODUCT_SIZE)
        self._matrices = [torch.randn(size, device=device).bfloat16() for _ in range(3)]
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._ends: list[torch.cuda.Event] = []

    def refill(self) -> None:
        """Submit products, so that at least one batch of them has not begun."""
        left, right, out = self._matrices
        self._ends = [end for end in self._ends if not end.query()]
        with torch.cuda.stream(self._stream):
            while len(self._ends) < 2:
                for _ in range(_PRODUCTS):
                    torch.mm(left, right, out=out)
                self._ends.append(torch.cuda.Event())
                self._ends[-1].record()

    def finish(self) -> None:
        """Wait for the products, and release the memory."""
        self._stream.synchronize()
        self._matrices.clear()


def calls(settings: Settings, record: Record) -> None:
    """Measure the latency of each call, by page size (Table 2)."""
    record.content["paper_us"] = paper.CALLS_US
    cells = {
        f"{size // KIB} KiB x {batch}{', busy' if is_busy else ''}": (size, batch, is_busy)
        for is_busy in ((False, True) if settings.on_gpu else (False,))
        for batch in (1, settings.batch_pages)
        for size in settings.page_sizes
    }
    for _, (page_bytes, batch, is_busy) in record.cells(cells):
        ours, api = Times(), Times()
        with ExitStack() as resources:
            driver = _open(settings.device, api)
            resources.callback(driver.close)
            work: Work | None = None
            if is_busy:
                work = Work(settings.device)
                resources.callback(work.finish)
            measure_calls(driver, page_bytes, batch, settings.num_calls, work, (ours, api))
        record.add(
            "rows",
            {
                "page_kib": page_bytes // KIB,
                "pages_per_call": batch,
                "is_busy": is_busy,
                "driver_us_per_page": ours.figures_us(),
                "api_us_per_call": api.figures_us(),
            },
        )


def _open(device: str, api: Times) -> Driver:
    """The driver of a device; on a GPU, the calls of CUDA's API are measured too."""
    if device == "cpu":
        return open_driver(device)
    from aquifer.memory.driver.cuda import CudaDriver, load_api

    return CudaDriver(torch.device(device).index or 0, api=TimedApi(load_api(), api))


def measure_calls(
    driver: Driver,
    page_bytes: int,
    batch: int,
    num_calls: int,
    work: Work | None,
    times: Sequence[Times],
) -> None:
    """Make each call for `batch` pages, until there are enough; with `work`, while that runs.

    Args:
        driver: the driver.
        page_bytes: size of a page.
        batch: pages of a call.
        num_calls: measured calls of each kind.
        work: work that the device does meanwhile.
        times: gets the times of the driver's calls, and others that are kept for as many rounds.
    """
    ours = times[0]
    num_bytes = page_bytes * batch
    num_done = -_WARM_UP_CALLS
    while num_done < num_calls:
        if work is not None:
            work.refill()
        for each in times:
            each.is_kept = num_done >= 0
        with ours.of("reserve"):
            address = driver.reserve(num_bytes)
        with ours.of("create", batch):
            handles = driver.create(page_bytes, batch)
        with ours.of("map, set access", batch):
            driver.map(address, handles)
        with ours.of("unmap", batch):
            driver.unmap(address, page_bytes, batch)
        with ours.of("release", batch):
            driver.release(handles)
        with ours.of("free"):
            driver.free(address, num_bytes)
        num_done += 1


def bandwidth(settings: Settings, record: Record) -> None:
    """Measure how fast threads allocate memory, by page size (Table 7)."""
    record.content |= {
        "paper_gb_per_s": paper.BANDWIDTH_GB_PER_S,
        "goal_gb_per_s": GOAL_GB_PER_S,
    }
    cells = {
        f"{size // KIB} KiB x {batch}, {num_threads} threads": (size, batch, num_threads)
        for num_threads in (1, 2)
        for batch in (1, settings.batch_pages)
        for size in settings.page_sizes
    }
    for _, (page_bytes, batch, num_threads) in record.cells(cells):
        created, mapped = [], []
        driver = open_driver(settings.device)
        try:
            for _ in range(max(settings.repeats // 2, 1) + 1):
                one, other = _allocate(
                    driver, page_bytes, batch, num_threads, settings.bandwidth_bytes
                )
                created.append(one)
                mapped.append(other)
        finally:
            driver.close()
        record.add(
            "rows",
            {
                "page_kib": page_bytes // KIB,
                "pages_per_call": batch,
                "threads": num_threads,
                # The first repeat is a warm-up.
                "create_map_gb_per_s": summarize(created[1:])["median"] / 1e9,
                "map_gb_per_s": summarize(mapped[1:])["median"] / 1e9,
                "create_map_bytes_per_s": created[1:],
                "map_bytes_per_s": mapped[1:],
            },
        )


def _allocate(
    driver: Driver, page_bytes: int, batch: int, num_threads: int, num_bytes: int
) -> tuple[float, float]:
    """Bytes a second and thread, when pages are created and mapped, and when they are mapped."""
    num_pages = max(num_bytes // num_threads // page_bytes // batch, 1) * batch
    size = num_pages * page_bytes
    starts = range(0, num_pages, batch)
    addresses = [driver.reserve(size) for _ in range(num_threads)]
    pages: list[list[Handle]] = [[] for _ in range(num_threads)]

    def create_and_map(thread: int) -> None:
        for start in starts:
            handles = driver.create(page_bytes, batch)
            driver.map(addresses[thread] + start * page_bytes, handles)
            pages[thread] += handles

    def map_pages(thread: int) -> None:
        for start in starts:
            handles = pages[thread][start : start + batch]
            driver.map(addresses[thread] + start * page_bytes, handles)

    created_s = _threads_s(create_and_map, num_threads)
    for address in addresses:
        driver.unmap(address, page_bytes, num_pages)
    mapped_s = _threads_s(map_pages, num_threads)
    for address, handles in zip(addresses, pages, strict=True):
        driver.unmap(address, page_bytes, num_pages)
        driver.release(handles)
        driver.free(address, size)
    return size / created_s, size / mapped_s


def _threads_s(run: Callable[[int], None], num_threads: int) -> float:
    """Seconds from the start of the first thread's work to the end of the last one's."""
    barrier = threading.Barrier(num_threads)

    def body(thread: int) -> tuple[float, float]:
        barrier.wait()
        start_s = time.perf_counter()
        run(thread)
        return start_s, time.perf_counter()

    with ThreadPoolExecutor(num_threads) as threads:
        spans = list(threads.map(body, range(num_threads)))
    return max(end for _, end in spans) - min(start for start, _ in spans)
