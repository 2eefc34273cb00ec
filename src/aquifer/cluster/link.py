"""Link to an engine process on another node, which the agent of a worker starts there."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from aquifer.cluster import tcp
from aquifer.cluster.agent import boot_id
from aquifer.cluster.clocks import on_our_clock, on_their_clock
from aquifer.cluster.messages import Clock, Ended, GetClock, HowEnded, StartEngine
from aquifer.config import EngineConfig
from aquifer.serve.link import EXIT_S
from aquifer.serve.messages import FromEngine, ToEngine
from aquifer.serve.pipe import Pipe

_logger = logging.getLogger(__name__)


class RemoteLink:
    """An `EngineLink` to a process that the agent of a worker starts, through TCP.

    Args:
        config: the engine's options.
        address: of the agent.
        token: of the cluster.
        log_level: least level of messages that the engine process logs.
    """

    def __init__(
        self, config: EngineConfig, address: tcp.Address, token: str, log_level: str
    ) -> None:
        self._id = uuid.uuid4().hex
        self._start_engine = StartEngine(self._id, config, log_level)
        self._address = address
        self._token = token
        self._connection: Connection | None = None
        self._pipe: Pipe | None = None
        self._thread: threading.Thread | None = None
        self._offset_s = 0.0  # the agent's clock is so much ahead
        self._is_killed = threading.Event()
        self._has_ended = threading.Event()
        self._ended = Ended(None, None)

    def start(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[FromEngine | None], None]
    ) -> None:
        """Have the agent start the process, in a thread; see `EngineLink.start`."""

        def on_message(message: FromEngine | None) -> None:
            if message is None:
                self._has_ended.set()
            elif self._offset_s:
                message = on_our_clock(message, self._offset_s)
            handle(message)

        self._thread = threading.Thread(
            target=self._open, args=(loop, on_message), name="aquifer-link", daemon=True
        )
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Send a message; it is lost if the process is gone."""
        if self._pipe is not None:
            if self._offset_s:
                message = on_their_clock(message, self._offset_s)
            self._pipe.send(message)

    @property
    def current_model(self) -> str | None:
        """The model that the process computed when it died; None if the agent is gone too."""
        return self._ended.current_model

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None if the agent is gone too."""
        return self._ended.exit_code

    def kill(self) -> None:
        """End the connection at once; the process exits when it notices."""
        self._is_killed.set()
        if (connection := self._connection) is not None:
            tcp.shut(connection)

    def join(self) -> None:
        """Wait until the process has exited, and end the threads; the connection is ended if it
        takes long."""
        if self._thread is None:
            return  # it was not started
        self._has_ended.wait(EXIT_S)
        self.kill()
        self._thread.join()
        if self._pipe is not None:
            self._pipe.close()
        with suppress(OSError, EOFError):
            connection, _ = self._connect()
            with connection:
                connection.send(HowEnded(self._id))
                if connection.poll(EXIT_S + 1.0):
                    self._ended = connection.recv()

    def _open(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[FromEngine | None], None],
    ) -> None:
        try:
            connection, self._offset_s = self._connect()
            connection.send(self._start_engine)
        except (OSError, EOFError) as error:
            _logger.error("the worker at %s cannot be reached: %s", self._address, error)
            self._has_ended.set()
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(on_message, None)
            return
        self._connection = connection
        self._pipe = Pipe(connection, "aquifer-engine")
        self._pipe.start(loop, on_message)
        if self._is_killed.is_set():  # before there was a connection
            tcp.shut(connection)

    def _connect(self) -> tuple[Connection, float]:
        """A connection to the agent, and how much its clock is ahead."""
        connection = tcp.connect(self._address, self._token)
        before_s = time.monotonic()
        connection.send(GetClock())
        clock: Clock = connection.recv()
        if clock.boot_id == boot_id():
            return connection, 0.0
        return connection, clock.now_s - (before_s + time.monotonic()) / 2
