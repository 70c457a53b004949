"""The sending end of a hand-off: pages as frames on one Push stream, within a window, with checksums."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer

from pageferry.core.config import HandoffConfig
from pageferry.core.errors import AbortedError, InternalError, PageferryError, UnavailableError
from pageferry.core.handoff_tables import SenderState
from pageferry.core.layout import PageKey, PageSource, Place
from pageferry.core.plan import SampledToken
from pageferry.core.sender import HandoffStats, Sender
from pageferry.runtime.convert import layout_to_proto, token_to_proto
from pageferry.runtime.engine_thread import call_on_loop
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.frames import describe_pages, describe_timing, read_frames
from pageferry.runtime.logs import log
from pageferry.runtime.rpc_spans import PUSH_METHOD, PUSH_SPAN, end_span, inject_context, rpc_attributes
from pageferry.v1 import page_pb2, page_pb2_grpc

STATUS_TIMEOUT_S = 1.0
MIN_LEASE_S = 0.03  # a peer that names less doesn't get more keep-alives


@dataclass(frozen=True, slots=True)
class PushParts:
    """What all pushes of a process share; `executor` is its one transfer thread."""

    source: PageSource
    executor: ThreadPoolExecutor
    config: HandoffConfig
    tracer: Tracer


class PushClient:
    """One push: `open`, `ship` as pages are computed, `commit`; leaving the context before that aborts it.

    A call raises what ended the push: the receiver's error, or UnavailableError for a broken stream. `broken` is set
    at that moment, so that the caller can stop computing. The span `kv.push` is a child of the context current when
    the push is entered.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        ticket: bytes,
        parts: PushParts,
        on_released: Callable[[Sequence[Place]], None],
    ) -> None:
        """`on_released` gets each shipped page once, on the event loop, when its bytes are copied or won't be."""
        self.broken = asyncio.Event()
        self._channel = channel
        self._ticket = ticket
        self._parts = parts
        self._on_released = on_released
        self._sender = Sender()
        self._outbox: deque[page_pb2.PushRequest] = deque()
        self._outbox_filled = asyncio.Event()
        self._progress = asyncio.Event()
        self.failure: PageferryError | None = None  # what ended the push
        self._compute_has_ended = False
        self._lease_s = parts.config.lease_ms / 1000
        self._stalled_s = 0.0
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Present the ticket and the layout; FailedPreconditionError where the receiver refuses them."""
        stub: Any = page_pb2_grpc.PageServiceStub(self._channel)
        self._put(
            page_pb2.PushRequest(
                open=page_pb2.Open(ticket=self._ticket, layout=layout_to_proto(self._parts.source.layout))
            )
        )
        metadata = tuple(inject_context(trace.set_span_in_context(self._span)).items())
        self._call = stub.Push(self._requests(), metadata=metadata)
        self._reader = asyncio.create_task(self._read(), name="push-reader")
        await self._until(lambda: self._sender.state is not SenderState.IDLE)

    async def ship(self, pages: Sequence[tuple[PageKey, Place]]) -> None:
        """Copy and send pages; returns once all are copied and written.

        Takes over a reference to each page, and gives all of them back through `on_released`, even if it raises.
        """
        waiting = deque(pages)
        try:
            while waiting:
                await self._wait_for_room()
                key, place = waiting[0]
                self._sender.ship(key)
                waiting.popleft()
                for frame in await self._copy(key, place):
                    await self._wait_for_room()
                    self._put(page_pb2.PushRequest(frame=frame))
                    self._sender.sent(len(frame.payload), time.monotonic())
        finally:
            if waiting:
                self._on_released([place for _, place in waiting])

    def compute_ended(self) -> None:
        """The last page's bytes are computed: what the transfer takes from now on is not hidden."""
        if not self._compute_has_ended:
            self._compute_has_ended = True
            self._sender.compute_ended(time.monotonic())

    async def commit(self, covered_tokens: int, first: tuple[int, SampledToken] | None) -> HandoffStats:
        """Say that all is sent, and wait until the receiver has it. `first`: position and token that were drawn."""
        self.compute_ended()
        self._raise_failure()
        self._sender.commit()
        draws = [page_pb2.FirstDraw(token=token_to_proto(*first))] if first else []
        self._put(page_pb2.PushRequest(commit=page_pb2.Commit(covered_tokens=covered_tokens, first_tokens=draws)))
        await self._until(lambda: self._sender.state is SenderState.COMMITTED)
        return self._sender.stats

    def abort(self, error: PageferryError | None = None) -> None:
        """Break the push off, for good; without effect once it is committed."""
        if self._sender.state is not SenderState.COMMITTED:
            self._fail(error or AbortedError("the push was given up", reason="PUSH_ABORTED"))
            if self._call is not None:
                self._call.cancel()

    async def __aenter__(self) -> Self:
        attributes = rpc_attributes(PUSH_METHOD)
        self._span = self._parts.tracer.start_span(PUSH_SPAN, kind=SpanKind.CLIENT, attributes=attributes)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self.abort()
            if self._reader is not None:
                # The status follows Committed at once, unless the receiver has just died.
                await asyncio.wait({self._reader}, timeout=STATUS_TIMEOUT_S)
                self._call.cancel()
                await self._reader
        finally:
            self._end_span()

    async def _wait_for_room(self) -> None:
        start = time.monotonic()
        await self._until(lambda: self._sender.num_in_flight < self._parts.config.max_frames_in_flight)
        self._stalled_s += time.monotonic() - start

    async def _copy(self, key: PageKey, place: Place) -> list[page_pb2.PageFrame]:
        """The page's frames, copied on the transfer thread; the page is released once that is over, in any case."""
        loop = asyncio.get_running_loop()
        copying = self._parts.executor.submit(read_frames, self._parts.source, key, place)
        copying.add_done_callback(lambda _: call_on_loop(loop, self._on_released, [place]))
        return await asyncio.wrap_future(copying)

    def _put(self, request: page_pb2.PushRequest) -> None:
        self._outbox.append(request)
        self._outbox_filled.set()

    async def _requests(self) -> AsyncIterator[page_pb2.PushRequest]:
        """What goes out: the outbox, and a keep-alive where it stays empty for a third of the lease."""
        while True:
            while self._outbox:
                request = self._outbox.popleft()
                yield request
                if request.WhichOneof("message") == "commit":
                    return
            self._outbox_filled.clear()
            try:
                async with asyncio.timeout(self._lease_s / 3):
                    await self._outbox_filled.wait()
            except TimeoutError:
                yield page_pb2.PushRequest(keep_alive=page_pb2.KeepAlive())

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._take(response)
            failure: PageferryError = UnavailableError("push ended without Committed", reason="STREAM_BROKEN")
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
        except PageferryError as error:
            failure = error
            self._call.cancel()
        except asyncio.CancelledError:
            failure = AbortedError("the push was given up", reason="PUSH_ABORTED")
        except Exception as error:
            log("push_failed", level="error", error=error)
            failure = InternalError(f"internal error: {type(error).__name__}")
            self._call.cancel()
        if self._sender.state is not SenderState.COMMITTED:
            self._fail(failure)

    def _take(self, response: page_pb2.PushResponse) -> None:
        now = time.monotonic()
        match response.WhichOneof("message"):
            case "opened":
                self._sender.open()
                self._lease_s = max(response.opened.lease_ms / 1000, MIN_LEASE_S)
            case "acked":
                self._sender.acked(response.acked.frames, now)
            case "committed":
                self._sender.committed(now)
        self._progress.set()

    def _fail(self, failure: PageferryError) -> None:
        self.failure = self.failure or failure
        self._sender.abort()
        self.broken.set()
        self._progress.set()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait for the peer; raises what ended the push."""
        self._raise_failure()
        while not ready():
            self._progress.clear()
            await self._progress.wait()
            self._raise_failure()

    def _end_span(self) -> None:
        if self._sender.state is SenderState.COMMITTED:
            stats = self._sender.stats
            describe_pages(self._span, self._parts.source.layout, stats.pages, stats.bytes)
            describe_timing(self._span, stats, self._stalled_s)
            end_span(self._span, grpc.StatusCode.OK)
        else:
            failure = self.failure or AbortedError("the push was given up")
            end_span(self._span, grpc.StatusCode[failure.code], failure.message)
