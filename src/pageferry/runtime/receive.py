"""The receiving end of a hand-off: pages are copied to where they were reserved, checked there, and acknowledged."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry import trace

from pageferry.core.config import HandoffConfig
from pageferry.core.errors import AbortedError, FailedPreconditionError, InvalidArgumentError, PageferryError
from pageferry.core.handoff import Arrivals
from pageferry.core.page_io import DeviceClock, PageSink
from pageferry.runtime.carriers import INLINE, SHM
from pageferry.runtime.convert import layout_from_proto
from pageferry.runtime.device_spans import CopyTimes
from pageferry.runtime.engine_thread import call_on_loop
from pageferry.runtime.frames import (
    TRANSPORT,
    Arrival,
    arrivals_inline,
    arrivals_staged,
    check_sealed,
    copy_arrival,
    describe_pages,
    first_token_of,
)
from pageferry.runtime.push_report import RECEIVED, PushFigures
from pageferry.runtime.staging import OwnRegion, OwnRegions
from pageferry.runtime.tickets import Grant, TicketDesk
from pageferry.v1 import page_pb2, page_pb2_grpc

MAX_UNCOPIED_MESSAGES = 8
ACK_FRAMES = 16  # so many are acknowledged even while more are waiting to be copied
CANCEL_DELAY_S = 0.1


class PageReceiver(page_pb2_grpc.PageServiceServicer):
    """The PageService: one `_Receipt` for each push. `executor` is the process's one transfer thread."""

    def __init__(
        self,
        desk: TicketDesk,
        sink: PageSink,
        executor: ThreadPoolExecutor,
        config: HandoffConfig | None = None,
        regions: OwnRegions | None = None,
        on_over: Callable[[PushFigures], None] = lambda figures: None,
        clock: DeviceClock | None = None,
    ) -> None:
        """`clock` is of the device that the sink's pages are on."""
        config = config or HandoffConfig()
        self._desk = desk
        self._sink = sink
        self._executor = executor
        self._on_over = on_over
        self._transport = config.transport
        self._clock = clock
        self._regions = regions if regions is not None else OwnRegions(executor, config.lease_ms / 1000)

    async def Push(  # type: ignore[override]  # noqa: N802 - a coroutine that reads and writes by itself
        self, request_iterator: object, context: Any
    ) -> None:
        request = await context.read()
        if not isinstance(request, page_pb2.PushRequest) or request.WhichOneof("message") != "open":
            raise InvalidArgumentError("the first message of a push must be Open", reason="NOT_OPENED")
        if self._transport == SHM and not request.open.HasField("staging"):
            raise _no_shared_memory("the sender asks for none")
        opening = request.open
        grant = await self._desk.open(opening.ticket, opening.request_id, layout_from_proto(opening.layout))
        receipt = _Receipt(
            grant, self._desk, self._sink, self._executor, CopyTimes(self._clock), must_share=self._transport == SHM
        )
        error: PageferryError | None = AbortedError("the sender broke the push off", reason="PUSH_BROKEN")
        try:
            if self._transport != INLINE and opening.HasField("staging"):
                await receipt.borrow(self._regions, opening.staging.proof)
            await receipt.run(context)
            error = None
        except PageferryError as raised:
            error = raised
            raise
        finally:
            receipt.describe(trace.get_current_span())
            self._on_over(receipt.figures(error))
            receipt.close(error)


