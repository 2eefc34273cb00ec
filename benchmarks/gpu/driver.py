"""Costs of the CUDA driver's calls, and rates at which weights come to a GPU.

    python benchmarks/gpu/driver.py --output benchmarks/gpu/driver.json

- Time of each call of the driver for one page, from Python, with 1 and 16 pages in a call, for both
  page sizes, while the device is idle and while kernels run.
- Time to read the process's overhead, which the engine's loop does once a second.
- Rate of loading a checkpoint of 2 GB from cached files, for several numbers and sizes of buffers;
  beside it, of copies from page-locked memory alone, and of filling the weights with random values.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from aquifer.bench.load import made_checkpoint
from aquifer.bench.result import save
from aquifer.memory.driver.cuda import CudaDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.models import plan_model
from aquifer.weights import loader
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.store import WeightStore

MIB, TIB = 1 << 20, 1 << 40
PAGE_SIZES = (2 * MIB, 32 * MIB)
PAGES_PER_CALL = (1, 16)
NUM_PAGES = 64
REPEATS = 5
OVERHEAD_READS = 20
BUSY_CYCLES = 2_000_000_000  # about a second of a kernel

MODEL = Path(__file__).resolve().parent / "models" / "qwen3-0.6b"
CHECKPOINT_BYTES = 2_000_000_000
BUFFERS = ((8, 16 * MIB), (1, 16 * MIB), (4, 32 * MIB), (8, 32 * MIB), (16, 16 * MIB))
"""Number and size of the loader's buffers; the defaults first."""

PINNED_BYTES, PINNED_COPIES = 64 * MIB, 32


class Costs:
    """Seconds a page, by the name of the call; all repeats."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def of(self, name: str, count: int) -> Iterator[None]:
        """Measure a call, or several calls, for `count` pages."""
        start_s = time.perf_counter()
        yield
        self.seconds[name].append((time.perf_counter() - start_s) / count)


def measure_calls(costs: Costs, page_bytes: int, batch: int, is_busy: bool) -> None:
    """Measure each call of a new driver once, with `batch` pages in a call."""
    starts = range(0, NUM_PAGES, batch)
    with closing(CudaDriver()) as driver:
        driver.fill(driver.create(page_bytes, 1), 0)  # loads what the device needs for it
        torch.cuda.synchronize()
        if is_busy:
            torch.cuda._sleep(BUSY_CYCLES)
        with costs.of("reserve", 1):
            address = driver.reserve(TIB)
        with costs.of("create", NUM_PAGES):
            pages = [page for _ in starts for page in driver.create(page_bytes, batch)]
        with costs.of("map", NUM_PAGES):
            for i in starts:
                driver.map(address + i * page_bytes, pages[i : i + batch])
        with costs.of("view", NUM_PAGES):
            for _ in pages:
                driver.view(address, TIB)
        with costs.of("fence", NUM_PAGES):
            for _ in pages:
                driver.fence().passed()
        with costs.of("unmap", NUM_PAGES):
            for i in starts:
                driver.unmap(address + i * page_bytes, page_bytes, batch)
        with costs.of("zero", NUM_PAGES):
            for i in starts:
                driver.fill(pages[i : i + batch], 0)
        with costs.of("release", NUM_PAGES):
            for i in starts:
                driver.release(pages[i : i + batch])
        with costs.of("free", 1):
            driver.free(address, TIB)
        torch.cuda.synchronize()


def calls() -> list[dict[str, Any]]:
    """Measure the calls of the driver in all cases."""
    rows: list[dict[str, Any]] = []
    for page_bytes, batch, is_busy in itertools.product(PAGE_SIZES, PAGES_PER_CALL, (False, True)):
        costs = Costs()
        for _ in range(REPEATS):
            measure_calls(costs, page_bytes, batch, is_busy)
        rows.append(
            {"page_bytes": page_bytes, "pages_per_call": batch, "is_busy": is_busy}
            | {"seconds_per_page": dict(costs.seconds)}
        )
        state = "busy" if is_busy else "idle"
        print(
            f"us a page, {page_bytes // MIB} MiB x {batch} a call, {state}: {_medians_us(costs)}",
            flush=True,
        )
    return rows


def _medians_us(costs: Costs) -> str:
    medians_us = {name: 1e6 * statistics.median(all_s) for name, all_s in costs.seconds.items()}
    return "  ".join(f"{name} {median_us:.1f}" for name, median_us in medians_us.items())


def overhead() -> dict[str, Any]:
    """Measure the time to read the process's overhead."""
    costs = Costs()
    with closing(CudaDriver()) as driver:
        num_bytes = driver.overhead_bytes()
        for _ in range(OVERHEAD_READS):
            with costs.of("read", 1):
                driver.overhead_bytes()
        is_measured = driver.is_overhead_measured
    state = "measured" if is_measured else "an allowance"
    print(f"overhead {num_bytes // MIB} MiB, {state}, us: {_medians_us(costs)}", flush=True)
    return {"bytes": num_bytes, "is_measured": is_measured, "seconds": costs.seconds["read"]}


