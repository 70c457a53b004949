"""The receiving end of a hand-off: frames are checked over our own copy, written into reserved pages, acknowledged."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import grpc
from opentelemetry import trace

from pageferry.core.errors import AbortedError, InvalidArgumentError, PageferryError, invalid
from pageferry.core.handoff import Arrivals
from pageferry.core.layout import CacheLayout, PageKey, PageSink, Place
from pageferry.core.plan import SampledToken
from pageferry.runtime.convert import layout_from_proto, token_from_proto
from pageferry.runtime.engine_thread import call_on_loop
from pageferry.runtime.frames import check_payload, describe_pages, page_key
from pageferry.v1 import page_pb2, page_pb2_grpc

MAX_UNCOPIED_FRAMES = 8
CANCEL_DELAY_S = 0.1


class FrameKey(NamedTuple):
    """Which part of which page a frame carries."""

    page: PageKey
    first_layer: int
    num_layers: int


@dataclass(slots=True, eq=False)
class Grant:
    """The right to fill pages, which hold a reference of this push from `TicketDesk.open` to `TicketDesk.close`.

    `places` says where each page to receive goes. Where the desk ends the ticket on its own (expired, or its request
    is over), it calls `end`, on the event loop; the push then ends with that error.
    """

    ticket: bytes
    lease_ms: int
    places: Mapping[PageKey, Place] = field(default_factory=dict)
    ended: "asyncio.Future[PageferryError]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: PageferryError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


class TicketDesk(Protocol):
    """Who knows the tickets: the decode service, on its engine's thread. All methods are called on the event loop."""

    async def open(self, ticket: bytes, layout: CacheLayout) -> Grant:
        """Open the ticket and take a reference to each page of the grant, or raise FailedPreconditionError."""
        ...

    def receive(self, grant: Grant, frames: Sequence[FrameKey]) -> None:
        """Frames lie in their pages (none: a keep-alive): record them and renew the lease. Does not wait."""
        ...

    async def commit(self, grant: Grant, covered_tokens: int, first: tuple[int, SampledToken] | None) -> None:
        """All is there. FailedPreconditionError where it is not; then nothing has changed."""
        ...

    def close(self, grant: Grant, error: PageferryError | None) -> None:
        """The push is over and no copy runs any more: give the pages' references back, and abort the ticket if `error`.

        Called exactly once for each grant. Does not wait.
        """
        ...


class PageReceiver(page_pb2_grpc.PageServiceServicer):
    """The PageService: one `_Receipt` for each push. `executor` is the process's one transfer thread."""

    def __init__(self, desk: TicketDesk, sink: PageSink, executor: ThreadPoolExecutor) -> None:
        self._desk = desk
        self._sink = sink
        self._executor = executor

    async def Push(  # type: ignore[override]  # noqa: N802 - a coroutine that reads and writes by itself
        self, request_iterator: object, context: Any
    ) -> None:
        request = await context.read()
        if request is grpc.aio.EOF or request.WhichOneof("message") != "open":
            raise InvalidArgumentError("the first message of a push must be Open", reason="NOT_OPENED")
        grant = await self._desk.open(request.open.ticket, layout_from_proto(request.open.layout))
        receipt = _Receipt(grant, self._desk, self._sink, self._executor)
        error: PageferryError | None = AbortedError("the sender broke the push off", reason="PUSH_BROKEN")
        try:
            await receipt.run(context)
            error = None
        except PageferryError as raised:
            error = raised
            raise
        finally:
            receipt.describe(trace.get_current_span())
            receipt.close(error)


