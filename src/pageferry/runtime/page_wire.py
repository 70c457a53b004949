"""Messages of a push as bytes: payloads go into them and come out of them without a copy through protobuf's objects.

They are plain protobuf (proto/pageferry/v1/page.proto), which any other implementation reads and writes. An encoding of
frames that isn't the one written here, such as a payload that isn't last, is read through the generated classes.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from pageferry.v1.page_pb2 import PageFrame, PushRequest, PushResponse

_PUSH = "/pageferry.v1.PageService/Push"
# Tags: (field << 3) | wire type.
_FRAME = 2 << 3 | 2  # of PushRequest
_FRAMES = 5 << 3 | 2
_IN_FRAMES = 1 << 3 | 2  # of PageFrames
_CRC32C = 5 << 3 | 5  # of PageFrame
_PAYLOAD = 15 << 3 | 2
_LEN, _VARINT = 2, 0
_FIXED = {1: 8, 5: 4}  # wire type to bytes
_MAX_SHIFT = 63  # of a varint's last byte: none has more than ten


class InlineFrame(NamedTuple):
    """A frame without its payload, and where that lies."""

    header: PageFrame
    buffer: bytes
    offset: int
    length: int


def push_call(channel: grpc.aio.Channel) -> Any:
    """The stub of Push, which takes messages, or bytes that are one."""
    return channel.stream_stream(_PUSH, request_serializer=_to_bytes, response_deserializer=PushResponse.FromString)


def add_page_service(servicer: Any, server: grpc.aio.Server) -> None:
    """As the generated function of that purpose; messages of frames come as lists of `InlineFrame`."""
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.Push, request_deserializer=read_request, response_serializer=PushResponse.SerializeToString
    )
    service, method = _PUSH.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))


def write_frames(
    headers: Sequence[PageFrame],
    num_bytes: int,
    *,
    several: bool,
    fill: Callable[[memoryview, list[int]], Sequence[int]],
) -> bytes:
    """A PushRequest of frames whose payloads have `num_bytes` each. `headers` have neither checksum nor payload.

    `fill` puts the payloads at their offsets into the message, and gives their checksums. Only one header unless
    `several`, which makes it PageFrames.
    """
    starts, offsets, size = [], [], 0
    for header in headers:
        head = header.SerializeToString() + bytes((_CRC32C, 0, 0, 0, 0, _PAYLOAD)) + _varint(num_bytes)
        if several:
            head = bytes((_IN_FRAMES,)) + _varint(len(head) + num_bytes) + head
        starts.append((size, head))
        size += len(head) + num_bytes
        offsets.append(size - num_bytes)
    outer = bytes((_FRAMES if several else _FRAME,)) + _varint(size)
    message, view = _new_bytes(len(outer) + size)
    view[: len(outer)] = outer
    offsets = [offset + len(outer) for offset in offsets]
    for start, head in starts:
        view[len(outer) + start : len(outer) + start + len(head)] = head
    behind_checksum = 1 + len(_varint(num_bytes))
    for offset, checksum in zip(offsets, fill(view, offsets), strict=True):
        struct.pack_into("<I", view, offset - behind_checksum - 4, checksum)
    return message


def read_request(data: bytes) -> PushRequest | list[InlineFrame]:
    """DecodeError for what is no PushRequest."""
    if data[:1] in (bytes((_FRAME,)), bytes((_FRAMES,))):
        frames = _find_frames(data)
        if frames is not None:
            return frames
    request = PushRequest.FromString(data)
    match request.WhichOneof("message"):
        case "frame":
            return [_separate(request.frame)]
        case "frames":
            return [_separate(frame) for frame in request.frames.frames]
    return request


def _find_frames(data: bytes) -> list[InlineFrame] | None:
    """None where the message is not written as here."""
    try:
        start, end = _length(data, 1)
        if end != len(data):
            return None
        if data[0] == _FRAME:
            frames = [_find_payload(data, start, end)]
        else:
            frames = []
            while start < end:
                if data[start] != _IN_FRAMES:
                    return None
                first, start = _length(data, start + 1)
                frames.append(_find_payload(data, first, start))
    except IndexError:
        return None
    return frames if all(frames) else None  # type: ignore[return-value]


def _find_payload(data: bytes, start: int, end: int) -> InlineFrame | None:
    """Of the frame that lies there, if its payload is its last field."""
    position = start
    while position < end:
        tag = data[position]
        if tag == _PAYLOAD:
            first, last = _length(data, position + 1)
            if last != end or end > len(data):
                return None
            return InlineFrame(PageFrame.FromString(data[start:position]), data, first, last - first)
        if tag & 0x80:
            return None  # a field that this version has no number for
        kind = tag & 7
        if kind == _VARINT:
            _, position = _read_varint(data, position + 1)
        elif kind == _LEN:
            _, position = _length(data, position + 1)
        elif kind in _FIXED:
            position += 1 + _FIXED[kind]
        else:
            return None
    return None


def _separate(frame: PageFrame) -> InlineFrame:
    payload = frame.payload
    return InlineFrame(frame, payload, 0, len(payload))


def _length(data: bytes, position: int) -> tuple[int, int]:
    """Start and end of what the length there, a varint, says."""
    length, start = _read_varint(data, position)
    return start, start + length


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Value, and the position behind it."""
    value = 0
    for shift in range(0, _MAX_SHIFT + 1, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("a number has more than ten bytes")


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_allocate = ctypes.pythonapi.PyBytes_FromStringAndSize
_allocate.restype, _allocate.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_PYBUF_WRITE = 0x200


def _new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Bytes that hold nothing yet, and a view to fill them by before anybody else sees them.

    gRPC takes `bytes` only, and making them of anything else copies.
    """
    message = _allocate(None, size)
    return message, _view(_address(message), size, _PYBUF_WRITE)


def _to_bytes(message: PushRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
