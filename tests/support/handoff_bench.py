"""A prefill and a decode worker in one process: real pools, schedulers and gRPC, with the fake model."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence as ListLike
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import pytest
from crc32c import crc32c
from fake_engine import LAYOUT, VOCAB_SIZE, FakePages, FakeRunner, make_work
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pageferry.core.config import HandoffConfig, SchedulerConfig, ServerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.errors import PageferryError
from pageferry.core.handoff import Ticket, TicketTable
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.limits import ModelLimits
from pageferry.core.plan import Plan, Runner, StepResult
from pageferry.core.pool import PageId
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sequence import Sequence
from pageferry.decode_svc.__main__ import DecodeMain
from pageferry.decode_svc.step import DecodeStep
from pageferry.decode_svc.worker import DecodeWorker, Served
from pageferry.engine.load import Engine
from pageferry.prefill_svc.__main__ import PrefillMain
from pageferry.prefill_svc.shipping import DecodeChannels
from pageferry.prefill_svc.step import PrefillStep
from pageferry.prefill_svc.worker import PrefillWorker
from pageferry.runtime.channels import open_channel
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.convert_work import work_to_proto
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.frames import sealed
from pageferry.runtime.page_transfer import PushParts
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.runtime.worker_metrics import WorkerMetrics
from pageferry.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    page_pb2,
    page_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
    worker_pb2,
)
from pageferry.v1.inference_pb2 import WorkerLoad

PATIENCE_S = 60.0


@dataclass
class Settings:
    """What a test may change."""

    num_pages: int = 64  # of each cache group
    num_tails: int = 32
    layout: CacheLayout = LAYOUT
    engine: Engine | None = None  # instead of the fake model
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(chunk_tokens=8, local_chunk_tokens=8, headroom_pages=0)
    )
    # So that nothing that a test waits for comes of time alone.
    handoff: HandoffConfig = field(default_factory=lambda: HandoffConfig(lease_ms=600_000, reservation_ms=600_000))
    max_model_tokens: int = 100_000
    clock: Callable[[], float] = time.monotonic


@dataclass
class Watched:
    """A runner; `before` is called first in each step."""

    runner: Runner
    before: Callable[[Plan], None] = lambda plan: None

    def run(self, plan: Plan) -> StepResult:
        self.before(plan)
        return self.runner.run(plan)


class Side:
    """What both workers of the bench have."""

    step: PrefillStep | DecodeStep
    worker: PrefillWorker | DecodeWorker

    def __init__(self, settings: Settings, exporter: InMemorySpanExporter) -> None:
        self.settings = settings
        if settings.engine is None:
            num_pages = [settings.num_pages] * len(settings.layout.groups)
            self.pages: Any = FakePages(settings.layout, settings.num_pages, settings.num_tails)
            self.runner: Any = FakeRunner(self.pages)
            self.pools = PagePools(settings.layout, num_pages, settings.num_tails)
        else:
            engine = settings.engine
            self.pages, self.runner = engine.pages, Watched(engine.runner)
            self.pools = PagePools(settings.layout, engine.num_pages, engine.num_tails)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        self.tracer = provider.get_tracer("bench")
        self.executor = ThreadPoolExecutor(1)
        self.server = GrpcServer(ServerConfig(), self.tracer)
        self.limits = ModelLimits(VOCAB_SIZE, settings.max_model_tokens)
        hub = WorkerHub(b"i" * 16, worker_pb2.Snapshot)
        self.publisher = Publisher(hub, WorkerMetrics())
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port = await self.server.start()
        self.worker.start()

    async def stop(self) -> None:
        await self.server.__aexit__(None, None, None)
        await self.worker.stop()
        self.executor.shutdown()

    async def is_idle(self) -> bool:
        """Nothing is held or under way; looked at on the engine's thread."""

        def check() -> bool:
            self.pools.check_integrity()
            return is_idle(self.step.load())

        return await self.worker.engine.call(check)

    async def on_engine(self, command: Callable[[], Any]) -> Any:
        return await self.worker.engine.call(command)


def is_idle(load: WorkerLoad) -> bool:
    """Whether nothing is under way and every page, of every group and tail, is free or cached."""
    in_use = [pool.pages_total - pool.pages_free - pool.pages_cached for pool in (load, *load.pools)]
    return not any((load.waiting, load.running, load.tickets, *in_use))


