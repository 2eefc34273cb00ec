"""Streams of the outputs of requests, from the client of the engine process to endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from aquifer.engine.outputs import TokenOutput
from aquifer.engine.params import Request
from aquifer.errors import AquiferError

MOST_PAUSE_S = 0.010
"""The longest time for which outputs are collected before a stream's consumer is woken."""
_PAUSE_S_A_STREAM = 0.0002
"""What each open stream adds to the pause: a few streams have next to none, 50 have all of it."""
_EARLY_S = 0.001
"""Streams that are due within this time are woken together."""


@dataclass(slots=True)
class Tokens:
    """Outputs of one completion that are a token each, of one step or of several ones."""

    request_id: str
    index: int  # the completion's index
    token_ids: list[int]
    arrived_s: list[float]  # of each of them, in seconds of time.monotonic()


@dataclass(frozen=True, slots=True)
class Output:
    """Any other output."""

    output: TokenOutput
    arrived_s: float  # in seconds of time.monotonic()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.output.request_id


Arrival = Tokens | Output


class Pacer:
    """The pause between two wake-ups of a stream, and the timer of the streams that are in one.

    To wake a consumer and to write to its socket costs more than all other work for a token. With
    many streams, outputs that arrive soon after a stream's last wake-up are collected.

    For one event loop.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._awake: list[TokenStream] = []
        self._late: list[TokenStream] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pause_s(self) -> float:
        """Seconds from a wake-up of a stream to its next one, unless that one is urgent."""
        return min(MOST_PAUSE_S, self._num_open * _PAUSE_S_A_STREAM)

    def open(self) -> None:
        """Count a stream."""
        self._num_open += 1

    def close(self) -> None:
        """Count a stream no more."""
        self._num_open -= 1

    def flush_soon(self, stream: TokenStream) -> None:
        """Flush a stream once everything that has arrived with its outputs is delivered."""
        if not self._awake:
            asyncio.get_running_loop().call_soon(self._flush)
        self._awake.append(stream)

    def _flush(self) -> None:
        awake, self._awake = self._awake, []
        for stream in awake:
            stream.flush()

    def wake_later(self, stream: TokenStream) -> None:
        """Wake a stream when it is due."""
        if stream.is_late:
            return
        stream.is_late = True
        self._late.append(stream)
        if self._timer is None:
            self._arm(stream.due_s)

    def _arm(self, due_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(due_s, self._wake_due)

    def _wake_due(self) -> None:
        """Wake the streams that are due, and wait for the others."""
        self._timer = None
        late, self._late = self._late, []
        until_s = asyncio.get_running_loop().time() + _EARLY_S
        for stream in late:
            if stream.due_s <= until_s:
                stream.is_late = False
                stream.wake()
            else:
                self._late.append(stream)
        if self._late:
            self._arm(min(stream.due_s for stream in self._late))


class TokenStream(AsyncIterator[list[Arrival]]):
    """Stream of the outputs of one or several requests, until all completions have ended.

    It yields all outputs that have arrived since it was asked before. The first output of a
    completion, the last one and an error wake the consumer at once, others after the pause. Of each
    batch, the consumer must handle only the outputs that `accepts` lets through, in order.

    Most batches are `Tokens` and nothing else. While there is a `shortcut`, such a batch goes to it
    without waking the consumer's task, which costs more than all other work for a token.

    Closing it aborts unfinished requests.

    Args:
        requests: the requests.
        abort: aborts one of them by its id, or with an index one of its completions.
        pacer: the pause between two batches.

    Attributes:
        due_s: when the pause after the last batch ends, in seconds of time.monotonic().
        is_late: whether the pacer will wake the consumer then.
        num_batches: how many were taken.
        shortcut: handles a batch in place of the consumer, which waits for its next one; False if
            it cannot now. Its exceptions are raised in the consumer.
    """

    def __init__(
        self, requests: Sequence[Request], abort: Callable[..., None], pacer: Pacer
    ) -> None:
        self._abort = abort
        self._open = {request.request_id: indexes_of(request) for request in requests}
        self._pacer = pacer
        pacer.open()
        self._is_closed = False
        # A stop string is found by the consumer, so each output may be the last one.
        self._has_pause = not any(request.params.stop_strings for request in requests)
        self._arrived: list[Arrival] = []
        self._has_only_tokens = True  # what has arrived
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_awake = False  # the consumer has been woken, and has not taken a batch since
        self.due_s = 0.0
        self.is_late = False
        self.num_batches = 0
        self.shortcut: Callable[[Sequence[Arrival]], bool] | None = None

    async def __anext__(self) -> list[Arrival]:
        while self._open:
            if self._is_awake or self._error is not None:
                if arrived := self._arrived:
                    self._taken()
                    return arrived
                self._is_awake = False
                if self._error is not None:
                    raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        raise StopAsyncIteration

    def put(self, arrival: Arrival, now_s: float, is_urgent: bool) -> None:
        """Add outputs that have just arrived.

        Args:
            arrival: the outputs. Until the consumer has taken them, `Tokens` may still grow.
            now_s: seconds of time.monotonic().
            is_urgent: the consumer is woken whether its pause has ended or not.
        """
        self._arrived.append(arrival)
        if isinstance(arrival, Output):
            self._has_only_tokens = False
        if self._is_awake:
            return
        if is_urgent or now_s >= self.due_s:
            self.wake()
        else:
            self._pacer.wake_later(self)

    def fail(self, error: AquiferError) -> None:
        """End the whole stream with an error, after the outputs that have arrived."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Wake the consumer, or tell it not to wait when it asks for the next batch."""
        self._is_awake = True
        if self._waiter is not None:
            self._pacer.flush_soon(self)

    def flush(self) -> None:
        """Hand the batch to the shortcut, or else to the consumer."""
        if self._waiter is None or self._waiter.done():
            return  # it runs, and will take the batch
        if (
            self.shortcut is not None
            and self._has_only_tokens
            and self._arrived
            and self._error is None
        ):
            try:
                if self.shortcut(self._arrived):
                    self._taken()
                    return
            except Exception as error:  # of this stream, which must not harm the others
                self._arrived = []
                self._error = error
        self._waiter.set_result(None)

    def _taken(self) -> None:
        """Begin the next batch, and the pause before it."""
        self._arrived = []
        self._has_only_tokens = True
        self._is_awake = False
        self.num_batches += 1
        if self._has_pause:
            self.due_s = asyncio.get_running_loop().time() + self._pacer.pause_s

    def accepts(self, arrival: Arrival) -> bool:
        """Whether the completion of outputs is open; if one is its last one, it is closed.

        Outputs that are not accepted were in flight when their completion was aborted.
        """
        indexes = self._open.get(arrival.request_id)
        if indexes is None:
            return False
        if isinstance(arrival, Tokens):
            return arrival.index in indexes
        output = arrival.output
        if output.finish_reason == "error":  # of the whole request
            del self._open[output.request_id]
            return True
        if output.index not in indexes:
            return False
        if output.finish_reason is not None:
            indexes.discard(output.index)
            if not indexes:
                del self._open[output.request_id]
        return True

    def abort(self, request_id: str, index: int) -> None:
        """Abort one completion; the stream accepts no more of its outputs."""
        indexes = self._open.get(request_id)
        if indexes is not None and index in indexes:
            indexes.discard(index)
            if not indexes:
                del self._open[request_id]
            self._abort(request_id, index)

    async def aclose(self) -> None:
        """Abort every request that is not finished."""
        if not self._is_closed:
            self._is_closed = True
            self._pacer.close()
            self.shortcut = None  # it refers to this stream
        for request_id in sorted(self._open):
            del self._open[request_id]
            self._abort(request_id)


def indexes_of(request: Request) -> set[int]:
    """Indexes of the completions that the engine outputs."""
    return set(range(request.params.num_completions))
