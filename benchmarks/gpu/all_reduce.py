"""All-reduce of two or more GPUs: ours, NCCL's, and the time that the link takes for the bytes.

    python benchmarks/gpu/all_reduce.py --output all_reduce.json [--size 2]

Each is captured in a CUDA graph many times, with a kernel between that changes what is added up, as
in a decode step; the time of these kernels alone is subtracted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from aquifer.bench.result import save
from aquifer.bench.switch import peer_rate
from aquifer.memory.driver import rank_devices
from aquifer.parallel.collectives import GroupCollectives
from aquifer.parallel.ranks import Ranks

KIB = 1 << 10
SIZES_BYTES = [size * KIB for size in (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)]
"""Sizes of the tensors. A hidden state of 4096 bf16 numbers, for one token, has 8 KiB."""

_NUM_IN_GRAPH = 64
_NUM_REPLAYS = 20


def measure(collectives: GroupCollectives, device: torch.device) -> list[dict[str, Any]]:
    """The times of all sizes; all ranks call it at the same time."""
    found = []
    for num_bytes in SIZES_BYTES:
        values = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)

        def alone(values: torch.Tensor = values) -> None:
            values.add_(0.5)

        def ours(values: torch.Tensor = values) -> None:
            values.add_(0.5)
            collectives.total(values)

        def nccl(values: torch.Tensor = values) -> None:
            values.add_(0.5)
            collectives.total_by_group(values)

        times = {run.__name__: _time_us(run, collectives, device) for run in (alone, ours, nccl)}
        found.append(
            {
                "bytes": num_bytes,
                "is_ours": collectives.adds_itself(values),
                "ours_us": times["ours"] - times["alone"],
                "nccl_us": times["nccl"] - times["alone"],
            }
        )
    return found


def _time_us(run: Callable[[], None], collectives: GroupCollectives, device: torch.device) -> float:
    """Time of an operation within a graph of many, in microseconds."""
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_NUM_IN_GRAPH):
            run()
    graph.replay()
    meeting = torch.zeros(1, device=device)
    collectives.agree(meeting)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(_NUM_REPLAYS):
        graph.replay()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) * 1e6 / _NUM_IN_GRAPH / _NUM_REPLAYS


def serve(connection: Connection, collectives: GroupCollectives, device: str) -> None:
    """What the other ranks do."""
    measure(collectives, torch.device(device))
    connection.send(None)
    with suppress(EOFError):
        connection.recv()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--size", type=int, default=2, help="number of GPUs")
    arguments = parser.parse_args()
    devices = rank_devices("cuda", arguments.size)
    ranks = Ranks(devices, serve)
    ranks.start()
    first, second = (torch.device(name) for name in devices[:2])
    rows = measure(ranks.collectives, first)
    ranks.receive()
    rate = peer_rate(second, first)
    ranks.close()
    for row in rows:
        row["link_us"] = row["bytes"] * (arguments.size - 1) / rate * 1e6
        print({name: round(value, 1) for name, value in row.items()}, flush=True)
    save(
        arguments.output,
        {
            "benchmark": "all_reduce",
            "size": arguments.size,
            "device": torch.cuda.get_device_name(first),
            "dtype": "bfloat16",
            "peer_bytes_per_s": rate,
            "sizes": rows,
        },
    )


if __name__ == "__main__":
    main()
