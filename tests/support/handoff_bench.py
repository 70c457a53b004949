"""A prefill and a decode worker in one process: real pools, schedulers and gRPC, with the fake model."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from fake_engine import LAYOUT, VOCAB_SIZE, FakePages, FakeRunner, make_work
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pageferry.core.config import HandoffConfig, SchedulerConfig, ServerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.handoff import TicketTable
from pageferry.core.layout import PageLayout
from pageferry.core.limits import ModelLimits
from pageferry.core.pool import PagePool
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.decode_svc.service import DecodeService
from pageferry.decode_svc.step import DecodeStep
from pageferry.decode_svc.worker import DecodeWorker, Served
from pageferry.prefill_svc.service import PrefillService
from pageferry.prefill_svc.shipping import DecodeChannels
from pageferry.prefill_svc.step import PrefillStep
from pageferry.prefill_svc.worker import PrefillWorker
from pageferry.runtime.channels import open_channel
from pageferry.runtime.convert import work_to_proto
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.push import PushParts
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.work_calls import PastSpans
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.v1 import decode_pb2, decode_pb2_grpc, page_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2

PATIENCE_S = 10.0


@dataclass
class Settings:
    """What a test may change."""

    num_pages: int = 64
    layout: PageLayout = LAYOUT
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(chunk_tokens=8, local_chunk_tokens=8, headroom_pages=0)
    )
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    max_model_tokens: int = 100_000
    clock: Callable[[], float] = time.monotonic


class Side:
    """What both workers of the bench have."""

    step: PrefillStep | DecodeStep
    worker: PrefillWorker | DecodeWorker

    def __init__(self, settings: Settings, exporter: InMemorySpanExporter) -> None:
        self.settings = settings
        self.pool = PagePool(settings.num_pages)
        self.pages = FakePages(settings.layout, settings.num_pages)
        self.runner = FakeRunner(self.pages)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        self.tracer = provider.get_tracer("bench")
        self.executor = ThreadPoolExecutor(1)
        self.server = GrpcServer(ServerConfig(), self.tracer)
        self.limits = ModelLimits(VOCAB_SIZE, settings.max_model_tokens)
        hub = WorkerHub(b"i" * 16, worker_pb2.Snapshot, self.server.drain)
        self.publisher = Publisher(hub, Metrics())
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port = await self.server.start()
        self.worker.start()

    async def stop(self) -> None:
        await self.server.__aexit__(None, None, None)
        if isinstance(self.worker, PrefillWorker):
            await self.worker.stop()
        await self.worker.engine.stop()
        self.executor.shutdown()

    async def is_idle(self) -> bool:
        """IDLE-CHECK, on the engine's thread."""

        def check() -> bool:
            self.pool.check_integrity()
            load = self.step.load()
            counts = (load.waiting, load.running, load.tickets, load.pages_reserved, load.pages_resident)
            return self.pool.num_available == self.pool.num_pages and counts == (0, 0, 0, 0, 0)

        return await self.worker.engine.call(check)

    async def on_engine(self, command: Callable[[], Any]) -> Any:
        return await self.worker.engine.call(command)


class PrefillSide(Side):
    def __init__(self, settings: Settings, exporter: InMemorySpanExporter) -> None:
        super().__init__(settings, exporter)
        scheduler = PrefillScheduler(settings.scheduler, self.pool, settings.layout)
        self.step = PrefillStep(scheduler, self.pool, self.runner, settings.layout, settings.clock)
        parts = PushParts(self.pages, self.executor, settings.handoff, self.tracer)
        channels = DecodeChannels(lambda endpoint: open_channel(endpoint, self.tracer))
        self.worker = PrefillWorker(self.step, self.limits, parts, channels, self.publisher, settings.clock)
        register = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        self.server.add(register, PrefillService(self.worker), "pageferry.v1.PrefillService")


class DecodeSide(Side):
    def __init__(self, settings: Settings, exporter: InMemorySpanExporter) -> None:
        super().__init__(settings, exporter)
        scheduler = DecodeScheduler(settings.scheduler, self.pool, settings.layout)
        self.tickets = TicketTable(b"i" * 16, settings.handoff.lease_ms / 1000, settings.layout)
        self.step = DecodeStep(scheduler, self.pool, self.tickets, self.runner, settings.layout, settings.clock)
        self.service = DecodeService()
        self.server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, self.service, "pageferry.v1.DecodeService")
        self.server.add(page_pb2_grpc.add_PageServiceServicer_to_server, self.service, "pageferry.v1.PageService")

    async def start(self) -> None:
        self.port = await self.server.start()
        settings = self.settings
        served = Served(self.limits, settings.layout, self.address, settings.handoff.lease_ms)
        spans = PastSpans(self.tracer, settings.clock)
        self.worker = DecodeWorker(self.step, served, spans, self.publisher, settings.clock)
        self.service.attach(self.worker, self.pages, self.executor)
        self.worker.start()


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
        self, request_id: str, prompt: Iterable[int], reserved: decode_pb2.Reserved | None = None, **fields: Any
    ) -> Any:
        timeout = fields.pop("timeout", None)
        request = prefill_pb2.PrefillRequest(work=work_to_proto(make_work(request_id, prompt, **fields)))
        if reserved is not None:
            request.target.CopyFrom(target_of(reserved))
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


async def until(ready: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition of another thread; it fails after `PATIENCE_S`."""
    async with asyncio.timeout(PATIENCE_S):
        while not await ready():  # noqa: ASYNC110 - the condition is another thread's
            await asyncio.sleep(0.001)
