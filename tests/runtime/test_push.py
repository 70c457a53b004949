"""The hand-off of pages between two ends in one process, over a real stream."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from crc32c import crc32c
from opentelemetry.trace import SpanKind
from pages import REQUEST, TICKET, FakeDesk, Gate, MemoryPages, grouped_layout, large_layout, numbered, small_layout
from spans import SpanLog, assert_one_tree

from pageferry.core.config import HandoffConfig, ServerConfig
from pageferry.core.errors import (
    AbortedError,
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.plan import SampledToken
from pageferry.core.pool import PageId
from pageferry.runtime.channels import open_channel
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.frames import sealed
from pageferry.runtime.page_transfer import PushParts
from pageferry.runtime.page_wire import add_page_service
from pageferry.runtime.push import PushClient
from pageferry.runtime.receive import PageReceiver
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.staging import STAGED_BYTES
from pageferry.v1 import page_pb2, page_pb2_grpc

FIRST = (0, SampledToken(42, -0.5, ((42, -0.5), (7, -1.5))))


TRANSPORT: ContextVar[str] = ContextVar("transport", default="auto")


@pytest.fixture(params=["inline", "shm"], autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the sender insists on."""
    token = TRANSPORT.set(request.param)
    yield request.param
    TRANSPORT.reset(token)


@dataclass
class Ends:
    """Both ends; `released` are the places given back, in order."""

    desk: FakeDesk
    source: MemoryPages
    sink: MemoryPages
    server: GrpcServer
    channel: grpc.aio.Channel
    parts: PushParts
    log: SpanLog
    released: list[Place]

    def push(self, ticket: bytes = TICKET) -> PushClient:
        return PushClient(self.channel, ticket, REQUEST, self.parts, self.released.extend)

    def stub(self) -> Any:
        return page_pb2_grpc.PageServiceStub(self.channel)

    async def closed(self) -> None:
        async with asyncio.timeout(60):
            await self.desk.has_closed.wait()


@asynccontextmanager
async def ends(
    layout: CacheLayout,
    num_pages: int,
    *,
    pages: Sequence[tuple[PageKey, Place]] = (),
    window: int = 16,
    lease_ms: int = 30_000,
) -> AsyncIterator[Ends]:
    log, desk = SpanLog(), FakeDesk(layout, pages or numbered(num_pages), lease_ms=lease_ms)
    source, sink = MemoryPages(layout, num_pages, seed=1), MemoryPages(layout, num_pages)
    tracer = log.tracer()
    # One thread for each end, as in two processes.
    with ThreadPoolExecutor(1) as sending, ThreadPoolExecutor(1) as receiving:
        async with GrpcServer(ServerConfig(), tracer) as server:
            server.add(add_page_service, PageReceiver(desk, sink, receiving), "pageferry.v1.PageService")
            port = await server.start()
            async with open_channel(f"127.0.0.1:{port}", tracer) as channel:
                parts = PushParts(source, sending, HandoffConfig(lease_ms, window, TRANSPORT.get()), tracer)
                yield Ends(desk, source, sink, server, channel, parts, log, [])


def released(both: Ends) -> list[int]:
    return [place.page for place in both.released]


@pytest.mark.parametrize("layout", [small_layout(), large_layout()], ids=["one frame a page", "three frames a page"])
async def test_pages_arrive_as_they_were_sent(layout: CacheLayout, transport: str) -> None:
    async with ends(layout, 4, window=4) as both:
        async with both.push() as push:
            await push.open()
            await push.ship(numbered(4)[:1])
            await push.ship(numbered(4)[1:])
            stats = await push.commit(60, FIRST)
        await both.closed()
        assert both.sink.pages == both.source.pages
        assert both.desk.committed == (60, FIRST)
        assert both.desk.closed == [None]
        assert released(both) == [0, 1, 2, 3]
        num_bytes = sum(length for _, length in layout.pages[0].ranges(0, layout.num_layers))
        assert (stats.pages, stats.bytes) == (4, 4 * num_bytes)
        assert stats.tail_s >= 0
        assert stats.in_flight_s > 0
        frames = layout.pages[0].frames() if transport == "inline" else [(0, layout.num_layers)]
        assert both.desk.frames == [(key, *layers) for key, _ in numbered(4) for layers in frames]

        spans = await both.log.wait(2)
        root = assert_one_tree(spans)
        assert [span.name for span in spans] == ["kv.push", "kv.push"]
        assert root.kind is SpanKind.CLIENT
        for span in spans:
            attributes = dict(span.attributes or {})
            assert attributes["rpc.response.status_code"] == "OK"
            assert attributes["pageferry.handoff.pages"] == 4
            assert attributes["pageferry.handoff.bytes"] == stats.bytes
            assert attributes["pageferry.handoff.format"] == str(layout.format)
            assert attributes["pageferry.handoff.transport"] == transport
        assert root.attributes
        assert root.attributes["pageferry.handoff.hidden"] == stats.hidden


