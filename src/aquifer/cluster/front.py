"""A server whose engines are the workers of a cluster: the cluster's life around the server's."""

from __future__ import annotations

import contextlib
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from aquifer.cluster import nodes
from aquifer.cluster.ray_token import ray_environment
from aquifer.cluster.state import Settings
from aquifer.cluster.token import read_token, write_token
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.reports import LoadProgress
from aquifer.errors import ConfigError
from aquifer.serve.config import ServerConfig
from aquifer.serve.server import serve


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How a server gets its cluster.

    Args:
        token_file: holds the token that all nodes share.
        node_address: address of this machine that other nodes reach; None for the one that Ray
            finds.
        port: of this node, to which others connect; 0 for a free one.
        address: HOST:PORT of a cluster that is there already; None to start one.
        is_local: whether the cluster is this machine alone, and listens on 127.0.0.1.

    Raises:
        ConfigError: the port or the node's address cannot be used; or one of them is given, and no
            node is started.
    """

    token_file: Path
    node_address: str | None = None
    port: int = nodes.DEFAULT_PORT
    address: str | None = None
    is_local: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16 or self.port in nodes.PROCESS_PORTS:
            raise ConfigError(
                f"node_port is {self.port}; it must be below 65536, and none of "
                f"{nodes.PROCESS_PORTS[0]} to {nodes.PROCESS_PORTS[-1]}, which are for Ray's "
                f"processes; the default is {nodes.DEFAULT_PORT}"
            )
        if not self.is_local:
            nodes.check_node_address(self.node_address)
        if self.address is None:
            return
        for name, is_given in (
            ("node_address", self.node_address is not None),
            ("node_port", self.port != nodes.DEFAULT_PORT),
        ):
            if is_given:
                raise ConfigError(
                    f"{name} is for a node that is started here; with cluster leave it out"
                )


def serve_on_cluster(
    engine: EngineConfig,
    server: ServerConfig,
    options: ClusterOptions,
    *,
    on_progress: Callable[[LoadProgress], None],
    on_ready: Callable[[str], None],
    on_cluster: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve with the workers of a cluster until SIGINT or SIGTERM, as `aquifer.serve.server.serve`.

    A cluster that is started here ends with the server. Of one that was there before, only the
    workers do.

    Args:
        engine: options of the engines, with the models to serve.
        server: options of the HTTP server.
        options: of the cluster.
        on_progress: called with the progress of loading.
        on_ready: called with the server's URL, once it accepts requests.
        on_cluster: called with the address of the cluster, which other nodes need to join.

    Raises:
        ConfigError: an option or a checkpoint cannot be used, or there is no cluster.
        EngineError: the controller does not answer.
    """
    nodes.check_ray()
    if engine.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device is {engine.device!r}; a cluster chooses the devices: auto, cpu or cuda"
        )
    token = read_token(options.token_file)
    variables = ray_environment(options.token_file, on_loopback=options.is_local)
    signal.signal(signal.SIGTERM, _exit)  # until the server handles it
    with contextlib.ExitStack() as stack:
        address = options.address
        if address is None:
            port = options.port or _free_port()
            num_workers = server.workers or 0
            head = nodes.RayNode.head(options.node_address, port, num_workers, variables)
            stack.callback(head.stop)
            head.start()
            address = f"127.0.0.1:{port}" if options.node_address is None else ""
            address = address or f"{options.node_address}:{port}"
        nodes.connect(address, variables)
        stack.callback(nodes.disconnect)
        if options.address is None:
            on_cluster(f"{nodes.node_host()}:{address.rpartition(':')[2]}")
        _serve(engine, server, token, on_progress, on_ready)


def serve_on_this_machine(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    on_progress: Callable[[LoadProgress], None],
    on_ready: Callable[[str], None],
) -> None:
    """Serve with workers on this machine alone; see `serve_on_cluster`."""
    with _own_token() as token_file:
        options = ClusterOptions(token_file, "127.0.0.1", port=0, is_local=True)
        serve_on_cluster(engine, server, options, on_progress=on_progress, on_ready=on_ready)


def _serve(
    engine: EngineConfig,
    server: ServerConfig,
    token: str,
    on_progress: Callable[[LoadProgress], None],
    on_ready: Callable[[str], None],
) -> None:
    """Serve with the cluster that this process is connected to."""
    from aquifer.cluster.client import ControllerClient
    from aquifer.cluster.fleet import ClusterFleet

    controller = ControllerClient()
    on_gpu = nodes.has_gpus() if engine.device == "auto" else engine.device == "cuda"
    settings = Settings(
        on_gpu=on_gpu,
        num_devices=engine.tensor_parallel_size,
        num_wanted=server.workers or 0,
        log_level=server.log_level,
        drain_s=server.shutdown_timeout_s,
    )
    front = uuid.uuid4().hex
    models: list[ModelSpec] | None = controller.call_now(
        "configure", front, settings, list(engine.models)
    )
    if models is None:
        raise ConfigError("another server uses the workers of this cluster; stop it first")
    engine = replace(engine, models=tuple(models))
    fleet = ClusterFleet(
        engine, controller, front, token, server.log_level, server.shutdown_timeout_s
    )

    def on_listening(url: str) -> None:
        controller.call_now("set_url", url)

    try:
        serve(
            engine,
            server,
            fleet=fleet,
            on_progress=on_progress,
            on_ready=on_ready,
            on_listening=on_listening,
        )
    finally:
        controller.end(front)


def _exit(number: int, _: object) -> NoReturn:
    """End this process, and what it has started."""
    raise SystemExit(128 + number)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def _own_token() -> Iterator[Path]:
    """A file with a token for a cluster of one machine."""
    with tempfile.TemporaryDirectory(prefix="aquifer-") as folder:
        file = Path(folder) / "token"
        write_token(file)
        yield file
