"""The processes of a tensor-parallel group: started, told what to do, watched, ended.

Rank 0 is the process that starts the others, one for each further device. Each of them runs a
function of the caller's with a pipe to rank 0, and ends when rank 0 does.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import torch

from aquifer.errors import GroupError, one_line
from aquifer.memory.driver import make_current
from aquifer.parallel.collectives import GroupCollectives, connect
from aquifer.process_name import name_process

_log = logging.getLogger(__name__)

_EXIT_S = 5.0
"""How long a rank has to release its memory before it is killed."""
_DEATH_S = 2.0
"""How long an error of a collective, or of connecting, waits for news of a rank that has died,
which is its cause."""

Serve: TypeAlias = Callable[[Connection, GroupCollectives, str], None]
"""What a rank runs: with its end of the pipe, the collectives, and the name of its device. It
returns when the other end was closed."""


class Ranks:
    """Rank 0's side of a group. `start` starts the others; closing it ends them.

    Args:
        devices: the device of each rank.
        serve: what the other ranks run; a function of a module, as it is sent to their processes.

    Attributes:
        collectives: those of rank 0.
    """

    collectives: GroupCollectives

    def __init__(self, devices: Sequence[str], serve: Serve) -> None:
        self.devices = tuple(devices)
        self._folder = tempfile.TemporaryDirectory(prefix="aquifer-ranks-")
        context = multiprocessing.get_context("spawn")
        size = len(devices)
        meeting = Path(self._folder.name) / "meeting"
        self._connections: list[Connection] = []
        # Of each connection, answers that arrived and that nothing has waited for yet.
        self._aside: list[list[Any]] = [[] for _ in range(1, size)]
        self._read: set[int] = set()  # connections that a thread reads
        self._arrived = threading.Condition()
        self._processes = []
        self._theirs: list[Connection] = []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            self._theirs.append(theirs)
            self._processes.append(
                context.Process(
                    target=_run,
                    args=(theirs, serve, rank, size, devices[rank], meeting),
                    name=f"aquifer-rank-{rank}",
                    daemon=True,
                )
            )
        self._meeting = meeting
        # The collectives, or why there are none; settled once.
        self._connected: Future[GroupCollectives] = Future()
        self._sending = threading.Lock()
        self._is_closing = False
        self._lost: str | None = None
        self._noticed = threading.Event()  # that one is lost
        self._watcher = threading.Thread(target=self._watch, name="aquifer-ranks", daemon=True)

    @property
    def size(self) -> int:
        """Number of ranks, this one included."""
        return len(self.devices)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the other ranks, in their order."""
        return [process.pid for process in self._processes if process.pid is not None]

    def start(self) -> None:
        """Start the other ranks, and connect with them.

        Raises:
            GroupError: one of them could not start.
        """
        atexit.register(self.kill)
        for process, theirs in zip(self._processes, self._theirs, strict=True):
            process.start()
            theirs.close()
        self._watcher.start()
        try:
            self.receive()  # each is there now, so none waits for one that is not
            # In a thread of its own, which may wait for ever for one that has died meanwhile.
            threading.Thread(target=self._connect, name="aquifer-connect", daemon=True).start()
            self.collectives = self._connected.result()
            make_current(torch.device(self.devices[0]))
        except BaseException:
            self.close()
            raise

    def send(self, message: Any) -> None:
        """Send a message to all other ranks. May be called from several threads.

        Raises:
            GroupError: one of them is gone.
        """
        data = multiprocessing.reduction.ForkingPickler.dumps(message)
        with self._sending:
            for connection in self._connections:
                try:
                    connection.send_bytes(data)
                except OSError as error:
                    raise self.failure(error) from error

    def receive(self, is_wanted: Callable[[Any], bool] = lambda answer: True) -> list[Any]:
        """Wait for an answer of each other rank, in their order.

        Several threads may call it at the same time, if no answer is wanted by two of them.

        Args:
            is_wanted: whether an answer is waited for; others are left to other calls.

        Raises:
            GroupError: one of them is gone.
        """
        return [self._answer_of(number, is_wanted) for number in range(len(self._connections))]

    def _answer_of(self, number: int, is_wanted: Callable[[Any], bool]) -> Any:
        """Wait for an answer on a connection, which one thread at a time reads for all."""
        aside = self._aside[number]
        while True:
            with self._arrived:
                for place, answer in enumerate(aside):
                    if is_wanted(answer):
                        return aside.pop(place)
                if number in self._read:
                    self._arrived.wait()
                    continue
                self._read.add(number)
            answers = []
            try:
                answers.append(self._connections[number].recv())
            except (EOFError, OSError) as error:
                raise self.failure(error) from error
            finally:
                with self._arrived:
                    self._read.remove(number)
                    aside += answers
                    self._arrived.notify_all()

    @property
    def is_lost(self) -> bool:
        """Whether a rank is gone, so that no step can be run any more."""
        return self._lost is not None

    def check(self) -> None:
        """Raise the reason why no step can be run any more, if there is one.

        Raises:
            GroupError: a rank is gone.
        """
        if self._lost is not None:
            raise GroupError(self._lost)

    def failure(self, error: BaseException) -> GroupError:
        """What to raise for an error in something that all ranks do: the death of a rank, if that
        is its cause."""
        self._noticed.wait(_DEATH_S)
        if self._lost is None:
            self._lost = (
                f"a step failed on rank 0 of {self.size} ({self.devices[0]}), and the others wait "
                f"for it in vain: {one_line(error)}"
            )
        return GroupError(self._lost)

    def kill(self) -> None:
        """Kill the other ranks at once."""
        self._is_closing = True
        for process in self._processes:
            if process.pid is not None:
                process.kill()

    def close(self) -> None:
        """End the other ranks: they have a moment to release their memory."""
        self._is_closing = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if process.pid is None:
                continue
            process.join(0 if self.is_lost else _EXIT_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self._watcher.ident is not None:
            self._watcher.join()
        if hasattr(self, "collectives"):
            self.collectives.close()  # the other ranks are gone
        atexit.unregister(self.kill)
        self._folder.cleanup()

    def _connect(self) -> None:
        """Connect with the other ranks."""
        try:
            collectives = connect(0, self.size, torch.device(self.devices[0]), self._meeting)
        except BaseException as error:
            self._noticed.wait(_DEATH_S)
            with suppress(InvalidStateError):  # one has died, which is the cause
                self._connected.set_exception(error)
            return
        try:
            self._connected.set_result(collectives)
        except InvalidStateError:  # one has died
            collectives.close()

    def _watch(self) -> None:
        """Notice that a rank has ended, and let what waits for it fail."""
        ended = wait([process.sentinel for process in self._processes])
        if self._is_closing:
            return
        rank, process = next(
            (rank, process)
            for rank, process in enumerate(self._processes, 1)
            if process.sentinel in ended
        )
        process.join()
        self._lost = (
            f"rank {rank} of {self.size} ({self.devices[rank]}, process {process.pid}) died with "
            f"exit code {process.exitcode}, and the others cannot go on without it"
        )
        _log.error("%s", self._lost)
        self._noticed.set()
        try:
            self._connected.set_exception(GroupError(self._lost))
        except InvalidStateError:
            if self._connected.exception() is None:
                self._connected.result().abort()


def _run(
    connection: Connection, serve: Serve, rank: int, size: int, device: str, meeting: Path
) -> None:
    """Run a rank: connect with the others, and serve until rank 0 closes the pipe."""
    name_process("aquifer-rank")
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when to end
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="aquifer-parent", daemon=True).start()
    torch.set_num_threads(1)
    try:
        connection.send(None)
        collectives = connect(rank, size, torch.device(device), meeting)
        serve(connection, collectives, device)
    except (BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has ended
    os._exit(0)  # everything was released, and Python takes a second to unload torch


def _end_with_parent() -> None:
    """End this process when rank 0 has ended, whatever it waits for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
