"""HTTP/2 as a client of gRPC writes it, made by hand: all of a connection's bytes at once, right or not."""

import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _CONTINUATION = 0, 1, 4, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_MAX_FRAME_BYTES = 16384


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


BEGINNING = PREFACE + frame(_SETTINGS, 0, 0, b"")
_ACKNOWLEDGED = frame(_SETTINGS, _ACK, 0, b"")


def _literal(text: bytes) -> bytes:
    """A string of HPACK, not compressed."""
    length, more = len(text), b""
    if length < 127:
        return bytes((length,)) + text
    length -= 127
    while length >= 128:
        more += bytes((length % 128 | 128,))
        length //= 128
    return b"\x7f" + more + bytes((length,)) + text


def call_headers(method: str, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    """The header frames of a gRPC call; those beyond a frame's size continue in others."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *extra,
    )
    block = b"".join(b"\0" + _literal(name.encode()) + _literal(value.encode()) for name, value in fields)
    parts = [block[start : start + _MAX_FRAME_BYTES] for start in range(0, len(block), _MAX_FRAME_BYTES)]
    last = len(parts) - 1
    return b"".join(
        frame(_CONTINUATION if index else _HEADERS, _END_HEADERS if index == last else 0, 1, part)
        for index, part in enumerate(parts)
    )


def call(
    method: str, body: bytes, extra: Sequence[tuple[str, str]] = (), *, ended: bool = True, acknowledged: bool = True
) -> bytes:
    """A connection that makes one call with one message.

    Servers hold clients that have not `acknowledged` their settings to wider limits.
    """
    data = b"\0" + struct.pack(">I", len(body)) + body
    parts = [data[start : start + _MAX_FRAME_BYTES] for start in range(0, len(data), _MAX_FRAME_BYTES)]
    frames = b"".join(
        frame(_DATA, _END_STREAM if ended and index == len(parts) - 1 else 0, 1, part)
        for index, part in enumerate(parts)
    )
    return BEGINNING + acknowledged * _ACKNOWLEDGED + call_headers(method, extra) + frames
