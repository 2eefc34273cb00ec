"""HTTP/1.1 connection that frames the chunks of a stream cheaply."""

from __future__ import annotations

from typing import Protocol

import h11

CHUNKS = "aquifer.chunks"
"""Extension of a request's scope: its "protocol" is a `ChunkWriter`."""


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
    """A connection of h11 that frames chunks of a response without h11's checks of each.

    h11 decides how a response is framed, and checks its begin and its end. In between, a chunk of a
    chunked body changes nothing of its state: it is the size, the data and two line ends.

    Attributes:
        is_chunked: whether a response has begun whose body is chunked, and has not ended.
    """

    is_chunked = False

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
