"""Ray's processes of this machine: a node of the cluster, as a child of this process."""

from __future__ import annotations

import ctypes
import importlib.util
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aquifer.cpus import usable_cpus
from aquifer.errors import ConfigError, EngineError

DEFAULT_PORT = 6379
PROCESS_PORTS = range(10001, 20000)
"""Ports that Ray keeps for its own processes and for actors."""
_OBJECT_STORE_BYTES = 100_000_000  # nothing large goes through it
_STOP_S = 15.0
_START_S = 60.0
_REACH_S = 5.0
_PR_SET_PDEATHSIG = 1
_READY = "block forever"  # what `ray start --block` says once it has started
_TOO_SLOW = "timed out during startup"  # what it says when it has given up, after 30 seconds
_ATTEMPTS = 3
_MOST_SHOWN = 2000


def check_ray() -> None:
    """Check that Ray is there.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("a cluster needs Ray; install it with: pip install 'aquifer[ray]'")


def check_reachable(address: str) -> None:
    """Check that something listens there: Ray itself would try for minutes.

    Args:
        address: HOST:PORT, or "auto".

    Raises:
        ConfigError: nothing does.
    """
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ConfigError(f"{address!r} is no address of a cluster; write HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no cluster can be reached at {address}: {error}; check the address and the firewall"
        ) from error


def check_node_address(host: str | None) -> None:
    """Check that other machines could reach this one there.

    Args:
        host: address of this machine; None for the one that Ray finds.

    Raises:
        ConfigError: it is a loopback address. Ray would use another one in its place.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host or "0.0.0.0").is_loopback
    except ValueError:  # a name
        return
    if is_loopback:
        raise ConfigError(
            f"node_address is {host}, which other machines cannot reach; give an address that they "
            "reach, or leave it out"
        )


def check_token(address: str, variables: Mapping[str, str]) -> None:
    """Check that a cluster has the same token: Ray itself would try another one for 20 seconds.

    This process uses the token from now on.

    Args:
        address: HOST:PORT of the first node, or "auto" for the one of this machine.
        variables: of `ray_environment`.

    Raises:
        ConfigError: it has another token, or no cluster runs on this machine.
    """
    os.environ.update(variables)  # Ray reads them when it is imported
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    from ray.exceptions import AuthenticationError, RayError

    try:
        found = canonicalize_bootstrap_address(address)
    except ConnectionError as error:
        raise ConfigError(
            "no cluster runs on this machine; have it join one, or give the address of a cluster "
            "that it has joined"
        ) from error
    if found is None:
        return  # Ray is told to start one, which `ray.init` says
    try:
        GcsClient(address=found)
    except AuthenticationError as error:
        raise ConfigError(
            f"the cluster at {found} has another token; check --token-file"
        ) from error
    except RayError:
        pass  # it may answer when it is asked again, as `ray.init` does


class RayNode:
    """A node of Ray on this machine, which ends with this process.

    Args:
        arguments: of `ray start`.
        variables: for its environment.
    """

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._variables = variables
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def head(
        cls, host: str | None, port: int, num_workers: int, variables: Mapping[str, str]
    ) -> RayNode:
        """The first node of a cluster.

        Args:
            host: address of this machine; None for the one that Ray finds.
            port: to which other nodes connect.
            num_workers: workers that it should have room for, on the CPU.
            variables: for its environment.
        """
        cpus = max(usable_cpus(), num_workers)
        arguments = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        return cls([*arguments, f"--num-cpus={cpus}", *_address_of(host)], variables)

    @classmethod
    def joining(
        cls, address: str, host: str | None, label: str, variables: Mapping[str, str]
    ) -> RayNode:
        """A further node.

        Args:
            address: of the first one, HOST:PORT.
            host: address of this machine; None for the one that Ray finds.
            label: by which the node is found among all.
            variables: for its environment.
        """
        arguments = [f"--address={address}", f"--labels=aquifer={label}"]
        return cls([*arguments, f"--num-cpus={usable_cpus()}", *_address_of(host)], variables)

    def start(self) -> None:
        """Start it; return when it has started.

        Ray gives up after 30 seconds, which a busy machine may exceed, so it is tried again.

        Raises:
            ConfigError: it cannot start.
        """
        for left in reversed(range(_ATTEMPTS)):
            said = self._try_to_start()
            if said is None:
                return
            if _TOO_SLOW not in said or not left:
                raise ConfigError(
                    "Ray cannot start here; check --node-address, the ports and the token. It says:"
                    f"\n{said[-_MOST_SHOWN:]}"
                )

    def _try_to_start(self) -> str | None:
        """Start it once; returns what Ray said if that failed, and then none of it runs."""
        ray = Path(sys.executable).with_name("ray")
        self._output = tempfile.NamedTemporaryFile("w+", prefix="aquifer-ray-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [
                sys.executable if not ray.exists() else str(ray),
                *([] if ray.exists() else ["-m", "ray.scripts.scripts"]),
                "start",
                "--block",
                "--disable-usage-stats",
                "--include-log-monitor=false",
                f"--object-store-memory={_OBJECT_STORE_BYTES}",
                *self._arguments,
            ],
            env={**os.environ, **self._variables},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C ends it last
            preexec_fn=_end_with_parent,
        )
        until_s = time.monotonic() + _START_S
        while _READY not in self._said():
            if self._process.poll() is not None or time.monotonic() > until_s:
                said = self._said()
                self.stop()
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # what it has left
                return said
            time.sleep(0.05)
        return None

    @property
    def is_running(self) -> bool:
        """Whether its processes run."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End its processes."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._output.close()

    def _said(self) -> str:
        return Path(self._output.name).read_text(errors="replace")


def connect(address: str, variables: Mapping[str, str]) -> None:
    """Connect this process to a cluster.

    Args:
        address: HOST:PORT of the first node, or "auto" for the one of this machine.
        variables: of `ray_environment`.

    Raises:
        ConfigError: there is none, or its token is another one.
    """
    check_reachable(address)
    check_token(address, variables)
    import ray

    from aquifer.cluster.controller import NAMESPACE

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address=address, namespace=NAMESPACE, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"no cluster can be reached at {address} from this machine: {reason}; check the "
            "address and the token, and that this machine has joined"
        ) from error


def disconnect() -> None:
    """End the connection of this process."""
    import ray

    ray.shutdown()


def node_with_label(label: str) -> str:
    """The id of the node that was started with a label. Pre-condition: `connect`.

    Raises:
        EngineError: there is none.
    """
    import ray

    for node in ray.nodes():
        if node["Alive"] and node["Labels"].get("aquifer") == label:
            return str(node["NodeID"])
    raise EngineError("this node is not in the cluster any more")


def has_gpus() -> bool:
    """Whether any node has a GPU. Pre-condition: `connect`."""
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))


def node_host() -> str:
    """Address of this node. Pre-condition: `connect`."""
    import ray

    return str(ray.util.get_node_ip_address())


def _address_of(host: str | None) -> list[str]:
    return [] if host is None else [f"--node-ip-address={host}"]


def _end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