class PrefillSide(Side):
    def __init__(self, settings: Settings, exporter: InMemorySpanExporter) -> None:
        super().__init__(settings, exporter)
        scheduler = PrefillScheduler(settings.scheduler, self.pools, settings.layout)
        self.step = PrefillStep(scheduler, self.pools, self.runner, settings.clock)
        parts = PushParts(self.pages, self.executor, settings.handoff, self.tracer, device=self.pages)
        channels = DecodeChannels(lambda endpoint: open_channel(endpoint, self.tracer))
        self.worker = PrefillWorker(self.step, self.limits, parts, channels, self.publisher, settings.clock)
        main = PrefillMain()
        main.ready = self.worker
        main.register(self.server)


class NotingTable(TicketTable):
    """Keeps what it has issued."""

    def __init__(self, incarnation: bytes, lease_s: float, layout: CacheLayout) -> None:
        super().__init__(incarnation, lease_s, layout)
        self.issued: list[Ticket] = []

    def issue(self, ticket_id: bytes, sequence: Sequence, **fields: Any) -> Ticket:
        self.issued.append(super().issue(ticket_id, sequence, **fields))
        return self.issued[-1]


class DecodeSide(Side):
    def __init__(self, settings: Settings, exporter: InMemorySpanExporter) -> None:
        super().__init__(settings, exporter)
        scheduler = DecodeScheduler(settings.scheduler, self.pools, settings.layout)
        self.tickets = NotingTable(b"i" * 16, settings.handoff.lease_ms / 1000, settings.layout)
        self.step = DecodeStep(scheduler, self.pools, self.tickets, self.runner, settings.clock)
        self.main = DecodeMain()
        self.main.register(self.server)

    async def start(self) -> None:
        self.port = await self.server.start()
        settings = self.settings
        served = Served(self.limits, self.pages, self.executor, self.address, settings.handoff)
        self.worker = self.main.ready = DecodeWorker(self.step, served, self.tracer, self.publisher, settings.clock)
        self.worker.start()

    async def is_idle(self) -> bool:
        """Nor is a ticket live."""
        return await super().is_idle() and not await self.on_engine(lambda: len(self.tickets))

    def has_received(self, num_pages: int) -> Callable[[], Awaitable[bool]]:
        """For `until`: whether so many pages have come, of all tickets together."""

        async def check() -> bool:
            return bool(
                await self.on_engine(lambda: sum(len(ticket.arrived) for ticket in self.tickets.issued) == num_pages)
            )

        return check


