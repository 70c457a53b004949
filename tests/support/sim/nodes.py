"""The services of a simulation: their own code, put together as their main functions do."""

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fake_engine import LAYOUT
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.trace import Tracer
from tokenizers import Tokenizer as Encoder
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from pageferry.core.config import Config, HandoffConfig, RouterConfig, SchedulerConfig, ServerConfig
from pageferry.core.layout import CacheLayout
from pageferry.core.pools import PagePools
from pageferry.decode_svc.__main__ import DecodeMain
from pageferry.prefill_svc.__main__ import PrefillMain
from pageferry.router.__main__ import _run
from pageferry.router.chat_template import ChatTemplate
from pageferry.router.fleet import Fleet
from pageferry.router.frontend import Frontend, Telemetry
from pageferry.router.service import InferenceServicer
from pageferry.router.tokenizer import Tokenizer
from pageferry.runtime.channels import open_channel
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.metrics import RouterMetrics
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.work_calls import WorkCalls
from pageferry.runtime.worker_process import WorkerParts, _serve
from pageferry.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from sim.engine import MODEL, SimEngine, SimExecutor, StepClock, make_model
from sim.loop import Life, Process, VirtualLoop
from sim.network import Network
from sim.server_rpc import ServerCall

_RESOURCE = Resource({})  # of nothing that is looked up on threads


@dataclass(frozen=True)
class Settings:
    """What a simulation may have otherwise."""

    layout: CacheLayout = LAYOUT
    num_pages: int = 64
    num_tails: int = 16
    lease_ms: int = 10_000
    reservation_ms: int = 20_000
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(
            chunk_tokens=8, final_chunk_tokens=4, local_chunk_tokens=8, headroom_pages=0, max_num_seqs=4
        )
    )
    router: RouterConfig = field(default_factory=lambda: RouterConfig(local_prefill_tokens=0))


class SpanCount(SpanProcessor):
    """The spans of one process that are open, and those that were ended twice."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.ended_twice: list[str] = []

    def tracer(self) -> Tracer:
        provider = TracerProvider(shutdown_on_exit=False, resource=_RESOURCE)
        provider.add_span_processor(self)
        return provider.get_tracer("sim")

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        self.open[span.context.span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        if self.open.pop(span.context.span_id, None) is None:
            self.ended_twice.append(span.name)


class Node:
    """An address, and the process that is there now."""

    def __init__(self, name: str, loop: VirtualLoop, network: Network, settings: Settings, rng: Random) -> None:
        self.name = name
        self.address = f"{name}:1"
        self.loop = loop
        self.network = network
        self.settings = settings
        self.rng = rng
        self.config = Config(server=ServerConfig(host=name, port=1))
        self.processes: list[Process] = []  # the last one is now's

    @property
    def process(self) -> Process:
        return self.processes[-1]

    @property
    def is_up(self) -> bool:
        return self.process.life is Life.UP

    @property
    def can_act(self) -> bool:
        """Whether it can give back what it holds."""
        return self.is_up

    @property
    def is_draining(self) -> bool:
        return self.stop.is_set()

    def start(self) -> None:
        process = Process(self.loop, self.name, self.network)
        self.processes.append(process)
        self.spans = SpanCount()
        self.stop = asyncio.Event()
        self.forget()
        process.spawn(self._live(process), f"main {self.name}")

    def kill(self) -> None:
        """The process is no more; its kernel closes its connections."""
        if self.process.life is not Life.DEAD:
            self.network.servers.pop(self.address, None)
            self.process.kill()
            self.network.died(self.process)

    def drain(self) -> None:
        """As SIGTERM does: end in good order, then exit."""
        self.process.run(self.stop.set)

    def forget(self) -> None:
        """A new process begins."""

    async def _live(self, process: Process) -> None:
        await self._serve(process, self.spans.tracer())
        self.kill()

    async def _serve(self, process: Process, tracer: Tracer) -> None:
        raise NotImplementedError

    def live_calls(self) -> list[ServerCall]:
        door: Any = self.network.servers.get(self.address)
        return list(door.server.live) if door is not None else []

    def task_names(self) -> list[str]:
        """Of the tasks that are alive; one without a name has its function's."""
        names = (task.get_name() for task in self.process.tasks)
        functions = (task.get_coro().__qualname__ for task in self.process.tasks)
        return sorted(
            function if name.startswith("Task-") else name for name, function in zip(names, functions, strict=True)
        )

    def leftovers(self) -> list[str]:
        """What is live although it should not be."""
        spans = [f"span {name} is open" for name in self.spans.open.values()]
        return spans + [f"span {name} ended twice" for name in self.spans.ended_twice]


class SimPrefill(PrefillMain):
    """A prefill worker's process, but for the loading of a model on a thread of its own."""

    node: "WorkerNode"

    async def load(self, parts: WorkerParts) -> EngineThread[Any]:
        return await self.begin(self.node.model, replace(parts, clock=self.node.clock))


class SimDecode(DecodeMain):
    """The same of a decode worker."""

    node: "WorkerNode"

    async def load(self, parts: WorkerParts) -> EngineThread[Any]:
        return await self.begin(self.node.model, replace(parts, clock=self.node.clock))


