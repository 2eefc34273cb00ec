"""Framing of responses: the same bytes as h11's own."""

from __future__ import annotations

import h11
import pytest

from aquifer.serve.chunked import ChunkedConnection, framed

LIMIT = 1000
SIZED = (b"Content-Length", b"6")


def request(version: str, connection: str) -> bytes:
    head = (f"GET / HTTP/{version}", "Host: x", f"Connection: {connection}", "", "")
    return "\r\n".join(head).encode()


def sent(connection: h11.Connection, asked: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """What a connection sends for two requests, the second one if the connection stays."""
    written = b""
    for _ in range(2):
        connection.receive_data(asked)
        assert isinstance(connection.next_event(), h11.Request)
        assert isinstance(connection.next_event(), h11.EndOfMessage)
        for event in (
            h11.Response(status_code=200, headers=headers),
            h11.Data(data=b"abc"),
            h11.Data(data=b""),
            h11.Data(data=b"def"),
            h11.EndOfMessage(),
        ):
            written += connection.send(event) or b""
        if connection.our_state is not h11.DONE:
            break
        connection.start_next_cycle()
    return written


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("headers", [[], [SIZED]], ids=["stream", "sized"])
def test_the_bytes_are_those_of_h11(
    version: str, connection: str, headers: list[tuple[bytes, bytes]]
):
    asked = request(version, connection)
    ours = sent(ChunkedConnection(LIMIT), asked, headers)
    assert ours == sent(h11.Connection(h11.SERVER), asked, headers)
    assert (b"3\r\nabc\r\n" in ours) == (version == "1.1" and not headers)


def test_a_body_is_chunked_from_its_begin_to_its_end():
    connection = ChunkedConnection(LIMIT)
    connection.receive_data(request("1.1", "keep-alive"))
    connection.next_event()
    was_chunked = [connection.is_chunked]
    for event in (
        h11.Response(status_code=200, headers=[]),
        h11.Data(data=b"abc"),
        h11.EndOfMessage(),
    ):
        sent = connection.send(event)
        assert (sent == framed(b"abc")) == isinstance(event, h11.Data)
        was_chunked.append(connection.is_chunked)
    assert was_chunked == [False, True, True, False]


def test_data_after_the_end_is_refused():
    connection = ChunkedConnection(LIMIT)
    connection.receive_data(request("1.1", "keep-alive"))
    assert isinstance(connection.next_event(), h11.Request)
    connection.send(h11.Response(status_code=200, headers=[]))
    connection.send(h11.EndOfMessage())
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"late"))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("num_bytes", [900, 1100])
def test_headers_are_bounded_however_they_arrive(at_once: bool, num_bytes: int):
    connection = ChunkedConnection(LIMIT)
    head = b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * num_bytes
    parts = [head + b"\r\n\r\n"] if at_once else [head, b"\r\n\r\n"]

    def receive() -> object:
        event: object = h11.NEED_DATA
        for part in parts:
            connection.receive_data(part)
            event = connection.next_event()
        return event

    if num_bytes < LIMIT:
        assert isinstance(receive(), h11.Request)
    else:
        with pytest.raises(h11.RemoteProtocolError):
            receive()
    assert connection.has_long_headers == (num_bytes > LIMIT)