async def test_pages_and_tails_of_groups_arrive_where_they_belong() -> None:
    layout = grouped_layout()
    pages = [
        (PageKey(0, 3), Place(0, PageId(1))),
        (PageKey(1, 3), Place(1, PageId(0))),
        (PageKey(0, 4, is_tail=True), Place(0, PageId(2), is_tail=True)),
        (PageKey(1, 4, is_tail=True), Place(1, PageId(2), is_tail=True)),
    ]
    async with ends(layout, 3, pages=pages) as both:
        async with both.push() as push:
            await push.open()
            await push.ship(pages)
            stats = await push.commit(18, FIRST)
        await both.closed()
        for _, place in pages:
            assert both.sink.pages[place] == both.source.pages[place]
        assert stats.pages == 4
        assert both.released == [place for _, place in pages]
        for span in await both.log.wait(2):
            attributes = dict(span.attributes or {})
            assert attributes["pageferry.handoff.groups"] == "0,2=window:8;1=full"
            assert attributes["pageferry.handoff.bytes"] == stats.bytes


async def test_a_commit_without_a_first_token() -> None:
    async with ends(small_layout(), 1) as both, both.push() as push:
        await push.open()
        await push.ship(numbered(1))
        await push.commit(4, None)
        assert both.desk.committed == (4, None)


@pytest.mark.parametrize("transport", ["inline"], indirect=True)
async def test_the_window_bounds_what_is_in_flight() -> None:
    num_pages, window = 12, 2
    async with ends(small_layout(), num_pages, window=window) as both:
        in_flight: list[int] = []
        both.source.before = lambda place: in_flight.append(place.page - len(both.desk.frames))
        async with both.push() as push:
            await push.open()
            await push.ship(numbered(num_pages))
            await push.commit(48, None)
        assert len(in_flight) == num_pages
        assert max(in_flight) < window, "when a page is read, fewer frames than the window are not acknowledged"


