"""A worker process for clients' input that could take long or much memory to process."""

from __future__ import annotations

import asyncio
import gc
import importlib
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TypeVar

from aquifer.errors import LimitError, QueueFullError, RequestError
from aquifer.memory.proc import proc_bytes
from aquifer.process_name import name_process
from aquifer.sizes import format_size

_LARGE_RESIDENT_BYTES = 512 << 20
"""A worker that has grown to this size ends after its job, and its memory is free."""
_MAX_MESSAGE_CHARS = 1000
_START_S = 60.0  # for a new worker to import what it needs, beside busy processes
_EXIT_S = 1.0  # for a worker that ends by itself

T = TypeVar("T")


class _WorkerKilledError(LimitError):
    """The worker was killed. If the job has no part in that, another worker can do it."""


class Sandbox:
    """Runs functions one after another in a worker process, within limits of time and memory.

    The worker is started by `start` or for the first function, and again after one that exceeded a
    limit, or if it was killed. Only the function that exceeded it fails: one whose worker is killed
    runs once more in the next worker, as that need not be its fault.

    Args:
        modules: what the functions need; the worker imports them before its first job.
        max_s: time that a function may take.
        max_bytes: address space that the worker may have.
        max_waiting: functions that may wait; more are refused.
        niceness: by how much the worker comes after the loop and the engine.
        prepare: what the worker does before its first job, which pickles; the limits are for jobs.
    """

    def __init__(
        self,
        modules: Sequence[str],
        max_s: float = 10.0,
        max_bytes: int = 2 << 30,
        max_waiting: int = 16,
        niceness: int = 5,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self._modules = tuple(modules)
        self._max_s = max_s
        self._max_bytes = max_bytes
        self._niceness = niceness
        self._prepare = prepare
        self._places = threading.BoundedSemaphore(max_waiting)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aquifer-sandbox")
        self._worker: tuple[multiprocessing.process.BaseProcess, Connection] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to start the worker, if there is none."""
        self._thread.submit(lambda: self._worker or self._start_worker())

    async def run(
        self, what: str, param: str | None, function: Callable[..., T], *args: object
    ) -> T:
        """Return `function(*args)`, all of which must pickle.

        Args:
            what: what is done, for messages, such as "reading the body".
            param: the field that is at fault if a limit is exceeded.
            function: the function.
            args: its arguments.

        Raises:
            RequestError: the function raised an exception.
            LimitError: it exceeded a limit.
            QueueFullError: too many are waiting.
        """
        if not self._places.acquire(blocking=False):
            raise QueueFullError(f"too many requests wait for {what}; try again later")
        job = self._thread.submit(self._run, what, param, function, args)
        job.add_done_callback(lambda _: self._places.release())
        result: T = await asyncio.wrap_future(job)
        return result

    def close(self) -> None:
        """End the worker, whatever it does."""
        self._is_closed = True
        worker = self._worker
        if worker is not None:
            worker[0].kill()
        self._thread.shutdown(cancel_futures=True)
        self._end_worker()

    def _run(
        self, what: str, param: str | None, function: Callable[..., T], args: tuple[object, ...]
    ) -> T:
        """Have the worker do it; in the sandbox's thread."""
        if self._worker is not None and not self._worker[0].is_alive():
            self._end_worker()  # killed between two jobs, which is no fault of this one
        try:
            return self._run_once(what, param, function, args)
        except _WorkerKilledError:
            if self._is_closed:
                raise
            return self._run_once(what, param, function, args)

    def _run_once(
        self, what: str, param: str | None, function: Callable[..., T], args: tuple[object, ...]
    ) -> T:
        process, connection = self._worker or self._start_worker()
        try:
            connection.send_bytes(pickle.dumps((what, param, function, args)))
            if not connection.poll(self._max_s):
                raise LimitError(
                    f"{what} takes longer than {self._max_s:g} s; send less at a time", param
                )
            is_error, answer, is_last = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            process.join(_EXIT_S)
            was_killed = process.exitcode == -signal.SIGKILL  # by the kernel, perhaps
            self._end_worker()
            error = _WorkerKilledError if was_killed else LimitError
            raise error(f"{what} takes too much memory; send less at a time", param) from None
        except LimitError:
            self._end_worker()
            raise
        if is_last:
            self._end_worker()
        if is_error:
            raise answer
        result: T = answer
        return result

    def _start_worker(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(
            target=_work,
            args=(theirs, self._max_bytes, self._modules, self._niceness, self._prepare),
            name="aquifer-sandbox",
            daemon=True,
        )
        process.start()
        theirs.close()
        self._worker = process, connection
        try:
            if connection.poll(_START_S):
                connection.recv_bytes()  # it is ready
        except EOFError:
            pass  # sending to it will fail
        return process, connection

    def _end_worker(self) -> None:
        if self._worker is not None:
            process, connection = self._worker
            self._worker = None
            process.kill()
            process.join()
            connection.close()


def _work(
    connection: Connection,
    max_bytes: int,
    modules: Sequence[str],
    niceness: int,
    prepare: Callable[[], object] | None,
) -> None:
    """Run the worker: answer functions with their results until the pipe ends."""
    name_process("aquifer-sandbox")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the web process decides when to stop
    gc.disable()  # what is parsed has no cycles, and looking for some takes most of the time
    os.nice(niceness)
    for module in modules:
        importlib.import_module(module)
    if prepare is not None:
        prepare()
    connection.send_bytes(b"")
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    while True:
        try:
            content = connection.recv_bytes()
        except (EOFError, OSError):
            return
        what, param, function, args = pickle.loads(content)
        del content
        try:
            answer = pickle.dumps((False, function(*args), _is_large()))
        except RequestError as error:
            answer = pickle.dumps((True, error, _is_large()))
        except MemoryError:
            limit = format_size(max_bytes)
            refusal: RequestError = LimitError(
                f"{what} takes more memory than {limit}; send less at a time", param
            )
            answer = pickle.dumps((True, refusal, True))
        except Exception as error:  # whatever a client's input can bring about
            refusal = RequestError(f"{what} failed: {error!r}"[:_MAX_MESSAGE_CHARS], param)
            answer = pickle.dumps((True, refusal, _is_large()))
        connection.send_bytes(answer)
        del function, args, answer


def _is_large() -> bool:
    """Whether this process has grown so large that it should end.

    The most that it ever had would not tell: that includes what its parent had when it started.
    """
    return proc_bytes("/proc/self/status", "VmRSS") > _LARGE_RESIDENT_BYTES