class _Receipt:
    """One push after Open: one task reads messages, another copies and acknowledges what has come."""

    def __init__(
        self,
        grant: Grant,
        desk: TicketDesk,
        sink: PageSink,
        executor: ThreadPoolExecutor,
        times: CopyTimes,
        *,
        must_share: bool,
    ) -> None:
        self._grant = grant
        self._desk = desk
        self._sink = sink
        self._executor = executor
        self._times = times
        self._must_share = must_share
        self._regions: OwnRegions | None = None
        self._region: OwnRegion | None = None
        self._inbox: asyncio.Queue[list[Arrival]] = asyncio.Queue(MAX_UNCOPIED_MESSAGES)
        self._copying: Future[int] | None = None
        self._arrived = Arrivals(grant.places, sink.layout)
        self._is_all = False  # Commit has come, whose answer acknowledges the rest
        self._num_frames = 0
        self._num_bytes = 0

    async def borrow(self, regions: OwnRegions, proof: bytes) -> None:
        """Get a region to offer, if there can be one: that of an earlier push whose proof this is, or a new one."""
        self._regions = regions
        self._region = await regions.borrow(proof)

    async def run(self, context: Any) -> None:
        """Until Committed is written; raises what ends the push before."""
        if self._must_share and self._region is None:
            raise _no_shared_memory("there is no room for it")
        opened = page_pb2.Opened(lease_ms=self._grant.lease_ms, takes_frames=True)
        if self._region is not None:
            opened.staging.CopyFrom(page_pb2.StagingOffer() if self._region.is_attached else self._region.offer)
        await context.write(page_pb2.PushResponse(opened=opened))
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [tasks.create_task(self._copy_pages(context)), tasks.create_task(self._watch_ticket())]
                commit = await self._read_messages(context)
                await self._inbox.join()
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        await self._desk.commit(self._grant, commit.covered_tokens, first_token_of(commit))
        await context.write(page_pb2.PushResponse(committed=page_pb2.Committed(pages=len(self._arrived))))

    def describe(self, span: trace.Span) -> None:
        """Put the push's figures onto its span."""
        describe_pages(span, self._sink.layout, len(self._arrived), self._num_bytes)
        span.set_attribute(TRANSPORT, self._transport)
        span.set_attributes(self._times.attributes)

    def figures(self, error: PageferryError | None) -> PushFigures:
        failure = error.reason if error is not None else None
        return PushFigures(RECEIVED, self._transport, len(self._arrived), self._num_bytes, failure=failure)

    @property
    def _transport(self) -> str:
        is_shared = self._region is not None and self._region.is_attached
        return SHM if is_shared else INLINE

    def close(self, error: PageferryError | None) -> None:
        """Close the grant, as soon as no copy runs any more."""
        if self._copying is None:
            self._close(error)
            return
        loop = asyncio.get_running_loop()
        self._copying.add_done_callback(lambda _: call_on_loop(loop, self._close, error))

    def _close(self, error: PageferryError | None) -> None:
        if self._regions is not None and self._region is not None:
            self._regions.give_back(self._region)
        self._desk.close(self._grant, error)

    async def _read_messages(self, context: Any) -> page_pb2.Commit:
        while True:
            request = await context.read()
            if request is grpc.aio.EOF:
                # The stream of a cancelled call ends a moment before its handler is cancelled.
                await asyncio.sleep(CANCEL_DELAY_S)
                raise AbortedError("the push ended without Commit", reason="PUSH_BROKEN")
            if isinstance(request, list):
                await self._inbox.put(arrivals_inline(request, self._sink.layout, self._arrived))
                continue
            match request.WhichOneof("message"):
                case "staged":
                    await self._inbox.put([self._staged(request.staged)])
                case "keep_alive":
                    self._desk.receive(self._grant, ())
                case "attached":
                    self._attached(request.attached.proof)
                case "commit":
                    commit = check_sealed(request.commit)
                    self._is_all = True
                    return commit
                case other:
                    raise InvalidArgumentError(f"a push has no second {other or 'empty message'}", reason="BAD_MESSAGE")

    def _attached(self, proof: bytes) -> None:
        if self._region is None:
            raise InvalidArgumentError("no staging region was offered to be attached", reason="BAD_MESSAGE")
        if proof:
            self._region.attached(proof)
        elif self._must_share:
            raise _no_shared_memory("the sender can't attach it")
        else:
            self._region.unlink()

    def _staged(self, staged: page_pb2.StagedPages) -> Arrival:
        if self._region is None or not self._region.is_attached:
            raise InvalidArgumentError("staged pages came without a staging region", reason="BAD_MESSAGE")
        return arrivals_staged(staged, self._sink.layout, self._arrived, self._region.memory)

    async def _watch_ticket(self) -> None:
        raise await asyncio.shield(self._grant.ended)

    async def _copy_pages(self, context: Any) -> None:
        num_acked = 0
        while True:
            messages = [await self._inbox.get()]
            while not self._inbox.empty():
                messages.append(self._inbox.get_nowait())
            arrivals = [arrival for message in messages for arrival in message]
            self._copying = self._executor.submit(self._copy, arrivals)
            self._num_bytes += await asyncio.wrap_future(self._copying)
            self._copying = None
            frames = [frame for arrival in arrivals for frame in arrival.frames]
            self._num_frames += len(frames)
            self._desk.receive(self._grant, frames)
            if not self._is_all and (self._inbox.empty() or self._num_frames - num_acked >= ACK_FRAMES):
                num_acked = self._num_frames
                await context.write(page_pb2.PushResponse(acked=page_pb2.Acked(frames=num_acked)))
            for _ in messages:
                self._inbox.task_done()

    def _copy(self, arrivals: Sequence[Arrival]) -> int:
        """On the transfer thread; returns the bytes copied."""
        places = self._grant.places
        with self._times.counted():
            return sum(copy_arrival(arrival, [places[key] for key in arrival.keys], self._sink) for arrival in arrivals)


def _no_shared_memory(why: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"handoff.transport is shm, but {why}", reason="NO_SHARED_MEMORY")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report of tasks that failed together: one that says why, rather than what followed from it."""
    return next((error for error in group.exceptions if isinstance(error, PageferryError)), group.exceptions[0])