# What is sent ahead of the receiver: a window of one page, and the shared memory full.
AHEAD = pytest.mark.parametrize(
    ("transport", "layout", "num_ahead"),
    [
        ("inline", small_layout(), 1),
        ("shm", large_layout(), 2 * (STAGED_BYTES // large_layout().pages[0].page_bytes)),
    ],
    indirect=["transport"],
    ids=["inline", "shm"],
)


@AHEAD
async def test_a_full_window_waits_for_the_receiver(layout: CacheLayout, num_ahead: int) -> None:
    async with ends(layout, num_ahead + 2, window=1) as both:
        gate = Gate()
        both.sink.before = gate.pass_through
        async with both.push() as push:
            await push.open()
            shipping = asyncio.create_task(push.ship(numbered(num_ahead + 2)))
            await gate.arrived.wait()
            both.parts.executor.submit(lambda: None).result()
            await asyncio.sleep(0)
            assert not shipping.done()
            assert released(both) == list(range(num_ahead)), (
                "given back once they are copied, before the receiver has them"
            )
            gate.open()
            await shipping
            await push.commit(12, None)


async def test_an_idle_push_renews_its_lease() -> None:
    async with ends(small_layout(), 1, lease_ms=30) as both, both.push() as push:
        await push.open()
        async with asyncio.timeout(60):
            await both.desk.kept_alive.wait()
        await push.ship(numbered(1))
        await push.commit(4, None)
        assert both.desk.committed


async def test_a_ticket_that_is_refused() -> None:
    async with ends(small_layout(), 1) as both:
        async with both.push(b"x" * 16) as push:
            with pytest.raises(FailedPreconditionError, match="ticket is unknown") as caught:
                await push.open()
            assert caught.value.reason == "UNKNOWN_TICKET"
            with pytest.raises(FailedPreconditionError):
                await push.ship(numbered(1))
        assert released(both) == [0]
        assert both.desk.closed == []
        assert_one_tree(await both.log.wait(2))


async def test_layouts_that_differ_are_refused_with_both_values() -> None:
    async with ends(small_layout(), 1) as both:
        both.source.layout = replace(small_layout(), page_size=8)
        async with both.push() as push:
            with pytest.raises(FailedPreconditionError, match=r"page_size 4 \(receiver\) and 8 \(sender\)"):
                await push.open()


async def test_a_commit_that_is_refused() -> None:
    async with ends(small_layout(), 2) as both:
        async with both.push() as push:
            await push.open()
            await push.ship(numbered(1))
            with pytest.raises(FailedPreconditionError, match="pages are missing"):
                await push.commit(8, None)
        await both.closed()
        (error,) = both.desk.closed
        assert isinstance(error, FailedPreconditionError)


async def test_the_receiver_ends_the_push_when_its_ticket_ends() -> None:
    async with ends(small_layout(), 2) as both:
        async with both.push() as push:
            await push.open()
            await push.ship(numbered(1))
            while not both.desk.frames:  # noqa: ASYNC110 - what the peer's thread does
                await asyncio.sleep(0.001)
            assert both.desk.grant
            both.desk.grant.end(UnavailableError("the lease ran out", reason="HANDOFF_EXPIRED"))
            async with asyncio.timeout(60):
                await push.broken.wait()
            with pytest.raises(UnavailableError, match="the lease ran out") as caught:
                await push.ship(numbered(2)[1:])
            assert caught.value.reason == "HANDOFF_EXPIRED"
        await both.closed()
        assert len(both.desk.closed) == 1
        both.parts.executor.submit(lambda: None).result()
        await asyncio.sleep(0)
        assert sorted(released(both)) == [0, 1]
        spans = await both.log.wait(2)
        assert_one_tree(spans)
        statuses = {(span.attributes or {})["rpc.response.status_code"] for span in spans}
        assert statuses == {"UNAVAILABLE"}


async def test_leaving_without_a_commit_aborts() -> None:
    async with ends(small_layout(), 2) as both:
        async with both.push() as push:
            await push.open()
            await push.ship(numbered(1))
        await both.closed()
        (error,) = both.desk.closed
        assert isinstance(error, AbortedError)
        assert both.desk.committed is None
        spans = await both.log.wait(2)
        assert_one_tree(spans)
        statuses = {span.kind: (span.attributes or {})["rpc.response.status_code"] for span in spans}
        assert statuses == {SpanKind.CLIENT: "ABORTED", SpanKind.SERVER: "CANCELLED"}


@AHEAD
async def test_a_cancelled_sender_gives_pages_back_when_their_copies_are_over(
    layout: CacheLayout, num_ahead: int
) -> None:
    async with ends(layout, num_ahead + 2, window=1) as both:
        gate = Gate()
        both.source.before = gate.pass_through

        async def send() -> None:
            async with both.push() as push:
                await push.open()
                await push.ship(numbered(num_ahead + 2))

        sending = asyncio.create_task(send())
        await gate.arrived.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await both.closed()
        left = [num_ahead, num_ahead + 1]
        assert released(both) == left, "the others are being copied, or are about to be"
        gate.open()
        both.parts.executor.submit(lambda: None).result()
        await asyncio.sleep(0)
        assert released(both) == left + list(range(num_ahead))


async def test_a_cancelled_receiver_closes_when_its_copy_is_over() -> None:
    async with ends(small_layout(), 2) as both:
        gate = Gate()
        both.sink.before = gate.pass_through
        async with both.push() as push:
            await push.open()
            await push.ship(numbered(1))
            await gate.arrived.wait()
        await both.log.wait(2)
        assert both.desk.closed == [], "a page is being written"
        gate.open()
        await both.closed()
        assert len(both.desk.closed) == 1


async def test_a_receiver_that_goes_away() -> None:
    async with ends(small_layout(), 2) as both:
        async with both.push() as push:
            await push.open()
            await both.server.__aexit__(None, None, None)
            async with asyncio.timeout(60):
                await push.broken.wait()
            assert push.failure and push.failure.retryable
            with pytest.raises(UnavailableError):
                await push.commit(8, None)
        await both.closed()


def frame(both: Ends, page_index: int, **changes: Any) -> page_pb2.PushRequest:
    payload = both.source.read(*numbered(1)[0], 0, 3)
    fields = {"page_index": page_index, "num_layers": 3, "crc32c": crc32c(payload), "payload": payload}
    return page_pb2.PushRequest(frame=page_pb2.PageFrame(**{**fields, **changes}))


async def send_raw(both: Ends, requests: Sequence[page_pb2.PushRequest], *, opened: bool = True) -> Exception:
    """Send messages as they are, then end the stream; returns what the receiver says."""
    layout = layout_to_proto(both.source.layout)
    opening = page_pb2.Open(ticket=TICKET, request_id=REQUEST, layout=layout)
    first = [page_pb2.PushRequest(open=opening)] if opened else []

    async def messages() -> AsyncIterator[page_pb2.PushRequest]:
        for request in (*first, *requests):
            yield request

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in both.stub().Push(messages()):
            pass
    return from_rpc_error(caught.value)


async def test_a_corrupted_frame_is_refused_with_its_page_and_both_checksums() -> None:
    async with ends(small_layout(), 2) as both:
        damaged = bytearray(both.source.read(*numbered(1)[0], 0, 3))
        damaged[100] ^= 1
        sent = crc32c(both.source.read(*numbered(1)[0], 0, 3))
        error = await send_raw(both, [frame(both, 1, payload=bytes(damaged))])
        await both.closed()
        assert isinstance(error, DataLossError)
        assert "page 1" in str(error)
        assert f"{sent:08x}" in str(error)
        assert f"{crc32c(bytes(damaged)):08x}" in str(error)
        assert both.desk.frames == []
        assert isinstance(both.desk.closed[0], DataLossError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_index": 2}, "frame.page_index is 'page 2 of group 0', must be one of the 2 pages"),
        ({"group": 1}, "frame.page_index is 'page 0 of group 1'"),
        ({"kind": page_pb2.PAGE_KIND_TAIL}, "frame.page_index is 'tail 0 of group 0'"),
        ({"kind": 3}, "frame.kind is 3, is none that this version knows"),
        ({"first_layer": 1}, r"frame.first_layer, num_layers is \(1, 3\)"),
        ({"num_layers": 0}, r"frame.first_layer, num_layers is \(0, 0\)"),
        ({"first_layer": 2**32 - 1}, "frame.first_layer"),
        ({"payload": b"short"}, "frame.payload is '5 bytes'"),
    ],
)
async def test_frames_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    async with ends(small_layout(), 2) as both:
        error = await send_raw(both, [frame(both, **{"page_index": 0, **changes})])
        assert isinstance(error, InvalidArgumentError)
        with pytest.raises(InvalidArgumentError, match=message):
            raise error
        await both.closed()
        assert both.desk.frames == []


async def test_a_frame_that_comes_twice_is_refused() -> None:
    async with ends(small_layout(), 2) as both:
        error = await send_raw(both, [frame(both, 0), frame(both, 0)])
        assert "frame.page_index is 'page 0 of group 0', but some of its layers 0 to 2 came before" in str(error)


async def test_a_stream_that_ends_early_aborts_its_ticket() -> None:
    async with ends(small_layout(), 2) as both:
        error = await send_raw(both, [frame(both, 0)])
        assert isinstance(error, AbortedError)
        await both.closed()
        assert isinstance(both.desk.closed[0], AbortedError)


@pytest.mark.parametrize("requests", [[], [page_pb2.PushRequest()], [page_pb2.PushRequest(commit=page_pb2.Commit())]])
async def test_a_push_begins_with_open(requests: list[page_pb2.PushRequest]) -> None:
    async with ends(small_layout(), 2) as both:
        error = await send_raw(both, requests, opened=False)
        assert isinstance(error, InvalidArgumentError)
        assert "must be Open" in str(error)
        assert both.desk.closed == []


async def test_a_second_open_is_refused() -> None:
    async with ends(small_layout(), 2) as both:
        error = await send_raw(both, [page_pb2.PushRequest(open=page_pb2.Open())])
        assert isinstance(error, InvalidArgumentError)
        await both.closed()


@pytest.mark.parametrize("choices", [[1], [0, 0], [0, 1]])
async def test_first_tokens_of_choices_that_do_not_exist_are_refused(choices: list[int]) -> None:
    async with ends(small_layout(), 1) as both:
        draws = [page_pb2.FirstDraw(choice=choice) for choice in choices]
        commit = page_pb2.PushRequest(commit=sealed(page_pb2.Commit(covered_tokens=1, first_tokens=draws)))
        error = await send_raw(both, [frame(both, 0), commit])
        assert isinstance(error, InvalidArgumentError)
        assert f"commit.first_tokens.choice is {choices}" in str(error)
        await both.closed()


async def test_a_commit_whose_checksum_does_not_match_is_refused() -> None:
    async with ends(small_layout(), 1) as both:
        commit = sealed(page_pb2.Commit(covered_tokens=1, first_tokens=[page_pb2.FirstDraw()]))
        commit.first_tokens[0].token.token_id = 1
        error = await send_raw(both, [frame(both, 0), page_pb2.PushRequest(commit=commit)])
        assert isinstance(error, DataLossError)
        await both.closed()
