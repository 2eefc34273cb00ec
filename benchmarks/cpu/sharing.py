"""Host's cost to take, share, retain and release the KV of a long prompt: our books alone.

    python benchmarks/cpu/sharing.py [--tokens 131072] [--output FILE]

The layout is that of Llama 3 8B: 128 KiB a token, so 512 pages of 2 MiB for 8192. The driver is
that of the simulator, with fences that have always passed: calls to a device, such as mapping, cost
nothing. Pages are in one run, or scattered: then no two neighbours in the sequence are neighbours
in number. A run is passed on as a range of numbers, as a cache does. In large pages, of 32 MiB as
far as the prompt fills them, `virtual` maps prompts on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from aquifer.bench.result import save
from aquifer.cache import KV_CACHES, group_cache
from aquifer.cache.base import GroupCache, KVLayout, LayerKV
from aquifer.cache.prefix import PrefixCache
from aquifer.cache.slot_pages import MappingOptions
from aquifer.memory.driver.base import Fence
from aquifer.memory.eviction_log import EvictionLog
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.runs import as_run
from aquifer.sim.driver import PAGE_BYTES, ModelledDriver

LAYOUT = KVLayout((LayerKV(8, 128, 128),) * 32, torch.bfloat16)
OWNER = Owner("llama-3-8b", Kind.KV)
LARGE = MappingOptions(32 << 20)


class _PassedFence:
    def passed(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class AheadDriver(ModelledDriver):
    """A modelled device that runs ahead of the host, so that pages are retired."""

    @property
    def runs_ahead(self) -> bool:
        """True."""
        return True

    def fence(self) -> Fence:
        """A fence that has passed."""
        return _PassedFence()


class Stopwatch:
    """Times of operations, by name, in seconds."""

    def __init__(self) -> None:
        self.times_s: dict[str, list[float]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Time what is done in this context."""
        start = time.perf_counter()
        yield
        self.times_s.setdefault(name, []).append(time.perf_counter() - start)


def open_pool(num_pages: int, *, is_scattered: bool) -> PagePool:
    """A pool of idle pages: handed out in order of their numbers, or scattered."""
    num_bytes = 4 * num_pages * PAGE_BYTES
    pool = PagePool(AheadDriver(num_bytes), num_bytes, keep_idle_bytes=num_bytes)
    pages = pool.acquire(OWNER, 4 * num_pages)
    assert pages is not None
    if is_scattered:
        Random(0).shuffle(pages)
        for page in pages:
            pool.release([page])
    else:
        pool.release(pages)
    return pool


def measure_pool(watch: Stopwatch, num_tokens: int, num_rounds: int, *, is_scattered: bool) -> None:
    """Operations of the pool on the pages of so many tokens, and on one."""
    num_pages = num_tokens * LAYOUT.token_bytes // PAGE_BYTES
    pool = open_pool(num_pages, is_scattered=is_scattered)
    prefix = Owner(OWNER.model, Kind.PREFIX)
    for count, suffix in ((num_pages, ""), (1, ", one page")):
        for _ in range(num_rounds):
            with watch.of(f"pool: acquire{suffix}"):
                acquired = pool.acquire(OWNER, count)
            assert acquired is not None
            pages = as_run(acquired)
            with watch.of(f"pool: share{suffix}"):
                pool.share(pages)
            with watch.of(f"pool: transfer{suffix}"):
                pool.transfer(pages, prefix)
            with watch.of(f"pool: release, shared{suffix}"):
                pool.release(pages)
            pool.transfer(pages, OWNER)
            with watch.of(f"pool: release, last{suffix}"):
                pool.release(pages)
    pool.close()


def measure_cache(
    name: str,
    watch: Stopwatch,
    num_tokens: int,
    num_rounds: int,
    *,
    is_scattered: bool,
    mapping: MappingOptions | None = None,
) -> None:
    """The life of a prefix: computed, retained, shared by a second sequence, evicted, and computed
    again, which the log of evictions is told."""
    pool = open_pool(num_tokens * LAYOUT.token_bytes // PAGE_BYTES, is_scattered=is_scattered)
    make = group_cache(name, 16, mapping)
    cache: GroupCache = make(pool, OWNER, LAYOUT, 8, num_tokens + 64)
    losses = EvictionLog().losses_of(Owner(OWNER.model, Kind.PREFIX))
    prefixes = PrefixCache(cache, lambda first, count: count * 1e-4, losses=losses)
    prompt = np.arange(num_tokens + 1, dtype=np.int32)
    one, tokens = np.array([1]), np.array([num_tokens])
    for number in range(num_rounds):
        cache.expect(1, num_tokens + 1, num_tokens + 2)
        with watch.of("take: a sequence gets room"):
            assert cache.reserve(one, tokens)
        with watch.of("release: a sequence ends, nothing is retained"):
            cache.release(1)
        cache.expect(1, num_tokens + 1, num_tokens + 2)
        assert cache.reserve(one, tokens)
        lease = prefixes.lock(prefixes.match(prompt + 1))
        with watch.of("retain: a sequence ends, its KV stays"):
            prefixes.insert(lease, 1, prompt, num_tokens, number)
            prefixes.unlock(lease, number)
            cache.release(1)
        with watch.of("share: a sequence begins with it"):
            match = prefixes.match(prompt)
            lease = prefixes.lock(match)
            assert cache.resume(1, prefixes.kept(match), match.num_tokens)
            prefixes.settle(lease)
            prefixes.record(lease, number)
        assert match.num_tokens == num_tokens
        with watch.of("leave: that sequence ends"):
            prefixes.insert(lease, 1, prompt, num_tokens, number)
            prefixes.unlock(lease, number)
            cache.release(1)
        with watch.of("evict: the prefix goes"):
            prefixes.evict(num_tokens * LAYOUT.token_bytes, number)
        assert not prefixes.stats.held_blocks
        pool.check()
    prefixes.close()
    cache.close()
    pool.close()


def main() -> None:
    """Measure both caches, with pages in one run, scattered and large; print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="file for the results")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    gc.freeze()
    columns: dict[str, dict[str, list[float]]] = {}
    for suffix, is_scattered in (("", False), (", scattered", True)):
        watch = Stopwatch()
        measure_pool(watch, arguments.tokens, arguments.rounds, is_scattered=is_scattered)
        columns[f"pool{suffix}"] = watch.times_s
        for name in KV_CACHES:
            watch = Stopwatch()
            measure_cache(
                name, watch, arguments.tokens, arguments.rounds, is_scattered=is_scattered
            )
            columns[f"{name}{suffix}"] = watch.times_s
    watch = Stopwatch()
    measure_cache(
        "virtual", watch, arguments.tokens, arguments.rounds, is_scattered=False, mapping=LARGE
    )
    columns["virtual, large pages"] = watch.times_s
    medians_us = {
        column: {name: 1e6 * statistics.median(times) for name, times in times_s.items()}
        for column, times_s in columns.items()
    }
    for names in (("pool", "pool, scattered"), tuple(c for c in columns if c[:4] != "pool")):
        table = Table("us, median", *names)
        for operation in medians_us[names[0]]:
            table.add_row(operation, *(f"{medians_us[name][operation]:.1f}" for name in names))
        Console().print(table)
    if arguments.output is not None:
        save(arguments.output, {"num_tokens": arguments.tokens, "median_us": medians_us})


if __name__ == "__main__":
    main()
