"""The process of a worker: listens at once, loads its model, serves until it is told to stop, drains."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from opentelemetry.trace import Tracer

from pageferry.core.config import Config, ServerConfig
from pageferry.core.errors import InternalError, invalid
from pageferry.core.layout import CacheLayout
from pageferry.core.limits import ModelLimits
from pageferry.core.model_config import ModelConfig
from pageferry.core.page_io import PageSink, PageSource
from pageferry.core.plan import Runner
from pageferry.core.pools import PagePools
from pageferry.runtime.admin import ADMIN_SERVICE, Admin
from pageferry.runtime.background import in_background
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.health import keep_health_true
from pageferry.runtime.logs import log
from pageferry.runtime.malloc import keep_freed_memory
from pageferry.runtime.metrics import WorkerMetrics
from pageferry.runtime.process import ENGINE_OPTIONS, lasting_objects, run_service
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer, ServerSecurity
from pageferry.runtime.telemetry import configure_tracing
from pageferry.runtime.tls import Certificates
from pageferry.runtime.work_calls import WorkCalls, loading
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from pageferry.v1.worker_pb2 import WORKER_ROLE_DECODE, Snapshot, WorkerRole
from pageferry.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

INCARNATION_BYTES = 16
_FAILED_CALLS_S = 1.0  # for calls to take the news that the engine failed
_STOP_S = 5.0  # for the engine's thread to end its step, whose result nobody waits for any more
_WILDCARDS = ("0.0.0.0", "::", "[::]")
Worker = TypeVar("Worker", bound=WorkCalls[Any, Any])


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What the process gives its worker."""

    config: Config
    incarnation: bytes
    port: int  # that it listens on
    tracer: Tracer
    publisher: Publisher
    executor: ThreadPoolExecutor  # the one transfer thread
    certificates: Certificates | None = None
    clock: Callable[[], float] = time.monotonic


class PageStore(PageSource, PageSink, Protocol):
    """A pool's bytes."""


class LoadedEngine(Protocol):
    """A loaded model with its pools; what `engine.load` makes."""

    @property
    def layout(self) -> CacheLayout: ...
    @property
    def num_pages(self) -> tuple[int, ...]: ...  # of each cache group
    @property
    def num_tails(self) -> int: ...
    @property
    def runner(self) -> Runner: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def pages(self) -> PageStore: ...
    @property
    def memory_report(self) -> dict[str, int]: ...
    def warm_up(self) -> None: ...


class WorkerMain(ABC, Generic[Worker]):
    """One kind of worker; its services refuse calls until `ready` is set, when the model is there."""

    name: str
    role: WorkerRole

    def __init__(self) -> None:
        self.ready: Worker | None = None
        self._loaded: Worker | None = None
        self._snapshot = Snapshot()
        self._publisher: Publisher | None = None

    @abstractmethod
    def register(self, server: GrpcServer) -> None:
        """Add the services."""

    @abstractmethod
    def load_engine(self, config: Config, progress: Callable[[str], None]) -> LoadedEngine:
        """Blocks; on a thread of its own."""

    @abstractmethod
    def join(self, engine: LoadedEngine, pools: PagePools, limits: ModelLimits, parts: WorkerParts) -> Worker:
        """The worker, not started yet."""

    @abstractmethod
    def chunk_tokens(self, config: Config) -> int:
        """Most prompt tokens of one step."""

    @property
    def worker(self) -> Worker:
        """UnavailableError until the model is there."""
        if self.ready is None:
            raise loading()
        return self.ready

    async def load(self, parts: WorkerParts) -> EngineThread[Any]:
        """Load the model, and let the services serve it."""
        with lasting_objects():
            engine = await in_background(lambda: self.load_engine(parts.config, _log_progress))
        return await self.begin(engine, parts)

    async def begin(self, engine: LoadedEngine, parts: WorkerParts) -> EngineThread[Any]:
        """Warm up, and let the services serve."""
        scheduler = parts.config.scheduler
        log("memory", pages=engine.num_pages, tails=engine.num_tails, bytes=engine.memory_report)
        limits = ModelLimits(engine.model_config.vocab_size, engine.model_config.max_positions)
        pools = PagePools(engine.layout, engine.num_pages, engine.num_tails)
        self._loaded = worker = self.join(engine, pools, limits, parts)
        worker.start()
        _log_progress("warming up")
        await worker.engine.call(engine.warm_up)
        self._snapshot = Snapshot(
            role=self.role,
            layout=layout_to_proto(engine.layout),
            model=engine.model_config.name,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_tokens=limits.max_model_tokens,
            chunk_tokens=self.chunk_tokens(parts.config),
            subscriptions=self.role == WORKER_ROLE_DECODE,
        )
        self.ready, self._publisher = worker, parts.publisher
        return worker.engine

    def snapshot(self) -> Snapshot:
        """All but the cached hashes. Raises UnavailableError until `load` is done and the engine has told its load."""
        if self._publisher is None or self._publisher.hub.load is None:
            raise loading()
        self._snapshot.load.CopyFrom(self._publisher.hub.load)
        return self._snapshot

    async def drained(self) -> None:
        """End what the calls that bring work have left; the last of them is over."""

    async def close(self) -> None:
        """After the server's end, whether or not `load` is done; an engine that does not end is left behind."""
        if self._loaded is None:
            return
        try:
            async with asyncio.timeout(_STOP_S):
                await self._loaded.stop()
        except TimeoutError:
            log("engine_left_behind", level="warning", waited_s=_STOP_S)

    @classmethod
    def run(cls) -> NoReturn:
        """The process's main function."""
        run_service(
            lambda config, stop: serve_worker(config, stop, cls()), name=cls.name, engine_options=ENGINE_OPTIONS
        )


