"""Frames as bytes are the protobuf messages that any peer reads and writes."""

import random
from collections.abc import Sequence

import pytest
from crc32c import crc32c
from google.protobuf.message import DecodeError

from pageferry.runtime.page_wire import InlineFrame, read_request, write_frames
from pageferry.v1.page_pb2 import PAGE_KIND_TAIL, Commit, KeepAlive, PageFrame, PageFrames, PushRequest

SIZES = [0, 1, 100, 127, 128, 16_383, 16_384, 300_000]


def headers(number: int) -> list[PageFrame]:
    values = [(0, 0, 0, 1), (1, 200, 3, 30), (2, 70_000, 0, 128), (0, 2**32 - 1, 2**20, 5)]
    return [
        PageFrame(group=group, page_index=page, first_layer=first, num_layers=count, kind=PAGE_KIND_TAIL)
        for group, page, first, count in values[:number]
    ]


def written(number: int, size: int, *, several: bool) -> tuple[bytes, list[PageFrame]]:
    """A message as it is sent, and the frames that it means."""
    payloads = [random.Random(index).randbytes(size) for index in range(number)]
    expected = headers(number)
    for frame, payload in zip(expected, payloads, strict=True):
        frame.payload, frame.crc32c = payload, crc32c(payload)

    def fill(view: memoryview, offsets: Sequence[int]) -> list[int]:
        for payload, offset in zip(payloads, offsets, strict=True):
            view[offset : offset + size] = payload
        return [crc32c(payload) for payload in payloads]

    return write_frames(headers(number), size, several=several, fill=fill), expected


def whole(frames: object) -> list[PageFrame]:
    assert isinstance(frames, list)
    found = []
    for header, buffer, offset, length in frames:
        frame = PageFrame()
        frame.CopyFrom(header)
        frame.payload = buffer[offset : offset + length]
        found.append(frame)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_the_generated_classes_read_what_is_written(size: int) -> None:
    message, (frame,) = written(1, size, several=False)
    assert PushRequest.FromString(message) == PushRequest(frame=frame)
    message, frames = written(4, size, several=True)
    assert PushRequest.FromString(message) == PushRequest(frames=PageFrames(frames=frames))


@pytest.mark.parametrize("size", SIZES[1:])
def test_what_the_generated_classes_write_is_read_in_place(size: int) -> None:
    for number, several in ((1, False), (1, True), (4, True)):
        own, frames = written(number, size, several=several)
        request = PushRequest(frames=PageFrames(frames=frames)) if several else PushRequest(frame=frames[0])
        for message in (own, request.SerializeToString()):
            found = read_request(message)
            assert whole(found) == frames
            assert all(frame.buffer is message for frame in found if isinstance(frame, InlineFrame))


def test_other_encodings_are_read_all_the_same() -> None:
    _, (frame,) = written(1, 100, several=False)
    payload = PageFrame(payload=frame.payload).SerializeToString()
    rest = PageFrame(page_index=7, num_layers=2).SerializeToString()
    unknown = b"\xf8\x06\x05" + b"\xfa\x06\x02ab" + b"\x61" + bytes(8)  # fields 111, 111, 12
    for encoded in (payload + rest, rest + unknown + payload, payload + payload + rest, rest):
        message = b"\x12" + bytes((len(encoded) & 0x7F | 0x80, len(encoded) >> 7)) + encoded
        assert whole(read_request(message)) == [PushRequest.FromString(message).frame]
    twice = PushRequest(frame=frame).SerializeToString() * 2
    assert whole(read_request(twice)) == [PushRequest.FromString(twice).frame]
    last_wins = PushRequest(frame=frame).SerializeToString() + PushRequest(keep_alive=KeepAlive()).SerializeToString()
    assert read_request(last_wins) == PushRequest.FromString(last_wins)


def test_messages_without_frames_are_messages() -> None:
    for request in (PushRequest(), PushRequest(commit=Commit(covered_tokens=5)), PushRequest(keep_alive=KeepAlive())):
        assert read_request(request.SerializeToString()) == request
    assert read_request(PushRequest(frames=PageFrames()).SerializeToString()) == []


def test_what_is_torn_is_refused() -> None:
    message, _ = written(2, 1000, several=True)
    for end in (1, 2, 3, 5, 20, 500, len(message) - 1):
        with pytest.raises(DecodeError):
            read_request(message[:end])


@pytest.mark.parametrize("start", [b"\x12", b"\x2a", b"\x12\x65\x08"])  # of lengths, and of a frame's number
def test_a_number_that_goes_on_is_refused_at_its_tenth_byte(start: bytes) -> None:
    with pytest.raises(DecodeError, match="more than ten bytes"):
        read_request(start + b"\xff" * 100)