class WorkerNode(Node):
    main_type: type[SimPrefill] | type[SimDecode]

    def forget(self) -> None:
        self.main = self.main_type()

    async def _serve(self, process: Process, tracer: Tracer) -> None:
        settings = self.settings
        self.clock = StepClock(process, self.rng)
        self.model = make_model(settings.layout, settings.num_pages, settings.num_tails, self.clock)
        self.main.node = self
        handoff = HandoffConfig(lease_ms=settings.lease_ms, reservation_ms=settings.reservation_ms, transport="inline")
        config = replace(self.config, scheduler=settings.scheduler, handoff=handoff)
        executor: Any = SimExecutor(process, self.rng)
        try:
            async with GrpcServer(config.server, tracer) as self.server:
                await _serve(config, self.stop, self.main, self.server, tracer, executor, None)
        finally:
            await self.main.close()

    @property
    def is_started(self) -> bool:
        return self.main.ready is not None

    @property
    def can_act(self) -> bool:
        return self.is_up and not (self.is_started and self.engine.is_frozen)

    @property
    def incarnation(self) -> bytes:
        return self.worker._publisher.hub._incarnation

    @property
    def worker(self) -> WorkCalls[Any, Any]:
        worker = self.main.ready
        assert worker is not None
        return worker  # type: ignore[no-any-return]

    @property
    def pools(self) -> PagePools:
        pools: PagePools = self.worker._step._reporter._pools  # type: ignore[attr-defined]
        return pools

    @property
    def engine(self) -> SimEngine:
        engine = self.worker.engine
        assert isinstance(engine, SimEngine)
        return engine

    def leftovers(self) -> list[str]:
        found = super().leftovers()
        if not self.is_started:
            return []
        worker, step = self.worker, self.worker._step  # type: ignore[attr-defined]
        self.pools.check_integrity()
        load = step.load()
        in_use = [pool.pages_total - pool.pages_free - pool.pages_cached for pool in (load, *load.pools)]
        counts = {
            "pages in use": sum(in_use),
            "sequences waiting": load.waiting,
            "sequences running": load.running,
            "tickets": load.tickets,
            "calls": worker.num_calls,
            "ids": len(worker._ids),
        }
        counts |= self._own_counts()
        lasting = ("pageferry.v1.WorkerService/Watch", "pageferry.v1.DecodeService/Subscribe")
        streams = [call.method for call in self.live_calls() if call.method not in lasting]
        return (
            found
            + [f"{number} {what}" for what, number in counts.items() if number]
            + [f"stream {method}" for method in streams]
        )

    def _own_counts(self) -> dict[str, int]:
        return {}


class PrefillNode(WorkerNode):
    main_type = SimPrefill

    def _own_counts(self) -> dict[str, int]:
        worker: Any = self.worker
        users = sum(num_users for _, num_users in worker._channels._channels.values())
        step = worker._step
        return {"shipments": len(worker._shipments), "channel users": users, "shipped sequences": len(step._shipped)}


class DecodeNode(WorkerNode):
    main_type = SimDecode

    def _own_counts(self) -> dict[str, int]:
        worker: Any = self.worker
        desk = worker._step.desk
        calls = sum(len(subscription.calls) for subscription in worker.subscriptions._live.values())
        return {
            "live tickets": desk.num_live + len(desk._tickets),
            "pushes": len(desk._pushes),
            "jobs": len(worker._step._jobs),
            "subscribed calls": calls,
        }


class RouterNode(Node):
    def __init__(self, *args: Any, prefill: list[str], decode: list[str]) -> None:
        super().__init__(*args)
        self._workers = (prefill, decode)

    async def _serve(self, process: Process, tracer: Tracer) -> None:
        prefill, decode = self._workers
        router = replace(self.settings.router, prefill=tuple(prefill), decode=tuple(decode))
        config = replace(self.config, router=router, scheduler=self.settings.scheduler)
        self.metrics = RouterMetrics()
        fleet = Fleet(prefill, decode, lambda address: open_channel(address, tracer), model=MODEL.name)
        telemetry = Telemetry(tracer, self.metrics)
        self.frontend = Frontend(config, MODEL, _tokenizer(), fleet, telemetry, clock=self.loop.time)
        async with GrpcServer(config.server, tracer) as self.server:
            name = "pageferry.v1.InferenceService"
            self.server.add(add_InferenceServiceServicer_to_server, InferenceServicer(self.frontend), name)
            await self.server.start()
            self.fleet = fleet
            self.is_started = True
            try:
                await _run(config, self.stop, self.server, self.frontend, fleet, _no_http)
            finally:
                await fleet.close()

    def knows(self, node: WorkerNode) -> bool:
        """Whether it sees the worker that is there now as ready, with its stream of tokens."""
        worker = next(worker for worker in self.fleet.workers if worker.address == node.address)
        is_fed = worker.feed.is_live or isinstance(node, PrefillNode)
        return worker.is_ready and worker.view.incarnation == node.incarnation and is_fed

    def forget(self) -> None:
        self.is_started = False

    def leftovers(self) -> list[str]:
        if not self.is_started:
            return []
        status = self.frontend.get_status()
        counts = {"queued": status.queued, "running": status.running, "live": len(self.frontend._live)}
        for worker in self.fleet.workers:
            counts[f"uncounted at {worker.address}"] = len(worker.view.uncounted)
            counts[f"fed calls at {worker.address}"] = worker.feed.num_calls
        counts["streams"] = len(self.live_calls())
        return super().leftovers() + [f"{number} {what}" for what, number in counts.items() if number]


def _tokenizer() -> Tokenizer:
    words = {f"w{number}.": number for number in range(MODEL.vocab_size)}
    encoder = Encoder(WordLevel(words, unk_token="w0."))
    encoder.decoder = ByteLevel()
    return Tokenizer(encoder, template=ChatTemplate(None, {}), eos_ids=(), bos_id=None)


async def _no_http(host: str, port: int, stop: asyncio.Event) -> None:
    raise AssertionError("no HTTP is simulated")