def loading() -> dict[str, Any]:
    """Measure the rates at which weights are loaded, copied and made."""
    with ExitStack() as resources:
        checkpoint = Checkpoint.open(
            resources.enter_context(made_checkpoint(MODEL, CHECKPOINT_BYTES))
        )
        driver = resources.enter_context(closing(CudaDriver()))
        pool = resources.enter_context(closing(PagePool(driver, 2 * checkpoint.num_bytes)))
        parameters = plan_model(checkpoint, torch.bfloat16).parameters
        store = WeightStore(pool, Owner("bench", Kind.WEIGHTS), parameters)
        resources.callback(store.close)
        assert store.populate()
        store.load(checkpoint)  # from here on, the files are in the page cache
        return _loading(store, checkpoint)


def _loading(store: WeightStore, checkpoint: Checkpoint) -> dict[str, Any]:
    buffered = []
    for num_buffers, buffer_bytes in BUFFERS:
        # Read when a load begins.
        loader.NUM_BUFFERS, loader.BUFFER_BYTES = num_buffers, buffer_bytes
        seconds = [_timed(lambda: store.load(checkpoint)) for _ in range(REPEATS)]
        buffered.append(
            {"num_buffers": num_buffers, "buffer_bytes": buffer_bytes, "seconds": seconds}
        )
        name = f"{num_buffers:2} buffers x {buffer_bytes // MIB} MiB"
        _print_rate(name, checkpoint.num_bytes, seconds)
    copies_s = _pinned_copies()
    _print_rate("page-locked memory to device, nothing else", PINNED_BYTES, copies_s)
    store.fill_random(0)  # starts what the device needs for it
    random_s = [_timed(lambda: store.fill_random(0)) for _ in range(REPEATS)]
    _print_rate("random weights", store.placement.num_bytes, random_s)
    return {
        "checkpoint": {"bytes": checkpoint.num_bytes, "loads": buffered},
        "page_locked_copy": {"bytes": PINNED_BYTES, "seconds": copies_s},
        "random_weights": {"bytes": store.placement.num_bytes, "seconds": random_s},
    }


def _pinned_copies() -> list[float]:
    """Seconds of a copy to the device, the mean of many that follow one another; all repeats."""
    pinned = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(pinned, device="cuda")

    def copies() -> None:
        for _ in range(PINNED_COPIES):
            device.copy_(pinned, non_blocking=True)

    return [_timed(copies) / PINNED_COPIES for _ in range(REPEATS)]


def _timed(run: Callable[[], object]) -> float:
    """Seconds of a call, and of the device's work in it."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def _print_rate(name: str, num_bytes: int, seconds: Sequence[float]) -> None:
    print(f"{name}: {num_bytes / statistics.median(seconds) / 1e9:.1f} GB/s", flush=True)


def main() -> None:
    """Measure, print a line for each case, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    arguments = parser.parse_args()
    torch.ones(1, device="cuda").sum().item()  # starts torch's part of the overhead
    torch.cuda.empty_cache()
    figures = {"overhead": overhead(), "calls": calls(), "loading": loading()}
    save(arguments.output, {"benchmark": "driver", **figures})


if __name__ == "__main__":
    main()