class _Receipt:
    """One push after Open: one task reads messages, another copies what has come and acknowledges it at once."""

    def __init__(self, grant: Grant, desk: TicketDesk, sink: PageSink, executor: ThreadPoolExecutor) -> None:
        self._grant = grant
        self._desk = desk
        self._sink = sink
        self._executor = executor
        self._inbox: asyncio.Queue[page_pb2.PageFrame] = asyncio.Queue(MAX_UNCOPIED_FRAMES)
        self._copying: Future[int] | None = None
        self._arrived = Arrivals(grant.places, sink.layout)
        self._num_frames = 0
        self._num_bytes = 0

    async def run(self, context: Any) -> None:
        """Until Committed is written; raises what ends the push before."""
        await context.write(page_pb2.PushResponse(opened=page_pb2.Opened(lease_ms=self._grant.lease_ms)))
        try:
            async with asyncio.TaskGroup() as tasks:
                others = [tasks.create_task(self._copy_frames(context)), tasks.create_task(self._watch_ticket())]
                commit = await self._read_messages(context)
                await self._inbox.join()
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        await self._desk.commit(self._grant, commit.covered_tokens, _first_token(commit))
        await context.write(page_pb2.PushResponse(committed=page_pb2.Committed(pages=len(self._arrived))))

    def describe(self, span: trace.Span) -> None:
        """Put the push's figures onto its span."""
        describe_pages(span, self._sink.layout, len(self._arrived), self._num_bytes)

    def close(self, error: PageferryError | None) -> None:
        """Close the grant, as soon as no copy runs any more."""
        if self._copying is None:
            self._desk.close(self._grant, error)
            return
        loop = asyncio.get_running_loop()
        self._copying.add_done_callback(lambda _: call_on_loop(loop, self._desk.close, self._grant, error))

    async def _read_messages(self, context: Any) -> page_pb2.Commit:
        while True:
            request = await context.read()
            if request is grpc.aio.EOF:
                # The stream of a cancelled call ends a moment before its handler is cancelled.
                await asyncio.sleep(CANCEL_DELAY_S)
                raise AbortedError("the push ended without Commit", reason="PUSH_BROKEN")
            match request.WhichOneof("message"):
                case "frame":
                    await self._inbox.put(request.frame)
                case "keep_alive":
                    self._desk.receive(self._grant, ())
                case "commit":
                    commit: page_pb2.Commit = request.commit
                    return commit
                case other:
                    raise InvalidArgumentError(f"a push has no second {other or 'empty message'}", reason="BAD_MESSAGE")

    async def _watch_ticket(self) -> None:
        raise await asyncio.shield(self._grant.ended)

    async def _copy_frames(self, context: Any) -> None:
        while True:
            frames = [await self._inbox.get()]
            while not self._inbox.empty():
                frames.append(self._inbox.get_nowait())
            keys = [self._check(frame) for frame in frames]
            self._copying = self._executor.submit(self._write, frames)
            self._num_bytes += await asyncio.wrap_future(self._copying)
            self._copying = None
            self._num_frames += len(frames)
            self._desk.receive(self._grant, keys)
            await context.write(page_pb2.PushResponse(acked=page_pb2.Acked(frames=self._num_frames)))
            for _ in frames:
                self._inbox.task_done()

    def _check(self, frame: page_pb2.PageFrame) -> FrameKey:
        """InvalidArgumentError for a frame that doesn't belong to the grant, or has come before."""
        page = page_key(frame)
        self._arrived.add(page, frame.first_layer, frame.num_layers)
        return FrameKey(page, frame.first_layer, frame.num_layers)

    def _write(self, frames: Sequence[page_pb2.PageFrame]) -> int:
        """Check and write frames, on the transfer thread; returns their bytes."""
        num_bytes = 0
        for frame in frames:
            payload = frame.payload  # one copy, ours: what is checked is what is written
            check_payload(frame, payload, self._sink.layout)
            self._sink.write(self._grant.places[page_key(frame)], frame.first_layer, frame.num_layers, payload)
            num_bytes += len(payload)
        return num_bytes


def _first_token(commit: page_pb2.Commit) -> tuple[int, SampledToken] | None:
    """Position and token of the one choice that there is for now; None where none was drawn."""
    choices = [draw.choice for draw in commit.first_tokens]
    if choices not in ([], [0]):
        raise invalid("commit.first_tokens.choice", choices[:8], "must be 0 once, or nothing")
    return token_from_proto(commit.first_tokens[0].token) if choices else None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report of tasks that failed together: one that says why, rather than what followed from it."""
    return next((error for error in group.exceptions if isinstance(error, PageferryError)), group.exceptions[0])
