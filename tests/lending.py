"""An engine process that lends its weights, for the tests of those that borrow them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from aquifer.config import EngineConfig
from aquifer.engine.engine import Engine

NAME = "m"  # of the model
NEVER = 1 << 30
_WAIT_S = 60.0


@contextmanager
def lender(config: EngineConfig) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that has a model, and its end of the connection that tells it what to do."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_lend, args=(config, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert set(ours.recv()) == {(NAME, "disk")}
        yield process, ours
    finally:
        process.kill()
        process.join()


def load(engine: Engine) -> None:
    """Load the model."""
    engine.ask_for_model(NAME)
    while engine.has_work:
        engine.step()


def kill(process: BaseProcess) -> None:
    """End a process that has no time to say so."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline_s = time.monotonic() + _WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def _lend(config: EngineConfig, connection: Connection) -> None:
    """Have a model; unload it or load it again when told to, and end."""
    with closing(Engine.open(config)) as engine:
        connection.send(dict(engine.memory().loaded_bytes))
        while (message := connection.recv()) is not None:
            engine.unload_model(NAME) if message == "unload" else load(engine)
            engine.pool.check()
            connection.send(dict(engine.memory().loaded_bytes))
    connection.send("closed")
