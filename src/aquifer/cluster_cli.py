"""`aquifer cluster`: a server whose engines run on several machines.

Heavy packages are imported inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aquifer.errors import AquiferError, EngineError
from aquifer.options import options_of
from aquifer.parameters import PRECEDENCE, with_options

app = typer.Typer(no_args_is_help=True, help="Serve with the devices of several machines, on Ray.")

_TokenFile = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help="Token that all nodes share. Make it with: openssl rand -hex 32."
    ),
]
_NodeAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address of this machine that other nodes reach. Default: that of its default route.",
    ),
]
_Port = Annotated[int, typer.Option(help="Port of this machine to which other nodes connect.")]
_Existing = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="A cluster of Ray that this machine belongs to, in place of one that is started.",
    ),
]
_Address = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="What `aquifer cluster start` says.")
]
_Url = Annotated[str, typer.Option(metavar="URL", help="Address of the server.")]
_Key = Annotated[
    str | None,
    typer.Option(metavar="KEY", envvar="AQUIFER_API_KEY", help="Its API key, if it has one."),
]
_LOCAL_URL = "http://127.0.0.1:8000"


@app.command("start", epilog=f"{PRECEDENCE}, and the environment over the file of --config.")
@with_options(options_of("serve"), environment=True, config_file=True)
def _start(
    token_file: _TokenFile,
    node_address: _NodeAddress = None,
    node_port: _Port = 6379,
    cluster: _Existing = None,
    *,
    options: SimpleNamespace,
) -> None:
    """Start a cluster with this machine as its first node, and its server."""
    from aquifer.cluster.front import ClusterOptions, serve_on_cluster
    from aquifer.cluster.nodes import check_ray
    from aquifer.serving import configurations, with_progress

    check_ray()
    options.workers = options.workers or 0
    engine, server = configurations(options)
    own = ClusterOptions(token_file, node_address, node_port, cluster)

    def on_cluster(address: str) -> None:
        print(f"Other machines join with: aquifer cluster join {address} --token-file FILE")

    with_progress(serve_on_cluster, engine, server, own, on_cluster=on_cluster)


@app.command("join")
def _join(address: _Address, token_file: _TokenFile, node_address: _NodeAddress = None) -> None:
    """Give a cluster the devices of this machine, until it is told to stop.

    SIGINT or SIGTERM: requests that run here may end, and the others go elsewhere. A second one
    ends everything at once.
    """
    from aquifer.cluster import nodes
    from aquifer.cluster.ray_token import ray_environment
    from aquifer.cluster.token import read_token

    nodes.check_ray()
    read_token(token_file)
    nodes.check_node_address(node_address)
    nodes.check_reachable(address)
    variables = ray_environment(token_file)
    nodes.check_token(address, variables)
    label = uuid.uuid4().hex
    stopping = threading.Event()

    def on_signal(*_: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    node = nodes.RayNode.joining(address, node_address, label, variables)
    try:
        node.start()
        print(f"This machine has joined the cluster at {address}", flush=True)
        while node.is_running and not stopping.wait(0.5):
            pass
        if not node.is_running:
            raise EngineError(
                f"the cluster at {address} has ended, or this node was taken for dead"
            )
        _leave(address, label, variables)
    except KeyboardInterrupt:
        pass
    finally:
        node.stop()


def _leave(address: str, label: str, variables: Mapping[str, str]) -> None:
    """Have the workers of this node end once requests have ended or moved."""
    from aquifer.cluster import nodes

    nodes.connect(address, variables)
    from aquifer.cluster.client import ControllerClient

    try:
        ControllerClient().leave(nodes.node_with_label(label))
    except AquiferError as error:
        print(f"requests that run here are not waited for: {error}")
    finally:
        nodes.disconnect()


@app.command("status")
def _status(
    token_file: _TokenFile,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The cluster; default: this machine's.")
    ] = "auto",
) -> None:
    """Show nodes, workers and models of the cluster that this machine belongs to."""
    from aquifer.cluster import nodes
    from aquifer.cluster.ray_token import ray_environment
    from aquifer.cluster.token import read_token

    nodes.check_ray()
    read_token(token_file)
    nodes.connect(address, ray_environment(token_file))
    from aquifer.cluster.client import ControllerClient

    try:
        status = ControllerClient().call_now("status")
    finally:
        nodes.disconnect()
    console = Console()
    for table in tables_of(status):
        console.print(table)
    print(f"The server is on {status['url']}" if status["url"] else "There is no server")


def tables_of(status: Mapping[str, Any]) -> list[Table]:
    """Tables of what `Controller.status` says."""
    tables = [Table("NODE", "ADDRESS", "STATE", "WORKERS", "ROOM", box=None, pad_edge=False)]
    workers = status["workers"]
    for node in status["nodes"]:
        state = "leaving" if node["leaving"] else "alive" if node["alive"] else "dead"
        count = sum(worker["node"] == node["id"] for worker in workers)
        tables[0].add_row(node["id"][:8], node["address"], state, str(count), str(node["capacity"]))
    tables.append(Table("WORKER", "NODE", "ADDRESS", "STATE", box=None, pad_edge=False))
    for worker in workers:
        state = "leaving" if worker["leaving"] else "there" if worker["address"] else "starting"
        tables[1].add_row(worker["name"], worker["node"][:8], worker["address"] or "", state)
    tables.append(Table("MODEL", "PATH", box=None, pad_edge=False))
    for name, path in status["models"].items():
        tables[2].add_row(name, path)
    return tables


@app.command("add")
def _add(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="PATH, NAME=PATH or ORG/NAME, as for `start`.")
    ],
    url: _Url = _LOCAL_URL,
    api_key: _Key = None,
) -> None:
    """Register another model on all workers, those that come later too."""
    from aquifer.operate import add

    done = add(url, api_key, model)
    print(f"{done['name']} is served, from {done['path']}")


@app.command("remove")
def _remove(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a served model.")],
    url: _Url = _LOCAL_URL,
    api_key: _Key = None,
) -> None:
    """Remove a model from all workers; its requests end with an error."""
    from aquifer.operate import remove

    remove(url, api_key, model)
    print(f"{model} is removed")
