"""Pages on the wire: messages of frames as bytes, and whole pushes against a receiver with real pools."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from crc32c import crc32c
from fuzzing import held_to_contract, messages, mutated, near, numbers
from google.protobuf.message import DecodeError
from hypothesis import given, strategies as st
from pages import REQUEST, TICKET, FakeDesk, MemoryPages, grouped_layout, small_layout

from pageferry.core.config import HandoffConfig
from pageferry.core.errors import PageferryError
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.pool import PageId
from pageferry.engine.pages import PageTensors
from pageferry.runtime import receive
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.frames import sealed
from pageferry.runtime.page_wire import read_request, write_frames
from pageferry.runtime.receive import PageReceiver
from pageferry.runtime.staging import HEADER_BYTES, STAGED_BYTES, OwnRegions
from pageferry.v1 import page_pb2, types_pb2

LAYOUTS = [small_layout(), grouped_layout()]
NUM_PAGES = 3


def pages_of(layout: CacheLayout) -> dict[PageKey, Place]:
    pages = {
        PageKey(group, index): Place(group, PageId(index))
        for group in range(len(layout.groups))
        for index in range(NUM_PAGES - 1)
    }
    if layout.tails:
        for group in range(len(layout.groups)):
            pages[PageKey(group, NUM_PAGES, True)] = Place(group, PageId(0), True)
    return pages


def good_frame(layout: CacheLayout, key: PageKey, source: MemoryPages) -> page_pb2.PageFrame:
    shape = layout.of(key)
    payload = source.read(key, pages_of(layout)[key], 0, shape.num_layers)
    kind = page_pb2.PAGE_KIND_TAIL if key.is_tail else page_pb2.PAGE_KIND_PAGE
    return page_pb2.PageFrame(
        group=key.group,
        page_index=key.index,
        num_layers=shape.num_layers,
        crc32c=crc32c(payload),
        kind=kind,
        payload=payload,
    )


def good_push(layout: CacheLayout) -> list[page_pb2.PushRequest]:
    source = MemoryPages(layout, NUM_PAGES, seed=1)
    frames = [good_frame(layout, key, source) for key in pages_of(layout)]
    first = page_pb2.FirstDraw(token=types_pb2.GeneratedToken(token_id=3))
    return [
        page_pb2.PushRequest(open=page_pb2.Open(ticket=TICKET, request_id=REQUEST, layout=layout_to_proto(layout))),
        page_pb2.PushRequest(frame=frames[0]),
        page_pb2.PushRequest(keep_alive=page_pb2.KeepAlive()),
        page_pb2.PushRequest(frames=page_pb2.PageFrames(frames=frames[1:])),
        page_pb2.PushRequest(commit=sealed(page_pb2.Commit(covered_tokens=4, first_tokens=[first]))),
    ]


def written(frames: Sequence[page_pb2.PageFrame], *, several: bool) -> bytes:
    """As a sender writes it, without protobuf's objects."""
    headers = [page_pb2.PageFrame.FromString(frame.SerializeToString()) for frame in frames]
    for header in headers:
        header.ClearField("payload")
        header.ClearField("crc32c")

    def fill(message: memoryview, offsets: list[int]) -> list[int]:
        for frame, offset in zip(frames, offsets, strict=True):
            message[offset : offset + len(frame.payload)] = frame.payload
        return [frame.crc32c for frame in frames]

    return write_frames(headers, len(frames[0].payload), several=several, fill=fill)


FRAME = page_pb2.PageFrame(group=1, page_index=300, num_layers=2, kind=page_pb2.PAGE_KIND_TAIL, payload=b"x" * 200)
WRITTEN = [written([FRAME], several=False), written([FRAME, FRAME], several=True)]
PARTS = [
    *(page_pb2.PageFrame(group=3), page_pb2.PageFrame(page_index=300), page_pb2.PageFrame(num_layers=2)),
    *(page_pb2.PageFrame(crc32c=7), page_pb2.PageFrame(payload=b"x" * 130), page_pb2.PageFrame(payload=b"y")),
]
# Fields in any order, some of them twice: as another implementation may write them.
FRAMES = st.lists(st.sampled_from(PARTS), max_size=6).map(
    lambda parts: b"".join(part.SerializeToString() for part in parts)
)


def nested(tag: int, content: bytes) -> bytes:
    assert len(content) < 128 * 128
    return bytes([tag << 3 | 2, len(content) & 127 | 128, len(content) >> 7]) + content


ANY_ORDER = FRAMES.map(lambda frame: nested(2, frame)) | st.lists(FRAMES, max_size=3).map(
    lambda frames: nested(5, b"".join(nested(1, frame) for frame in frames))
)
REQUESTS = (
    ANY_ORDER
    | st.sampled_from(WRITTEN)
    | messages(page_pb2.PushRequest).map(lambda message: message.SerializeToString())
)


@given(mutated(REQUESTS) | st.binary(max_size=50) | st.binary(max_size=50).map(lambda rest: b"\x2a" + rest))
def test_a_message_is_read_as_protobuf_reads_it(data: bytes) -> None:
    try:
        message: page_pb2.PushRequest | None = page_pb2.PushRequest.FromString(data)
    except DecodeError:
        message = None
    with held_to_contract(DecodeError):
        request = read_request(data)
        assert message is not None, "protobuf does not read it"
        if isinstance(request, page_pb2.PushRequest):
            assert request == message
            return
        frames = [message.frame] if message.HasField("frame") else list(message.frames.frames)
        assert len(frames) == len(request)
        for frame, (header, buffer, offset, length) in zip(frames, request, strict=True):
            assert bytes(buffer[offset : offset + length]) == frame.payload
            for name in ("group", "page_index", "first_layer", "num_layers", "crc32c", "kind"):
                assert getattr(header, name) == getattr(frame, name)


