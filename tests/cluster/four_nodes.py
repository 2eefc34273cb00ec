"""Four nodes of Ray on this machine, in a process of their own.

    python -m tests.cluster.four_nodes TOKEN_FILE

It says at which address they are, and then reads commands: "kill" ends a node that has a worker and
is not the first one, with everything on it; "add" adds one. It ends with its standard input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serve.running import ROOT, eventually, is_running

NUM_NODES = 4
_CPUS = 2
_OBJECT_STORE_BYTES = 80_000_000


class FourNodes:
    """The process with the nodes, as a test sees it.

    Attributes:
        address: of the cluster.
        token_file: with its token.
    """

    def __init__(self, token_file: Path) -> None:
        self.token_file = token_file
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        environment["OMP_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.four_nodes", str(token_file)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._read()

    def kill_node(self) -> None:
        """Kill a node that has a worker."""
        self._tell("kill")

    def add_node(self) -> None:
        """Add a node."""
        self._tell("add")

    def close(self) -> None:
        """End all nodes, and wait until no process of them is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        eventually(lambda: not self.processes(), "no process of the cluster is left")

    def processes(self, title: str = "") -> list[int]:
        """Processes of the cluster whose command line has a text; they have the token's path."""
        mark = f"RAY_AUTH_TOKEN_PATH={self.token_file.resolve()}"
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_text(errors="replace")
                command = (folder / "cmdline").read_text(errors="replace")
            except OSError:
                continue
            process = int(folder.name)
            if mark in environment and title in command and is_running(process):
                found.append(process)
        return sorted(found)

    def kill_process(self, title: str) -> None:
        """Kill the first process of the cluster whose command line has a text."""
        os.kill(self.processes(title)[0], signal.SIGKILL)

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        assert self._read() == command

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nodes have ended"
        return line.strip()


@contextmanager
def four_nodes(token_file: Path) -> Iterator[FourNodes]:
    """Four nodes, which end with the context."""
    nodes = FourNodes(token_file)
    try:
        yield nodes
    finally:
        nodes.close()


def _has_worker(node: Any) -> bool:
    """Whether a node of `ray.cluster_utils.Cluster` has a worker's actor."""
    raylet = node.all_processes["raylet"][0].process.pid
    tasks = Path(f"/proc/{raylet}/task").glob("*/children")
    children = {child for task in tasks for child in task.read_text().split()}
    return any("ray::Worker" in Path(f"/proc/{child}/cmdline").read_text() for child in children)


def main() -> None:
    """Start the nodes, and follow commands."""
    from aquifer.cluster.ray_token import ray_environment

    os.environ.update(ray_environment(Path(sys.argv[1])))
    out, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    from ray.cluster_utils import Cluster

    each = {"num_cpus": _CPUS, "object_store_memory": _OBJECT_STORE_BYTES}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**each, "include_dashboard": False, "no_monitor": True},
    )
    for _ in range(NUM_NODES - 1):
        cluster.add_node(wait=False, **each)
    cluster.wait_for_nodes()
    print(cluster.address, file=out, flush=True)
    for line in sys.stdin:
        match line.strip():
            case "kill":
                cluster.remove_node(
                    next(node for node in cluster.worker_nodes if _has_worker(node)),
                    allow_graceful=False,
                )
            case "add":
                cluster.add_node(**each)
        print(line.strip(), file=out, flush=True)
    cluster.shutdown()
    time.sleep(0.1)


if __name__ == "__main__":
    main()
