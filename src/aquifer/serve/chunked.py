"""HTTP/1.1 connection that frames the chunks of a stream cheaply."""

from __future__ import annotations

import h11


class ChunkedConnection(h11.Connection):
    """A connection of h11 that frames chunks of a response without h11's checks of each.

    h11 decides how a response is framed, and checks its begin and its end. In between, a chunk of a
    chunked body changes nothing of its state: it is the size, the data and two line ends.
    """

    _is_chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """Return the bytes of an event, as h11 does; None when the connection closes."""
        if self._is_chunked:
            if isinstance(event, h11.Data) and event.data and self.our_state is h11.SEND_BODY:
                return b"%x\r\n%b\r\n" % (len(event.data), event.data)
            if not isinstance(event, h11.Data):
                self._is_chunked = False  # the end of the response
        sent = super().send(event)
        if isinstance(event, h11.Response):
            head = b"" if sent is None else sent.lower()
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in head
        return sent
