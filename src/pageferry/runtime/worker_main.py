"""One kind of worker: what it serves, what it loads, and what it says of itself."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from opentelemetry.trace import Tracer

from pageferry.core.addresses import bracketed
from pageferry.core.config import Config, ServerConfig
from pageferry.core.errors import invalid
from pageferry.core.layout import CacheLayout
from pageferry.core.limits import ModelLimits
from pageferry.core.model_config import ModelConfig
from pageferry.core.page_io import DeviceClock, PageSink, PageSource
from pageferry.core.plan import Runner
from pageferry.core.pools import PagePools
from pageferry.runtime.background import in_background
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.logs import log
from pageferry.runtime.process import lasting_objects
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.tls import Certificates
from pageferry.runtime.work_calls import WorkCalls, loading
from pageferry.runtime.worker_metrics import WorkerFacts
from pageferry.v1.worker_pb2 import WORKER_ROLE_DECODE, Snapshot, WorkerRole

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


class PageStore(PageSource, PageSink, DeviceClock, Protocol):
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
        worker.device_name = engine.pages.device_name
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
        device = parts.config.engine.device
        facts = WorkerFacts(self.name, engine.model_config.name, device, engine.layout, scheduler.max_num_seqs)
        parts.publisher.metrics.describe(facts)
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


def _log_progress(text: str) -> None:
    log("loading", progress=text)


def advertised_host(server: ServerConfig) -> str:
    """The host that peers are told, as it stands before a port. InvalidArgumentError where only "all" is set."""
    host = server.advertised_host or server.host
    if host in _WILDCARDS:
        limit = f"must be the name or address by which peers reach this process, as server.host is {server.host}"
        raise invalid("server.advertised_host", server.advertised_host, limit)
    return bracketed(host)
