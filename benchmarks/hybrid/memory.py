"""Memory of a hybrid model: how many requests fit at once, and what retained prefixes take.

    python benchmarks/hybrid/memory.py --data DATA --output benchmarks/hybrid

Both are the real cache managers and the real scheduler, of Falcon-H1-7B's layout, without a device:

- **Concurrency.** Requests of a length are given room, KV and state, until a budget of 40 GiB has
  no page left. Beside it, what blocks of 1568 tokens with pages of equal size for states allow, as
  vLLM 0.24 chooses them for this model: each request takes a block for each 1568 tokens and one
  for its state. And the budget divided by a request's own bytes.
- **Retained prefixes.** Mooncake's synthetic trace on a modelled H200: tokens of prompts that are
  found, and bytes of the checkpoints among what is retained. A hit needs KV and a checkpoint of the
  state. Beside it, the same layout without state.

DATA is the folder with `mooncake_synthetic.jsonl.gz`.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from aquifer.bench.report import new_table
from aquifer.bench.result import save
from aquifer.cache import KV_CACHES, kv_cache
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.sim.config import ReplayConfig
from aquifer.sim.device import ModelShape, find_device
from aquifer.sim.driver import ModelledDriver
from aquifer.sim.replay import replay
from aquifer.sim.trace import TraceRequest, fit_lengths, read_trace

MODEL = Path(__file__).resolve().parents[1] / "gpu" / "models" / "falcon-h1-7b"
BUDGET_BYTES = 40 << 30
PAGE_BYTES = 2 << 20
LENGTHS = (100, 600, 2000)
EQUAL_BLOCK_TOKENS = 1568
MAX_SEQS = 1024
MAX_TOKENS = 4096

TRACE = "mooncake_synthetic.jsonl.gz"
NUM_REQUESTS = 600
CONTEXT_TOKENS = 131_072
MEMORY_GB = (60, 120, 250)


def requests_at_once(shape: ModelShape, manager: str, num_tokens: int) -> int:
    """Requests of a length that get room for all of their tokens and their state."""
    owner = Owner("hybrid", Kind.KV)
    with ExitStack() as resources:
        pool = PagePool(ModelledDriver(BUDGET_BYTES, PAGE_BYTES), BUDGET_BYTES)
        resources.callback(pool.close)
        make = kv_cache(manager)
        cache = make(pool, owner, shape.kv_layout, MAX_SEQS, MAX_TOKENS, shape.state_layout)
        resources.callback(cache.close)
        count = np.array([num_tokens])
        found = 0
        for slot in range(1, MAX_SEQS + 1):
            cache.expect(slot, num_tokens, num_tokens + 1)
            if not cache.reserve(np.array([slot]), count):
                break
            found += 1
        assert sum(pool.usage().in_use_bytes.values()) <= BUDGET_BYTES
        for slot in range(1, found + 1):
            cache.release(slot)
    return found


def concurrency(shape: ModelShape) -> list[dict[str, Any]]:
    """The requests that fit at once, by length."""
    rows = []
    for num_tokens in LENGTHS:
        own_bytes = num_tokens * shape.kv_layout.token_bytes + shape.state_bytes
        block_bytes = EQUAL_BLOCK_TOKENS * shape.kv_layout.token_bytes
        num_blocks = -(-num_tokens // EQUAL_BLOCK_TOKENS) + 1
        equal = BUDGET_BYTES // (num_blocks * block_bytes)
        row = {
            "tokens": num_tokens,
            "own_bytes": own_bytes,
            "equal_pages": equal,
            "bound": BUDGET_BYTES // own_bytes,
        }
        for manager in KV_CACHES:
            row[manager] = requests_at_once(shape, manager, num_tokens)
        rows.append(row)
    return rows


def retained(shape: ModelShape, requests: list[TraceRequest], memory_gb: int) -> dict[str, Any]:
    """A replay of the trace with so much memory beside the weights."""
    config = ReplayConfig(
        models={"hybrid": shape},
        device=find_device("h200"),
        memory_bytes=shape.weight_bytes + memory_gb * 10**9,
        max_model_len=CONTEXT_TOKENS,
        prefix_caching=True,
    )
    result = replay(config, requests)
    return {
        "memory_gb": memory_gb,
        "has_state": shape.state_layout is not None,
        "hit_rate": result.hit_tokens / max(result.queried_tokens, 1),
        "held_bytes": result.held_bytes,
        "checkpoint_bytes": result.checkpoint_bytes,
    }


def main() -> None:
    """Count, replay, save, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of the trace")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    arguments = parser.parse_args()
    shape = ModelShape.of_checkpoint(MODEL)
    console = Console(width=110)
    at_once = concurrency(shape)
    table = new_table("requests at once in 40 GiB")
    for column in (
        "tokens each",
        "virtual",
        "paged",
        "equal pages",
        "times",
        "bound by bytes",
        "%",
    ):
        table.add_column(column, justify="right")
    for row in at_once:
        cells = [row["tokens"], row["virtual"], row["paged"], row["equal_pages"]]
        times = row["virtual"] / row["equal_pages"]
        share = 100 * row["virtual"] / row["bound"]
        table.add_row(*map(str, cells), f"{times:.2f}", str(row["bound"]), f"{share:.1f}")
    console.print(table)
    requests, _ = fit_lengths(read_trace(arguments.data / TRACE), CONTEXT_TOKENS, cut=False)
    requests = requests[:NUM_REQUESTS]
    table = new_table(f"Mooncake's synthetic trace, {NUM_REQUESTS} requests")
    for column in ("memory, GB", "state", "found, %", "retained, GB", "of it checkpoints, GB"):
        table.add_column(column, justify="right")
    runs = []
    without = replace(shape, state_layout=None)
    for memory_gb in MEMORY_GB:
        for of in (shape, without):
            run = retained(of, requests, memory_gb)
            runs.append(run)
            table.add_row(
                str(memory_gb),
                "yes" if run["has_state"] else "no",
                f"{100 * run['hit_rate']:.1f}",
                f"{run['held_bytes'] / 1e9:.1f}",
                f"{run['checkpoint_bytes'] / 1e9:.1f}",
            )
    console.print(table)
    results = {
        "benchmark": "hybrid memory",
        "model": "Falcon-H1-7B",
        "budget_bytes": BUDGET_BYTES,
        "concurrency": at_once,
        "prefixes": runs,
    }
    save(arguments.output / "memory.json", results)


if __name__ == "__main__":
    main()