async def serve_worker(config: Config, stop: asyncio.Event, main: WorkerMain[Any]) -> int:
    """Run a worker until `stop`. Raises what keeps it from serving."""
    log("starting", config=config.describe())
    keep_freed_memory()
    certificates = Certificates.of(config.security)
    tracing = configure_tracing(f"pageferry-{main.name}", config.telemetry, certificates=certificates)
    executor = ThreadPoolExecutor(1, thread_name_prefix="transfer")
    try:
        security = ServerSecurity.of(config.security, certificates)
        async with GrpcServer(config.server, tracing.tracer, security) as server:
            await _serve(config, stop, main, server, tracing.tracer, executor, certificates)
    finally:
        await main.close()
        executor.shutdown(wait=False)
        tracing.shutdown()
    return 0


async def _serve(
    config: Config,
    stop: asyncio.Event,
    main: WorkerMain[Any],
    server: GrpcServer,
    tracer: Tracer,
    executor: ThreadPoolExecutor,
    certificates: Certificates | None,
) -> None:
    async def drain(grace_s: float | None) -> int:
        publisher.hub.publish_draining()
        num_ended = await server.drain(config.server.drain_grace_s if grace_s is None else grace_s)
        await main.drained()
        return num_ended

    incarnation = secrets.token_bytes(INCARNATION_BYTES)
    publisher = Publisher(WorkerHub(incarnation, main.snapshot), WorkerMetrics())
    publisher.metrics.follow_open_calls(lambda: server.num_open)
    server.add(add_WorkerServiceServicer_to_server, publisher.hub, "pageferry.v1.WorkerService")
    server.add(add_AdminServiceServicer_to_server, Admin(drain, lambda: server.num_open), ADMIN_SERVICE)
    main.register(server)
    port = await server.start()
    if config.telemetry.metrics_port:
        publisher.metrics.serve(config.server.host, config.telemetry.metrics_port, certificates)
    log("listening", host=config.server.host, port=port)
    parts = WorkerParts(config, incarnation, port, tracer, publisher, executor, certificates)
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(main.load(parts))
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return
    engine = await loading
    await server.set_serving(True)
    log("ready", host=config.server.host, port=port)
    watching = asyncio.create_task(keep_health_true(engine, server, publisher, config.server.stall_s))
    try:
        await _until_over(engine, stopping, drain)
    finally:
        watching.cancel()


async def _until_over(
    engine: EngineThread[Any], stopping: asyncio.Task[bool], drain: Callable[[float | None], Awaitable[int]]
) -> None:
    """Until it shall stop, then drain; raises what an engine failed with."""
    await asyncio.wait((engine.failed, stopping), return_when=asyncio.FIRST_COMPLETED)
    if engine.failed.done():
        failure = engine.failed.result()
        log("engine_failed", level="error", error=failure)
        await drain(_FAILED_CALLS_S)
        raise InternalError(f"the engine failed: {type(failure).__name__}: {failure}", reason="ENGINE_FAILED")
    await drain(None)


def _log_progress(text: str) -> None:
    log("loading", progress=text)


def advertised_host(server: ServerConfig) -> str:
    """The host that peers are told. Raises InvalidArgumentError where it isn't set and `host` says "all"."""
    if server.advertised_host:
        return server.advertised_host
    if server.host in _WILDCARDS:
        limit = f"must be the name or address by which peers reach this process, as server.host is {server.host}"
        raise invalid("server.advertised_host", server.advertised_host, limit)
    return server.host
