"""Actor of a worker: has the devices of its placement group, and runs the agent on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aquifer.cluster.agent import AgentOptions
from aquifer.cluster.ray_token import token_of_node
from aquifer.cluster.tcp import Address
from aquifer.errors import EngineError

_EXIT_S = 5.0


class Worker:
    """Starts the agent of a worker, and waits until it ends.

    An actor with several threads. The agent ends with it.

    Args:
        device: of the engine process.
        num_on_node: workers that the node may have.
        log_level: least level of messages that the agent logs.
    """

    def __init__(self, device: str, num_on_node: int, log_level: str) -> None:
        self._device = device
        self._num_on_node = num_on_node
        self._log_level = log_level
        self._agent: subprocess.Popen[str] | None = None

    def start(self) -> Address:
        """Start the agent; returns where it listens.

        Raises:
            ConfigError: Ray was started without a token.
            EngineError: the agent cannot start.
        """
        import ray

        host = str(ray.util.get_node_ip_address())
        options = AgentOptions(
            host,
            token_of_node(),
            self._device,
            self._num_on_node,
            ray.get_runtime_context().gcs_address,
            self._log_level,
        )
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "aquifer.cluster.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
        )
        assert self._agent.stdin is not None
        assert self._agent.stdout is not None
        print(options.to_json(), file=self._agent.stdin, flush=True)
        port = self._agent.stdout.readline()
        if not port:
            raise EngineError(
                f"the agent of a worker at {host} cannot start (exit code {self._agent.wait()}); "
                "Ray's log of the worker on that node says why"
            )
        return Address(host, int(port))

    def wait(self) -> int:
        """Wait until the agent has ended; returns its exit code."""
        assert self._agent is not None
        return self._agent.wait()

    def stop(self) -> None:
        """End the agent and its engine process."""
        if self._agent is not None and self._agent.stdin is not None:
            self._agent.stdin.close()
            try:
                self._agent.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._agent.kill()


def _environment() -> dict[str, str]:
    """The environment of the agent: this process's, with the number of threads that the node has.

    Ray sets OMP_NUM_THREADS to the CPUs that the actor was given, which count as one.
    """
    name = "OMP_NUM_THREADS"
    environment = {key: value for key, value in os.environ.items() if key != name}
    of_raylet = Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace").split("\0")
    for entry in of_raylet:
        if entry.startswith(f"{name}="):
            environment[name] = entry.partition("=")[2]
    return environment