class Bench:
    """Both workers, and calls to them as the router makes them."""

    def __init__(self, prefill: Settings | None = None, decode: Settings | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.p = PrefillSide(prefill or Settings(), self.exporter)
        self.d = DecodeSide(decode or prefill or Settings(), self.exporter)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for side in (self.p, self.d):
            await side.start()
            self._stack.push_async_callback(side.stop)
        tracer = TracerProvider(shutdown_on_exit=False).get_tracer("router")
        self.p_channel = await self._stack.enter_async_context(open_channel(self.p.address, tracer))
        self.d_channel = await self._stack.enter_async_context(open_channel(self.d.address, tracer))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def prefill(
        self,
        request_id: str,
        prompt: Iterable[int],
        reserved: decode_pb2.Reserved | prefill_pb2.HandoffTarget | None = None,
        **fields: Any,
    ) -> Any:
        timeout = fields.pop("timeout", None)
        request = prefill_pb2.PrefillRequest(work=work_to_proto(make_work(request_id, prompt, **fields)))
        if reserved is not None:
            request.target.CopyFrom(target_of(reserved) if isinstance(reserved, decode_pb2.Reserved) else reserved)
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(self.p_channel)
        return stub.Prefill(request, timeout=timeout)

    def decode(self, request_id: str, prompt: Iterable[int], *, local: bool = False, **fields: Any) -> Any:
        timeout = fields.pop("timeout", None)
        work = work_to_proto(make_work(request_id, prompt, **fields))
        source = decode_pb2.PROMPT_SOURCE_LOCAL if local else decode_pb2.PROMPT_SOURCE_PUSHED
        stub: Any = decode_pb2_grpc.DecodeServiceStub(self.d_channel)
        return stub.Decode(decode_pb2.DecodeRequest(work=work, source=source), timeout=timeout)

    async def generate(self, request_id: str, prompt: Iterable[int], **fields: Any) -> "Result":
        """One request over both workers, as the router runs it."""
        prompt = list(prompt)
        result = Result()
        decode = self.decode(request_id, prompt, **fields)
        result.reserved = (await anext(aiter(decode))).reserved
        prefill = self.prefill(request_id, prompt, result.reserved, **fields)
        async for message in prefill:
            setattr(result, message.WhichOneof("event"), getattr(message, message.WhichOneof("event")))
        async for message in decode:
            if message.HasField("completed"):
                result.completed = message.completed
            result.tokens += [(token.position, token.token_id) for token in message.tokens.tokens]
        return result

    async def until_idle(self) -> None:
        """Wait until nothing is held on either side."""
        for side in (self.p, self.d):
            await until(side.is_idle)


class RawPush:
    """A sender that does what a test wants, and not what is right."""

    def __init__(self, bench: Bench, reserved: decode_pb2.Reserved, request_id: str = "r") -> None:
        self.reserved = reserved
        self.request_id = request_id
        self.layout = bench.d.settings.layout
        stub: Any = page_pb2_grpc.PageServiceStub(bench.d_channel)
        self.call = stub.Push()

    async def open(self, layout: CacheLayout | None = None) -> page_pb2.PushResponse:
        sent = layout_to_proto(layout or self.layout)
        message = page_pb2.Open(ticket=self.reserved.ticket, request_id=self.request_id, layout=sent)
        await self.call.write(page_pb2.PushRequest(open=message))
        return await self.read()

    async def send_page(self, page: int | PageKey, token_ids: ListLike[int], *, crc_error: int = 0) -> None:
        """Send one page of a prompt (a number: of group 0), with true bytes, and wait until it is taken."""
        key = page if isinstance(page, PageKey) else PageKey(0, page)
        place = Place(key.group, PageId(0), key.is_tail)
        pages = FakePages(self.layout, 1, 1)
        pages.fill(key, place, token_ids)
        for first_layer, num_layers in self.layout.of(key).frames():
            payload = pages.read(key, place, first_layer, num_layers)
            frame = page_pb2.PageFrame(
                group=key.group,
                page_index=key.index,
                kind=page_pb2.PAGE_KIND_TAIL if key.is_tail else page_pb2.PAGE_KIND_PAGE,
                first_layer=first_layer,
                num_layers=num_layers,
                crc32c=crc32c(payload) ^ crc_error,
                payload=payload,
            )
            await self.call.write(page_pb2.PushRequest(frame=frame))
            await self.read()

    async def commit(self, covered_tokens: int, first: int | None = None) -> page_pb2.PushResponse:
        draws = [page_pb2.FirstDraw(token=types_pb2.GeneratedToken(token_id=first))] if first is not None else []
        message = sealed(page_pb2.Commit(covered_tokens=covered_tokens, first_tokens=draws))
        await self.call.write(page_pb2.PushRequest(commit=message))
        return await self.read()

    async def read(self) -> page_pb2.PushResponse:
        """The next response; raises the call's error where it is over."""
        try:
            return await anext(self.call)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


class Result:
    """The messages of a request."""

    reserved: decode_pb2.Reserved
    accepted: prefill_pb2.PrefillAccepted
    first_token: prefill_pb2.FirstToken
    shipped: prefill_pb2.Shipped
    completed: decode_pb2.Completed

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []


def target_of(reserved: decode_pb2.Reserved) -> prefill_pb2.HandoffTarget:
    return prefill_pb2.HandoffTarget(
        ticket=reserved.ticket,
        kv_endpoint=reserved.kv_endpoint,
        cached_tokens=reserved.cached_tokens,
        layout=reserved.layout,
    )


async def error_of(call: Any) -> PageferryError:
    """How a call ended that did not end well; reads it to its end."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            code = await call.code()
    except TimeoutError:
        raise AssertionError("the call does not end") from None
    assert code is not grpc.StatusCode.OK
    metadata = [await part() for part in (call.initial_metadata, call.trailing_metadata)]
    return from_rpc_error(grpc.aio.AioRpcError(code, *metadata, details=await call.details()))


async def drain(messages: Any) -> list[Any]:
    """All messages to the stream's end, which must be a good one."""
    return [message async for message in messages]


async def failure(messages: Any) -> PageferryError:
    """The error that ends a stream, after any messages."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await drain(messages)
    return from_rpc_error(caught.value)


class Gate:
    """Holds up a thread that passes it, from the `after`th time on, until it is opened."""

    def __init__(self, after: int = 0) -> None:
        self._left = after
        self._open = threading.Event()
        self._reached = threading.Event()

    def __call__(self, *_: object) -> None:
        if self._left > 0:
            self._left -= 1
            return
        self._reached.set()
        assert self._open.wait(PATIENCE_S)

    async def reached(self) -> None:
        async def is_reached() -> bool:
            return self._reached.is_set()

        await until(is_reached)

    def open(self) -> None:
        self._open.set()


async def until(ready: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition of another thread; it fails after `PATIENCE_S`."""
    async with asyncio.timeout(PATIENCE_S):
        while not await ready():  # noqa: ASYNC110 - the condition is another thread's
            await asyncio.sleep(0.001)
