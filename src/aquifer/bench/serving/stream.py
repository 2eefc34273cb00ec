"""One streamed request: a small reader of HTTP/1.1 and of server-sent events.

The reader notes when each event arrives and parses only the first and the last one, so that one
core keeps up with tens of thousands of events a second.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aquifer.bench.serving.target import Target, error_message, error_text

_TIMEOUT_S = 6 * 3600
"""After this time a request has failed, as in `vllm bench serve`."""

_DONE = b"[DONE]"
_NO_CHOICES = (b'"choices":[]', b'"choices": []')
_MOST_ERROR_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Stream:
    """One request that was answered: token counts of the server, and times of this clock.

    Args:
        num_input_tokens: tokens of the prompt.
        num_tokens: tokens of the output.
        sent_s: when the request was sent, connecting included.
        events_s: arrival of each event with output; an event may hold several tokens. At least one.
    """

    num_input_tokens: int
    num_tokens: int
    sent_s: float
    events_s: Sequence[float]

    @property
    def end_s(self) -> float:
        """Arrival of the last output."""
        return self.events_s[-1]

    @property
    def first_token_s(self) -> float:
        """Seconds to the first output (TTFT)."""
        return self.events_s[0] - self.sent_s

    @property
    def per_token_s(self) -> float:
        """Seconds for each output token after the first (TPOT); 0 if there is only one."""
        return (self.end_s - self.events_s[0]) / max(self.num_tokens - 1, 1)

    @property
    def latency_s(self) -> float:
        """Seconds from sending the request to the last output (E2EL)."""
        return self.end_s - self.sent_s

    @property
    def gaps_s(self) -> npt.NDArray[np.float64]:
        """Seconds between neighbouring events (ITL): shape (number of events - 1)."""
        return np.diff(np.asarray(self.events_s, np.float64))


@dataclass(frozen=True, slots=True)
class Failure:
    """One request that was refused, or whose stream broke off.

    Args:
        message: the reason, in one line.
        status: the HTTP status; None if there was no response.
    """

    message: str
    status: int | None = None


async def open_stream(
    target: Target, endpoint: str, body: bytes, *, is_chat: bool = False
) -> Stream | Failure:
    """Send one request and read its stream to the end.

    Args:
        target: the server.
        endpoint: the path, such as `/v1/completions`.
        body: the request's JSON, with `stream` and `include_usage` set.
        is_chat: whether a first event that has only the role is no output.
    """
    sent_s = time.perf_counter()
    try:
        transport, reply = await asyncio.get_running_loop().create_connection(
            lambda: _Reply(is_chat),
            target.address,
            target.port,
            ssl=target.tls,
            server_hostname=None if target.tls is None else target.host,
        )
    except OSError as error:
        return Failure(f"cannot connect: {error.strerror or error}")
    try:
        transport.write(target.post_head(endpoint, len(body)) + body)
        await asyncio.wait_for(reply.ended, _TIMEOUT_S)
    except TimeoutError:
        return Failure(f"no end of the response after {_TIMEOUT_S} s")
    finally:
        transport.close()
    return reply.outcome(sent_s)


class _Reply(asyncio.Protocol):
    """The response to one request, read as it arrives.

    Attributes:
        ended: done at the end of the response, or when the connection is lost.
    """

    def __init__(self, is_chat: bool) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._skips_role = is_chat
        self._head = b""  # until it is complete
        self._status: int | None = None
        self._is_chunked = False
        self._length: int | None = None  # of the body, where it is known and not chunked
        self._rest = b""  # part of a chunk
        self._text = b""  # part of an event, or the body of an error
        self._events_s = array("d")
        self._last = b""  # data of the last event
        self._is_whole = False  # the stream said that it ended

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._status is None:
            head, separator, data = (self._head + data).partition(b"\r\n\r\n")
            if not separator:
                self._head = head
                return
            if not self._read_head(head):
                self._end()
                return
        try:
            text = self._without_chunks(data) if self._is_chunked else data
        except ValueError:  # not the size of a chunk
            self._end()
            return
        if self._status != 200:
            self._text = (self._text + text)[:_MOST_ERROR_BYTES]
            if self._length is not None and len(self._text) >= min(self._length, _MOST_ERROR_BYTES):
                self._end()
            return
        self._text += text
        if b"\r" in self._text:
            self._text = self._text.replace(b"\r\n", b"\n")
        *events, self._text = self._text.split(b"\n\n")
        for event in events:
            self._add(event, now_s)

    def eof_received(self) -> None:
        self._end()

    def connection_lost(self, _error: Exception | None) -> None:
        self._end()

    def outcome(self, sent_s: float) -> Stream | Failure:
        """What became of the request that was sent at that time."""
        if self._status is None:
            return Failure("the server closed the connection without a response")
        if self._status != 200:
            return Failure(error_text(self._status, self._text), self._status)
        last = _json(self._last)
        error = error_message(last)
        if error is not None:
            return Failure(f"error in the stream: {error}", 200)
        if not self._is_whole:
            return Failure("the server ended the stream early", 200)
        usage = last.get("usage") if isinstance(last, dict) else None
        if not isinstance(usage, dict):
            return Failure("the stream has no usage, which counts its tokens", 200)
        num_tokens, num_input_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if not (isinstance(num_tokens, int) and isinstance(num_input_tokens, int)):
            return Failure("the stream's usage has no counts of tokens", 200)
        if not (self._events_s and num_tokens > 0):
            return Failure("the stream has no output", 200)
        return Stream(num_input_tokens, num_tokens, sent_s, self._events_s)

    def _read_head(self, head: bytes) -> bool:
        """Read status and headers; return whether it is the head of a response."""
        status_line, *lines = head.decode("latin-1").split("\r\n")
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
            return False
        self._status = int(words[1])
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length", "")
        self._length = int(length) if length.isdigit() else None
        return True

    def _without_chunks(self, data: bytes) -> bytes:
        """The content of the chunks that are complete now.

        Raises:
            ValueError: the size of a chunk is no number.
        """
        if self._rest:
            data = self._rest + data
        contents = []
        begin = 0
        while (line_end := data.find(b"\r\n", begin)) >= 0:
            size = int(data[begin:line_end].partition(b";")[0], 16)
            content = line_end + 2
            end = content + size
            if size == 0:
                self._end()
                break
            if end + 2 > len(data):
                break
            contents.append(data[content:end])
            begin = end + 2
        self._rest = data[begin:]
        return contents[0] if len(contents) == 1 else b"".join(contents)

    def _add(self, event: bytes, now_s: float) -> None:
        """Note one event, without the blank line at its end."""
        if not event.startswith(b"data:"):
            # Other fields come before the data; a comment has no data.
            data = [line for line in event.split(b"\n") if line.startswith(b"data:")]
            if not data:
                return
            event = data[0]
        if event.endswith(_DONE) and event.removeprefix(b"data:").strip() == _DONE:
            self._is_whole = True
            self._end()
            return
        self._last = event
        if _NO_CHOICES[0] in event or _NO_CHOICES[1] in event:
            return
        if self._skips_role:
            self._skips_role = False
            if _has_only_role(event):
                return
        self._events_s.append(now_s)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _json(event: bytes) -> Any:
    """The JSON of an event's data; None if it is none."""
    try:
        return json.loads(event.removeprefix(b"data:"))
    except ValueError:
        return None


def _has_only_role(event: bytes) -> bool:
    """Whether an event of a chat says who speaks, and nothing else."""
    content = _json(event)
    try:
        (choice,) = content["choices"]
        rest = {name: value for name, value in choice["delta"].items() if name != "role"}
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return not any(rest.values()) and choice.get("finish_reason") is None
