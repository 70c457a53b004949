"""The services of a simulation: their own code, put together as their main functions do."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fake_engine import LAYOUT
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.trace import Tracer
from sim.client_rpc import SimChannel
from sim.engine import MODEL, SimEngine, SimExecutor, SimModel, StepClock, make_model
from sim.loop import Life, Process, VirtualLoop
from sim.network import Network
from sim.server_rpc import SimServer
from tokenizers import Tokenizer as Encoder
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from pageferry.core.config import Config, HandoffConfig, RouterConfig, SchedulerConfig
from pageferry.core.layout import CacheLayout
from pageferry.core.pools import PagePools
from pageferry.decode_svc.__main__ import DecodeMain
from pageferry.prefill_svc import __main__ as prefill_main
from pageferry.router.chat_template import ChatTemplate
from pageferry.router.fleet import Fleet
from pageferry.router.frontend import Frontend, Telemetry
from pageferry.router.service import InferenceServicer
from pageferry.router.tokenizer import Tokenizer
from pageferry.runtime.channels import _TracedChannel
from pageferry.runtime.metrics import RouterMetrics, WorkerMetrics
from pageferry.runtime.reports import Publisher
from pageferry.runtime.work_calls import WorkCalls
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.runtime.worker_process import WorkerMain, WorkerParts
from pageferry.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from pageferry.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

DRAIN_GRACE_S = 30.0
_RESOURCE = Resource({})  # of nothing that is looked up on threads
_SERVER_DRAIN_S = 1.0


@dataclass(frozen=True)
class Settings:
    """What a simulation may have otherwise."""

    layout: CacheLayout = LAYOUT
    num_pages: int = 64
    num_tails: int = 16
    lease_ms: int = 10_000
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
        self.processes: list[Process] = []  # the last one is now's
        self.spans = SpanCount()
        self.server: SimServer | None = None
        self.is_draining = False
        self.is_started = False
        self.incarnation = b""

    @property
    def process(self) -> Process:
        return self.processes[-1]

    @property
    def is_up(self) -> bool:
        return self.process.life is Life.UP

    def start(self) -> None:
        process = Process(self.loop, self.name)
        self.processes.append(process)
        self.spans = SpanCount()
        self.is_draining = self.is_started = False
        process.spawn(self._begin(process), f"start {self.name}")

    def kill(self) -> None:
        """The process is no more; its kernel closes its connections."""
        if self.process.life is not Life.DEAD:
            self.network.servers.pop(self.address, None)
            self.process.kill()
            self.network.died(self.process)

    def drain(self) -> None:
        """As SIGTERM does: end in good order, then exit."""

        async def end() -> None:
            await self._drain()
            self.kill()

        self.is_draining = True
        self.process.spawn(end(), f"drain {self.name}")

    async def _begin(self, process: Process) -> None:
        await self._start(process, self.spans.tracer())
        self.is_started = True

    async def _start(self, process: Process, tracer: Tracer) -> None:
        raise NotImplementedError

    async def _drain(self) -> None:
        raise NotImplementedError

    def channel(self, process: Process, tracer: Tracer) -> Callable[[str], Any]:
        return lambda address: _TracedChannel(SimChannel(self.network, process, address), tracer)

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


class WorkerNode(Node):
    main_type: type[WorkerMain[Any]]

    async def _start(self, process: Process, tracer: Tracer) -> None:
        settings = self.settings
        self.clock = StepClock(process, self.rng)
        self.model = make_model(settings.layout, settings.num_pages, settings.num_tails, self.clock)
        self.main = self.main_type()
        self.incarnation = self.rng.randbytes(16)
        self.publisher = Publisher(WorkerHub(self.incarnation, self.main.snapshot, self._no_rpc), WorkerMetrics())
        self.server = server = SimServer(self.network, process, self.address, tracer)
        server.add(add_WorkerServiceServicer_to_server, self.publisher.hub, "pageferry.v1.WorkerService")
        self.main.register(server)  # type: ignore[arg-type]
        config = Config(
            scheduler=settings.scheduler, handoff=HandoffConfig(lease_ms=settings.lease_ms, transport="inline")
        )
        config = replace(config, server=replace(config.server, host=self.name, port=1))
        executor: Any = SimExecutor(process, self.rng)
        parts = WorkerParts(config, self.incarnation, 1, tracer, self.publisher, executor, self.clock)
        server.start()
        await self.main.begin(self.model, parts)

    async def _no_rpc(self, grace_s: float | None) -> int:
        raise NotImplementedError

    async def _drain(self) -> None:
        assert self.server is not None
        self.publisher.hub.publish_draining()
        await self.server.drain(DRAIN_GRACE_S)
        await self.main.drained()
        await self.server.stop()
        await self.main.close()

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
            return found
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
        assert self.server is not None
        lasting = ("pageferry.v1.WorkerService/Watch", "pageferry.v1.DecodeService/Subscribe")
        streams = [call.method for call in self.server.live if call.method not in lasting]
        return (
            found
            + [f"{number} {what}" for what, number in counts.items() if number]
            + [f"stream {method}" for method in streams]
        )

    def _own_counts(self) -> dict[str, int]:
        return {}


class PrefillNode(WorkerNode):
    main_type = prefill_main.PrefillMain

    async def _start(self, process: Process, tracer: Tracer) -> None:
        await super()._start(process, tracer)
        worker: Any = self.worker
        worker._channels._open_channel = self.channel(process, tracer)

    def _own_counts(self) -> dict[str, int]:
        worker: Any = self.worker
        users = sum(num_users for _, num_users in worker._channels._channels.values())
        step = worker._step
        return {"shipments": len(worker._shipments), "channel users": users, "shipped sequences": len(step._shipped)}


class DecodeNode(WorkerNode):
    main_type = DecodeMain

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

    async def _start(self, process: Process, tracer: Tracer) -> None:
        prefill, decode = self._workers
        router = replace(self.settings.router, prefill=tuple(prefill), decode=tuple(decode))
        config = Config(router=router, scheduler=self.settings.scheduler)
        self.metrics = RouterMetrics()
        self.fleet = Fleet(prefill, decode, self.channel(process, tracer), model=MODEL.name)
        telemetry = Telemetry(tracer, self.metrics)
        self.frontend = Frontend(config, MODEL, _tokenizer(), self.fleet, telemetry, clock=self.loop.time)
        self.server = SimServer(self.network, process, self.address, tracer)
        self.server.add(add_InferenceServiceServicer_to_server, InferenceServicer(self.frontend), "Inference")
        self.server.start()
        self.fleet.start()

    async def _drain(self) -> None:
        assert self.server is not None
        await self.server.set_serving(False)
        await self.frontend.drain(DRAIN_GRACE_S)
        await self.server.drain(_SERVER_DRAIN_S)
        await self.server.stop()
        with suppress(asyncio.CancelledError):
            await self.fleet.close()

    def knows(self, node: WorkerNode) -> bool:
        """Whether it sees the worker that is there now as ready, with its stream of tokens."""
        worker = next(worker for worker in self.fleet.workers if worker.address == node.address)
        is_fed = worker.feed.is_live or isinstance(node, PrefillNode)
        return worker.is_ready and worker.view.incarnation == node.incarnation and is_fed

    def leftovers(self) -> list[str]:
        if not self.is_started:
            return []
        status = self.frontend.get_status()
        counts = {"queued": status.queued, "running": status.running, "live": len(self.frontend._live)}
        for worker in self.fleet.workers:
            counts[f"uncounted at {worker.address}"] = len(worker.view.uncounted)
            counts[f"fed calls at {worker.address}"] = worker.feed.num_calls
        assert self.server is not None
        counts["streams"] = len(self.server.live)
        return super().leftovers() + [f"{number} {what}" for what, number in counts.items() if number]


def _tokenizer() -> Tokenizer:
    words = {f"w{number}.": number for number in range(MODEL.vocab_size)}
    encoder = Encoder(WordLevel(words, unk_token="w0."))
    encoder.decoder = ByteLevel()
    return Tokenizer(encoder, template=ChatTemplate(None, {}), eos_ids=(), bos_id=None)


__all__ = ["DecodeNode", "Node", "PrefillNode", "RouterNode", "Settings", "SimModel"]
