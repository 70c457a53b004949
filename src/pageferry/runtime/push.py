"""The sending end of a hand-off: pages on one Push stream, or beside it, as far as the receiver keeps up."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

import grpc
from opentelemetry import trace
from opentelemetry.trace import Tracer

from pageferry.core.config import HandoffConfig
from pageferry.core.errors import (
    AbortedError,
    FailedPreconditionError,
    InternalError,
    PageferryError,
    UnavailableError,
)
from pageferry.core.handoff_tables import SenderState
from pageferry.core.layout import PageKey, Place
from pageferry.core.page_io import DeviceClock, PageSource
from pageferry.core.plan import SampledToken
from pageferry.core.sender import HandoffStats, Sender
from pageferry.runtime.carriers import INLINE, SHM, Batch, Carrier, InlineCarrier, StagedCarrier, cut
from pageferry.runtime.convert import layout_to_proto, token_to_proto
from pageferry.runtime.engine_thread import call_on_loop
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.frames import sealed
from pageferry.runtime.logs import log
from pageferry.runtime.outbox import Outbox
from pageferry.runtime.page_wire import push_call
from pageferry.runtime.push_figures import PushFigures
from pageferry.runtime.push_report import PushReport
from pageferry.runtime.rpc_spans import inject_context
from pageferry.runtime.shared_regions import SharedRegion, SharedRegions
from pageferry.v1 import page_pb2

STATUS_TIMEOUT_S = 1.0
_WRITE_FAILED = "Internal error from Core"  # gRPC's words
MIN_LEASE_S = 0.03  # a peer that names less doesn't get more keep-alives


@dataclass(frozen=True, slots=True)
class PushParts:
    """What all pushes of a process share; `executor` is its one transfer thread."""

    source: PageSource
    executor: ThreadPoolExecutor
    config: HandoffConfig
    tracer: Tracer
    regions: SharedRegions = field(default_factory=SharedRegions)
    clock: Callable[[], float] = time.monotonic
    on_over: Callable[[PushFigures], None] = lambda figures: None
    device: DeviceClock | None = None  # that the pages are on


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
        self._carrier: Carrier = InlineCarrier(parts.config.max_frames_in_flight, several=False)
        self._region: SharedRegion | None = None  # that the carrier uses
        self._opened = page_pb2.Opened()
        self.failure: PageferryError | None = None  # what ended the push
        self._compute_has_ended = False
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def transport(self) -> str:
        """How pages travel; known once it is open."""
        return self._carrier.name

    async def open(self) -> None:
        """Present the ticket and the layout; FailedPreconditionError where the receiver refuses them."""
        known = self._parts.regions.get(self._channel)
        layout = layout_to_proto(self._parts.source.layout)
        opening = page_pb2.Open(ticket=self._ticket, request_id=self._request_id, layout=layout)
        if self._wants_to_share():
            opening.staging.proof = known.proof if known is not None else b""
        self._outbox.put(page_pb2.PushRequest(open=opening))
        metadata = tuple(inject_context(trace.set_span_in_context(self._report.span)).items())
        self._call = push_call(self._channel)(self._requests(), metadata=metadata)
        self._reader = asyncio.create_task(self._read(), name="push-reader")
        await self._until(lambda: self._sender.state is not SenderState.IDLE)
        await self._choose_carrier(known)

    async def ship(self, pages: Sequence[tuple[PageKey, Place]]) -> None:
        """Copy and send pages; returns once all copies are under way, as far ahead as the receiver allows.

        Takes over a reference to each page, and gives all of them back through `on_released`, even if it raises.
        """
        num_left = len(pages)  # not given to a copy that gives them back
        partly: Future[list[bytes]] | None = None  # copies some layers of the first of them
        try:
            for together in self._cut(pages):
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
            self._carrier.close()
            if self._region is not None:
                self._parts.regions.give_back(self._channel, self._region, self._parts.config.lease_ms / 1000)
            is_committed = self._sender.state is SenderState.COMMITTED
            failure = None if is_committed else self.failure or _given_up()
            layout = self._parts.source.layout
            self._parts.on_over(self._report.end(self._sender, self.transport, layout, failure))

    def _wants_to_share(self) -> bool:
        """Whether to ask for shared memory; where it would be in vain, only if nothing else will do."""
        transport, parts = self._parts.config.transport, self._parts
        is_vain = parts.regions.is_apart(self._channel) or not StagedCarrier.carries(parts.source.layout)
        return transport == SHM or (transport != INLINE and not is_vain)

    async def _choose_carrier(self, known: SharedRegion | None) -> None:
        """Shared memory where both ends want and can, else messages. Tells the receiver which."""
        config, opened, region = self._parts.config, self._opened, None
        if opened.HasField("staging") and not opened.staging.name:
            region = known
        elif opened.HasField("staging"):
            attaching = self._parts.executor.submit(SharedRegion.attach, opened.staging, self._parts.regions.directory)
            region = await asyncio.wrap_future(attaching)
            if region is None:
                self._parts.regions.has_none(self._channel)
            proof = region.proof if region is not None else b""
            self._outbox.put(page_pb2.PushRequest(attached=page_pb2.StagingAttached(proof=proof)))
        if region is not None and StagedCarrier.carries(self._parts.source.layout):
            self._carrier = StagedCarrier(region, self._progress)
            self._parts.regions.use(self._channel, region)
            self._region = region
        elif config.transport == SHM:
            message = "handoff.transport is shm, but the receiver shares no memory with this process"
            raise FailedPreconditionError(message, reason="NO_SHARED_MEMORY")
        else:
            self._carrier = InlineCarrier(config.max_frames_in_flight, several=opened.takes_frames)

    async def _wait_for_room(self, batch: Batch) -> int:
        room = None

        def has_room() -> bool:
            nonlocal room
            room = self._carrier.take_room(batch)
            return room is not None

        with self._report.stalled():
            await self._until(has_room)
        assert room is not None
        return room

    def _cut(self, pages: Sequence[tuple[PageKey, Place]]) -> Iterator[list[Batch]]:
        """As batches that are copied together: few, so that the first are sent while the next are copied."""
        batches = cut(pages, self._parts.source.layout, self._carrier)
        while together := list(islice(batches, self._carrier.num_together)):
            yield together

    def _copy(self, batches: Sequence[Batch], rooms: Sequence[int]) -> "Future[list[bytes]]":
        """Put messages into the outbox, whose bytes the transfer thread makes; then their pages are given back."""
        carrier, source = self._carrier, self._parts.source

        def read() -> list[bytes]:
            with self._report.copies.counted():
                return [carrier.read(source, batch, room) for batch, room in zip(batches, rooms, strict=True)]

        copying = self._parts.executor.submit(read)
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
            self._copy_failed(error)

    def _copy_failed(self, error: Exception) -> None:
        if not isinstance(error, PageferryError):
            log("push_failed", level="error", error=error)
            error = InternalError(f"internal error: {type(error).__name__}")
        self.abort(error)

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._take(response)
            failure: PageferryError = UnavailableError("push ended without Committed", reason="STREAM_BROKEN")
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, "the decode worker")
            if error.details() == _WRITE_FAILED:  # the receiver had ended the call, which hides why
                failure = UnavailableError("push ended while it was written to", reason="STREAM_BROKEN")
        except PageferryError as error:
            failure = error
            self._call.cancel()
        except asyncio.CancelledError:
            failure = _given_up()
        except Exception as error:
            log("push_failed", level="error", error=error)
            failure = InternalError(f"internal error: {type(error).__name__}")
            self._call.cancel()
        if self._sender.state is not SenderState.COMMITTED:
            self._fail(failure)

    def _take(self, response: page_pb2.PushResponse) -> None:
        now = self._parts.clock()
        match response.WhichOneof("message"):
            case "opened":
                self._sender.open()
                self._opened = response.opened
                self._outbox.lease_s = max(response.opened.lease_ms / 1000, MIN_LEASE_S)
            case "acked":
                self._sender.acked(response.acked.frames, now)
                self._carrier.acked(response.acked.frames)
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