@dataclass
class Sender:
    """The receiver's context: what a peer sends, then the end of the stream. `send` may wait for what is answered."""

    requests: list[Callable[["Sender"], bytes]]
    answers: list[page_pb2.PushResponse] = field(default_factory=list)

    async def read(self) -> Any:
        await asyncio.sleep(0)
        while self.requests:
            data = self.requests.pop(0)(self)
            try:
                return read_request(data)
            except DecodeError:
                continue  # gRPC ends such a call before its handler hears of it
        return grpc.aio.EOF

    async def write(self, answer: page_pb2.PushResponse) -> None:
        self.answers.append(answer)


@asynccontextmanager
async def receiver(layout: CacheLayout, directory: Path) -> AsyncIterator[tuple[PageReceiver, FakeDesk, PageTensors]]:
    desk = FakeDesk(layout, list(pages_of(layout).items()))
    sink = PageTensors(layout, [NUM_PAGES] * len(layout.groups), 1)
    with ThreadPoolExecutor(1) as executor:
        regions = OwnRegions(executor, 0.0, directory=directory, num_bytes=HEADER_BYTES + STAGED_BYTES)
        yield PageReceiver(desk, sink, executor, HandoffConfig(), regions), desk, sink


async def push(layout: CacheLayout, sender: Sender, directory: Path) -> None:
    """The receiver ends by itself; pages outside the grant stay as they were, and the desk is told once."""
    async with receiver(layout, directory) as (pages, desk, sink):
        before = {place: sink.read(PageKey(*place), place, 0, 1) for place in unreserved(layout)}
        ended: PageferryError | None = None
        with held_to_contract():
            try:
                async with asyncio.timeout(60):
                    await pages.Push(None, sender)
            except PageferryError as error:
                ended = error
                raise
        if desk.grant is not None:
            await asyncio.wait_for(desk.has_closed.wait(), 60)
            assert desk.closed == [ended]
        assert (desk.committed is not None) == (ended is None)
        for place, content in before.items():
            assert sink.read(PageKey(*place), place, 0, 1) == content
        if ended is None:
            check_pages(layout, sink, desk)


def unreserved(layout: CacheLayout) -> list[Place]:
    return [Place(group, PageId(NUM_PAGES - 1)) for group in range(len(layout.groups))]


def check_pages(layout: CacheLayout, sink: PageTensors, desk: FakeDesk) -> None:
    """What was committed came whole: each layer of each page once."""
    layers = dict.fromkeys(pages_of(layout), 0)
    for key, _, num_layers in desk.frames:
        layers[key] += num_layers
    assert layers == {key: layout.of(key).num_layers for key in layers}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("staging")


@pytest.fixture(scope="module", autouse=True)
def _no_wait() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receive, "CANCEL_DELAY_S", 0.0)
        yield


@st.composite
def pushes(draw: st.DrawFn) -> tuple[CacheLayout, list[bytes]]:
    """A good push with some of its messages changed, left out, repeated, swapped, or mixed with any others."""
    layout = draw(st.sampled_from(LAYOUTS))
    requests = good_push(layout)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(requests) - 1))
        match draw(st.sampled_from(["near", "near", "drop", "repeat", "swap", "any"])):
            case "near":
                requests[at] = draw(near(requests[at]))
            case "drop" if len(requests) > 1:
                del requests[at]
            case "repeat":
                requests.insert(at, requests[at])
            case "swap":
                requests[at], requests[-1] = requests[-1], requests[at]
            case _:
                requests.insert(at, draw(messages(page_pb2.PushRequest)))
    data = [request.SerializeToString() for request in requests]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data) - 1))
        data[at] = draw(mutated(st.just(data[at])))
    return layout, data


@given(pushes())
def test_a_push(directory: Path, case: tuple[CacheLayout, list[bytes]]) -> None:
    layout, requests = case
    asyncio.run(push(layout, Sender([lambda _, data=data: data for data in requests]), directory))  # type: ignore[misc]


@given(
    layout=st.sampled_from(LAYOUTS),
    staged=near(page_pb2.StagedPages(page_indexes=[0, 1], offset=HEADER_BYTES, crc32c=[0, 0])),
    proof=st.sampled_from(["right", "wrong", "none"]),
    fill=numbers(0, 255),
    sums=st.booleans(),
)
def test_pages_in_shared_memory(
    directory: Path, layout: CacheLayout, staged: page_pb2.StagedPages, proof: str, fill: int, sums: bool
) -> None:
    shape = layout.pages[0]
    if sums:  # right ones, so that what lies behind the check of the sums is reached
        num_bytes = shape.num_layers * shape.layer_bytes
        staged.crc32c[:] = [crc32c(bytes([fill]) * num_bytes)] * len(staged.page_indexes)

    def attach(sender: Sender) -> bytes:
        """Does as a sender on this host does: opens the region and writes to it."""
        with (directory / sender.answers[0].opened.staging.name).open("r+b") as file:
            secret = file.read(32)
            file.seek(HEADER_BYTES)
            file.write(bytes([fill]) * (4 * shape.page_bytes))
        proofs = {"right": secret[16:], "wrong": b"x" * 16, "none": b""}
        return page_pb2.PushRequest(attached=page_pb2.StagingAttached(proof=proofs[proof])).SerializeToString()

    opening = page_pb2.Open(
        ticket=TICKET, request_id=REQUEST, layout=layout_to_proto(layout), staging=page_pb2.StagingRequest()
    )
    one = page_pb2.PushRequest(staged=staged).SerializeToString()
    first = page_pb2.PushRequest(open=opening).SerializeToString()
    asyncio.run(push(layout, Sender([lambda _: first, attach, lambda _: one, lambda _: one]), directory))
