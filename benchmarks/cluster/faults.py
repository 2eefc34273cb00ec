"""A cluster of four nodes of Ray on this machine, under load while parts of it are killed.

    python -m benchmarks.cluster.faults [--rounds N] [--requests N] [--output FOLDER]

First, requests for 12 models on 4 workers with memory for 6 of them, whose answers are compared
with those of one server. Then in each round a worker, a node and the controller are killed, one
after the other, each time under load; a node is added in place of the one that was killed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.checkpoints import tiny_llama
from tests.cluster.four_nodes import FourNodes, four_nodes
from tests.cluster.load import Load, answers_of, body_of
from tests.serve.running import RunningServer, eventually, running

from aquifer.bench.report import new_table
from aquifer.bench.result import save
from aquifer.cluster.token import write_token

_NUM_MODELS, _NUM_WORKERS = 12, 4
_OPTIONS = ["--port", "0", "--page-size", "4K", "--max-model-len", "256"]
_NUM_THREADS = 4
_BEFORE, _AFTER = 50, 50  # right answers before something is killed, and after it is whole


def workers(server: RunningServer) -> set[str]:
    """Workers that serve."""
    status, memory, _ = server.call("GET", "/memory")
    return set(memory["devices"]) if status == 200 else set()


def killed(
    server: RunningServer,
    kill: Callable[[], None],
    is_whole: Callable[[], bool],
    bodies: Sequence[dict[str, Any]],
    expected: Sequence[str],
) -> dict[str, Any]:
    """Kill something under load; returns what became of the requests, and the time until whole."""
    with Load(server, bodies, expected, _NUM_THREADS, pause_s=0.0) as load:
        load.wait_for(_BEFORE)
        begun_s = time.monotonic()
        kill()
        eventually(is_whole, "the service is whole")
        whole_s = time.monotonic() - begun_s
        load.wait_for(_AFTER)
    return {
        "whole_s": whole_s,
        "num_right": load.num_right,
        "wrong": load.wrong,
        "failed": dict(load.failed),
        "longest_failed_s": load.longest_failed_s,
        "longest_s": load.longest_s,
    }


def rounds(
    server: RunningServer,
    nodes: FourNodes,
    num_rounds: int,
    bodies: Sequence[dict[str, Any]],
    expected: Sequence[str],
) -> list[dict[str, Any]]:
    """Kill a worker, a node and the controller in each round."""
    results = []
    for number in range(num_rounds):
        before = workers(server)

        def has_another(before: set[str] = before) -> bool:
            now = workers(server)
            return len(now) == _NUM_WORKERS and not before <= now

        of_worker = killed(
            server, lambda: nodes.kill_process("ray::Worker"), has_another, bodies, expected
        )
        results.append({"round": number, "killed": "worker", **of_worker})
        before = workers(server)

        def has_others(before: set[str] = before) -> bool:
            now = workers(server)
            return len(now) == _NUM_WORKERS and not before <= now

        of_node = killed(server, nodes.kill_node, has_others, bodies, expected)
        results.append({"round": number, "killed": "node", **of_node})
        nodes.add_node()
        old = nodes.processes("ray::Controller")

        def goes_on(old: list[int] = old) -> bool:
            return nodes.processes("ray::Controller") not in (old, [])

        of_controller = killed(
            server, lambda: nodes.kill_process("ray::Controller"), goes_on, bodies, expected
        )
        results.append({"round": number, "killed": "controller", **of_controller})
        for result in results[-3:]:
            print(result, flush=True)
    return results


def measure(num_rounds: int, num_requests: int) -> dict[str, Any]:
    """All of it."""
    bodies = [body_of(number, _NUM_MODELS) for number in range(num_requests)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = [f"m{seed}={tiny_llama(folder / str(seed), seed=seed)}" for seed in range(12)]
        alone = ["-m", "aquifer", "serve", *models, *_OPTIONS, "--memory", "64M"]
        with running(alone) as one:
            expected = answers_of(one, bodies)
            _, memory, _ = one.call("GET", "/memory")
        room = str(int(1.5 * memory["models"]["m0"]["weights_total_bytes"]))
        token_file = folder / "token"
        write_token(token_file)
        with four_nodes(token_file) as nodes:
            own = ["--cluster", nodes.address, "--token-file", str(token_file)]
            wanted = ["--workers", str(_NUM_WORKERS), "--memory", room]
            command = ["-m", "aquifer", "cluster", "start", *models, *_OPTIONS, *own, *wanted]
            with running(command) as server:
                eventually(lambda: len(workers(server)) == _NUM_WORKERS, "all workers serve")
                with Load(server, bodies, expected, _NUM_THREADS, pause_s=0.0) as load:
                    load.wait_for(num_requests)
                mixed = {
                    "num_right": load.num_right,
                    "wrong": load.wrong,
                    "failed": dict(load.failed),
                    "longest_s": load.longest_s,
                }
                print(mixed, flush=True)
                return {
                    "mixed": mixed,
                    "rounds": rounds(server, nodes, num_rounds, bodies[:240], expected[:240]),
                }


def main() -> None:
    """Measure, write the file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of kills")
    parser.add_argument("--requests", type=int, default=1000, help="before the first round")
    parser.add_argument("--output", type=Path, help="folder of the JSON file to write")
    options = parser.parse_args()
    result = measure(options.rounds, options.requests)
    if options.output is not None:
        content = {
            "benchmark": "cluster faults",
            "models": _NUM_MODELS,
            "workers": _NUM_WORKERS,
            "streams": _NUM_THREADS,
            **result,
        }
        save(options.output / "faults.json", content)
    table = new_table("Kills under load")
    for column in ("killed", "rounds", "right", "wrong", "failed", "failed s", "whole s"):
        table.add_column(column, justify="right")
    for kind in ("worker", "node", "controller"):
        of_kind = [each for each in result["rounds"] if each["killed"] == kind]
        table.add_row(
            kind,
            str(len(of_kind)),
            str(sum(each["num_right"] for each in of_kind)),
            str(sum(len(each["wrong"]) for each in of_kind)),
            str(sum(sum(each["failed"].values()) for each in of_kind)),
            f"{max((each['longest_failed_s'] for each in of_kind), default=0):.2f}",
            f"{max((each['whole_s'] for each in of_kind), default=0):.1f}",
        )
    table.caption = "failed s, whole s: the longest time of a request that failed, and until whole"
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
