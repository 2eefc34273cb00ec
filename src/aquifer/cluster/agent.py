"""Agent of a worker: a process that starts the worker's engine process for the server.

    python -m aquifer.cluster.agent

It reads its options from standard input, a line of JSON (`AgentOptions`), and writes a line with
the port on which it listens. It ends when standard input does, and the engine process with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from aquifer.cluster import tcp
from aquifer.cluster.messages import Clock, Ended, GetClock, HowEnded, StartEngine, ToAgent
from aquifer.config import EngineConfig
from aquifer.cpus import limit_spinning
from aquifer.serve.engine_configs import can_lend_weights, host_cache_share
from aquifer.serve.link import EngineProcess
from aquifer.serve.logs import configure_logging
from aquifer.serve.pipe import ignore_stop_signals
from aquifer.serve.process import OpenEngine, open_engine
from aquifer.weights import peer_socket

_MOST_OPENING = 16
"""Connections that have not shown the token yet."""

_PAUSE_S = 0.1
"""Until the next connection is accepted, where the system has no resources for one."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of an agent.

    Args:
        host: address of this node, on which alone it listens.
        token: of the cluster.
        device: of the engine process.
        num_on_node: workers that this node may have, which share the host's memory.
        cluster: what the agents of one cluster have in common, and no others of this machine.
        log_level: least level of messages that it logs.
    """

    host: str
    token: str
    device: str
    num_on_node: int = 1
    cluster: str = ""
    log_level: str = "info"

    @property
    def neighbours(self) -> Path:
        """Where engines of the cluster find each other on this machine."""
        name = hashlib.sha256(self.cluster.encode()).hexdigest()[:16]
        return _folders() / f"{_prefix()}{name}"

    def to_json(self) -> str:
        """In one line."""
        return json.dumps(asdict(self))


class Agent:
    """Starts the engine process of a worker when the server asks for it.

    Args:
        options: the options.
        open_it: opens the engine, in its process.
    """

    def __init__(self, options: AgentOptions, open_it: OpenEngine = open_engine) -> None:
        self._options = options
        self._open_it = open_it
        self._process: EngineProcess | None = None
        self._link = ""  # that has asked for it
        self._changing = threading.Lock()
        self._is_closing = threading.Event()
        self._opening = threading.BoundedSemaphore(_MOST_OPENING)

    def start(self) -> int:
        """Listen; returns the port.

        Raises:
            ConfigError: the host is no address of this machine.
        """
        peer_socket.forget_dead(_folders().glob(f"{_prefix()}*"))  # of clusters that were killed
        self._listener = tcp.listen(self._options.host)
        port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="aquifer-agent", daemon=True)
        self._thread.start()
        return port

    def close(self) -> None:
        """Listen no more, and kill the engine process."""
        self._is_closing.set()
        with suppress(OSError):  # wakes the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._changing:
            self._end_process()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if self._is_closing.wait(_PAUSE_S):
                    return
                _logger.error("a connection cannot be accepted now: %s", error)
                continue
            if not self._opening.acquire(blocking=False):
                accepted.close()
                continue
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        """Answer what comes on one connection."""
        peer = "?"
        try:
            peer = accepted.getpeername()[0]
            connection = tcp.accept(accepted, self._options.token)
        except (tcp.RefusedError, OSError) as error:
            _logger.warning("a connection from %s is refused: %s", peer, error)
            accepted.close()
            return
        finally:
            self._opening.release()
        with suppress(EOFError, OSError), connection:
            while self._answer(connection):
                pass

    def _answer(self, connection: Connection) -> bool:
        """Answer one message; returns whether there may be another one."""
        message: ToAgent = connection.recv()
        match message:
            case GetClock():
                connection.send(Clock(time.monotonic(), boot_id()))
                return True
            case StartEngine(link, config, log_level):
                with self._changing:
                    self._end_process()
                    process = EngineProcess(
                        connection,
                        self._own(config),
                        self._open_it,
                        log_level,
                        reports=True,
                    )
                    process.start()  # or there is none, if the system refuses one now
                    self._link, self._process = link, process
            case HowEnded(link):
                with self._changing:
                    connection.send(self._how_ended(link))
        return False

    def _own(self, config: EngineConfig) -> EngineConfig:
        """The options for the device of this agent."""
        device, num_on_node = self._options.device, self._options.num_on_node
        share = host_cache_share(config, num_on_node, on_cpu=device == "cpu")
        has_others = num_on_node > 1 and can_lend_weights(config)
        if config.peer_weights and not has_others:
            _logger.warning("peer_weights has no effect here: this node has one worker only")
        folder = self._options.neighbours if has_others else None
        return replace(config, device=device, host_cache_bytes=share, neighbours=folder)

    def _how_ended(self, link: str) -> Ended:
        if self._process is None or self._link != link:  # another server may use the one there is
            return Ended(None, None)
        self._process.join()
        return Ended(self._process.exit_code, self._process.current_model)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            peer_socket.forget(self._options.neighbours, self._process.pid)
            self._process = None


def _folders() -> Path:
    """Where the folders are in which engines find each other, one for each cluster."""
    return Path(tempfile.gettempdir())


def _prefix() -> str:
    """How the names of these folders begin."""
    return f"aquifer-{os.geteuid()}-"


def boot_id() -> str:
    """The id of the machine's kernel since its start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def main() -> None:
    """Run an agent until standard input ends."""
    options = AgentOptions(**json.loads(sys.stdin.readline()))
    configure_logging(options.log_level)
    limit_spinning()
    ignore_stop_signals()  # it ends with the process that started it
    agent = Agent(options)
    print(agent.start(), flush=True)
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main()
