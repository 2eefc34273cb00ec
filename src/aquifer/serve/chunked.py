"""HTTP/1.1 connection that bounds headers, and frames the chunks of a stream cheaply."""

from __future__ import annotations

from typing import Protocol

import h11

CHUNKS = "aquifer.chunks"
"""Extension of a request's scope: its "protocol" is a `ChunkWriter`."""

_TOO_LONG = 431  # h11's hint where the headers are too long


class ChunkWriter(Protocol):
    """Writes chunks of the response that is running, past the tasks of its connection."""

    @property
    def can_write_chunk(self) -> bool:
        """Whether a chunk may be written without waiting for the client."""

    def write_chunk(self, data: bytes) -> None:
        """Write a chunk. Pre-condition: `can_write_chunk`."""


def framed(data: bytes) -> bytes:
    """Return a chunk of a chunked body; `data` is not empty, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class ChunkedConnection(h11.Connection):
    """A connection of h11 with a limit of headers and without h11's checks of each chunk.

    h11 bounds headers only while a part of them is missing, so what it accepts depends on how they
    arrive. Here they are also bounded when all are there.

    h11 decides how a response is framed, and checks its begin and its end. In between, a chunk of a
    chunked body changes nothing of its state: it is the size, the data and two line ends.

    Args:
        max_header_bytes: most bytes of a request's headers.

    Attributes:
        is_chunked: whether a response has begun whose body is chunked, and has not ended.
        has_long_headers: whether a request was refused since its headers are too long.
    """

    is_chunked = False
    has_long_headers = False

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, as h11 does.

        Raises:
            h11.RemoteProtocolError: the client breaks the protocol, or its headers are too long.
        """
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.has_long_headers = error.error_status_hint == _TOO_LONG
            raise
        if isinstance(event, h11.Request):
            num_bytes = len(event.target) + sum(
                len(name) + len(value) for name, value in event.headers
            )
            if num_bytes > self._max_header_bytes:
                self.has_long_headers = True
                raise h11.RemoteProtocolError("headers too long", error_status_hint=_TOO_LONG)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """Return the bytes of an event, as h11 does; None when the connection closes."""
        if self.is_chunked:
            if isinstance(event, h11.Data) and event.data and self.our_state is h11.SEND_BODY:
                return framed(event.data)
            if not isinstance(event, h11.Data):
                self.is_chunked = False  # the end of the response
        sent = super().send(event)
        if isinstance(event, h11.Response):
            head = b"" if sent is None else sent.lower()
            self.is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in head
        return sent
