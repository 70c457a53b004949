"""The sending end of a hand-off: pages on one Push stream, or beside it, as far as the receiver keeps up."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import grpc
from opentelemetry import trace

from pageferry.core.errors import AbortedError, InternalError, PageferryError, UnavailableError
from pageferry.core.handoff_tables import SenderState
from pageferry.core.layout import Place
from pageferry.core.plan import SampledToken
from pageferry.core.sender import HandoffStats, Sender
from pageferry.runtime.carriers import Batch, Pages
from pageferry.runtime.convert import layout_to_proto, token_to_proto
from pageferry.runtime.engine_thread import call_on_loop
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.frames import sealed
from pageferry.runtime.logs import log
from pageferry.runtime.outbox import Outbox
from pageferry.runtime.page_transfer import PageTransfer, PushParts
from pageferry.runtime.page_wire import push_call
from pageferry.runtime.push_report import PushReport
from pageferry.runtime.rpc_spans import inject_context
from pageferry.v1 import page_pb2

STATUS_TIMEOUT_S = 1.0
_WRITE_FAILED = "Internal error from Core"  # gRPC's words
MIN_LEASE_S = 0.03  # a peer that names less doesn't get more keep-alives


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
        request_id: str,
        parts: PushParts,
        on_released: Callable[[Sequence[Place]], None],
        endpoint: str = "",
    ) -> None:
        """The ticket is of that request; `endpoint` is what the channel leads to, for its span.

        `on_released` gets each shipped page once, on the event loop, when its bytes are copied or won't be.
        """
        self.broken = asyncio.Event()
        self._channel = channel
        self._ticket = ticket
        self._request_id = request_id
        self._parts = parts
        self._on_released = on_released
        self._endpoint = endpoint
        self._sender = Sender()
        self._outbox = Outbox(parts.config.lease_ms / 1000, self._sent, parts.clock)
        self._progress = asyncio.Event()
        self._transfer = PageTransfer(parts, channel, self._progress)
        self._opened = page_pb2.Opened()
        self.failure: PageferryError | None = None  # what ended the push
        self._compute_has_ended = False
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def transport(self) -> str:
        """How pages travel; known once it is open."""
        return self._transfer.carrier.name

    async def open(self) -> None:
        """Present the ticket and the layout; FailedPreconditionError where the receiver refuses them."""
        layout = layout_to_proto(self._parts.source.layout)
        opening = page_pb2.Open(ticket=self._ticket, request_id=self._request_id, layout=layout)
        self._transfer.ask(opening)
        self._outbox.put(page_pb2.PushRequest(open=opening))
        metadata = tuple(inject_context(trace.set_span_in_context(self._report.span)).items())
        self._call = push_call(self._channel)(self._requests(), metadata=metadata)
        self._reader = asyncio.create_task(self._read(), name="push-reader")
        await self._until(lambda: self._sender.state is not SenderState.IDLE)
        await self._transfer.choose(self._opened, self._outbox.put)

    async def ship(self, pages: Pages) -> None:
        """Copy and send pages; returns once all copies are under way, as far ahead as the receiver allows.

        Takes over a reference to each page, and gives all of them back through `on_released`, even if it raises.
        """
        num_left = len(pages)  # not given to a copy that gives them back
        partly: Future[list[bytes]] | None = None  # copies some layers of the first of them
        try:
            for together in self._transfer.cut(pages):
                rooms = [await self._wait_for_room(batch) for batch in together]
                for batch in together:
                    for key, _ in batch.pages if batch.first_layer == 0 else ():
                        self._sender.ship(key)
                copying = self._copy(together, rooms)
                num_left -= sum(len(batch.pages) for batch in together if batch.is_last)
                partly = None if together[-1].is_last else copying
        finally:
            left = [place for _, place in pages[len(pages) - num_left :]]
            if partly is not None:
                self._release_after(partly, left)
            elif left:
                self._on_released(left)

    def compute_ended(self) -> None:
        """The last page's bytes are computed: what the transfer takes from now on is not hidden."""
        if not self._compute_has_ended:
            self._compute_has_ended = True
            self._sender.compute_ended(self._parts.clock())

    async def commit(self, covered_tokens: int, first: tuple[int, SampledToken] | None) -> HandoffStats:
        """Say that all is sent, and wait until the receiver has it. `first`: position and token that were drawn."""
        self.compute_ended()
        self._raise_failure()
        self._sender.commit()
        draws = [page_pb2.FirstDraw(token=token_to_proto(*first))] if first else []
        commit = sealed(page_pb2.Commit(covered_tokens=covered_tokens, first_tokens=draws))
        self._outbox.put(page_pb2.PushRequest(commit=commit), ends=True)
        await self._until(lambda: self._sender.state is SenderState.COMMITTED)
        return self._sender.stats

    def abort(self, error: PageferryError | None = None) -> None:
        """Break the push off, for good; without effect once it is committed."""
        if self._sender.state is not SenderState.COMMITTED:
            self._fail(error or _given_up())
            if self._call is not None:
                self._call.cancel()

    async def __aenter__(self) -> Self:
        parts = self._parts
        self._report = PushReport(parts.tracer, self._endpoint, parts.device, parts.clock)
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
            self._transfer.close()
            is_committed = self._sender.state is SenderState.COMMITTED
            failure = None if is_committed else self.failure or _given_up()
            layout = self._parts.source.layout
            self._parts.on_over(self._report.end(self._sender, self.transport, layout, failure))

    async def _wait_for_room(self, batch: Batch) -> int:
        room = None

        def has_room() -> bool:
            nonlocal room
            room = self._transfer.carrier.take_room(batch)
            return room is not None

        with self._report.stalled():
            await self._until(has_room)
        assert room is not None
        return room

    def _copy(self, batches: Sequence[Batch], rooms: Sequence[int]) -> "Future[list[bytes]]":
        """Put messages into the outbox, whose bytes are being made; then their pages are given back."""
        copying = self._transfer.copy(batches, rooms, self._report.copies)
        # In this order, so that pages are given back before their message is sent.
        self._release_after(copying, [place for batch in batches if batch.is_last for _, place in batch.pages])
        self._outbox.put_batches(copying, batches)
        return copying

    def _release_after(self, copying: "Future[list[bytes]]", places: Sequence[Place]) -> None:
        loop = asyncio.get_running_loop()
        if places:
            copying.add_done_callback(lambda _: call_on_loop(loop, self._on_released, places))

    def _sent(self, batch: Batch, now: float) -> None:
        self._sender.sent(batch.num_bytes, now, len(batch.pages))

    async def _requests(self) -> AsyncIterator[bytes]:
        try:
            async for message in self._outbox.messages():
                yield message
        except Exception as error:
            self.abort(_failure_of(error))

    async def _read(self) -> None:
        failure: PageferryError = UnavailableError("push ended without Committed", reason="STREAM_BROKEN")
        try:
            async for response in self._call:
                self._take(response)
        except asyncio.CancelledError:
            failure = _given_up()
        except Exception as error:
            failure = _failure_of(error)
        self.abort(failure)

    def _take(self, response: page_pb2.PushResponse) -> None:
        now = self._parts.clock()
        match response.WhichOneof("message"):
            case "opened":
                self._sender.open()
                self._opened = response.opened
                self._outbox.lease_s = max(response.opened.lease_ms / 1000, MIN_LEASE_S)
            case "acked":
                self._sender.acked(response.acked.frames, now)
                self._transfer.carrier.acked(response.acked.frames)
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


def _given_up() -> AbortedError:
    return AbortedError("the push was given up", reason="PUSH_ABORTED")


def _failure_of(error: Exception) -> PageferryError:
    """What a push ends with where that was raised; its own text is for the log if it is none of ours."""
    match error:
        case PageferryError():
            return error
        case grpc.aio.AioRpcError() if error.details() == _WRITE_FAILED:  # the receiver had ended it, which hides why
            return UnavailableError("push ended while it was written to", reason="STREAM_BROKEN")
        case grpc.aio.AioRpcError():
            return from_rpc_error(error, "the decode worker")
    log("push_failed", level="error", error=error)
    return InternalError(f"internal error: {type(error).__name__}")
