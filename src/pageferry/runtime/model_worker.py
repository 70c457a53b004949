"""What both kinds of worker do with a model: load it, join it to their calls, warm it up, say what they serve."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from pageferry.core.config import Config
from pageferry.core.layout import PageLayout, PageSink, PageSource
from pageferry.core.limits import ModelLimits
from pageferry.core.model_config import ModelConfig
from pageferry.core.plan import Runner
from pageferry.core.pool import PagePool
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.logs import log
from pageferry.runtime.process import run_service
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.work_calls import WorkCalls, loading
from pageferry.runtime.worker_process import WorkerParts, in_background, serve_worker
from pageferry.v1.worker_pb2 import Snapshot, WorkerRole


class PageStore(PageSource, PageSink, Protocol):
    """A pool's bytes."""


class LoadedEngine(Protocol):
    """A loaded model with its pool, as the engine gives it."""

    @property
    def layout(self) -> PageLayout: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def runner(self) -> Runner: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def pages(self) -> PageStore: ...

    @property
    def memory_report(self) -> dict[str, int]: ...

    def warm_up(self) -> None: ...


Worker = TypeVar("Worker", bound=WorkCalls[Any, Any])


class ModelMain(ABC, Generic[Worker]):
    """One kind of worker's process, `name`; its services refuse calls until `ready` is set."""

    name: str
    role: WorkerRole

    def __init__(self) -> None:
        self.ready: Worker | None = None
        self._loaded: Worker | None = None
        self._snapshot = Snapshot()
        self._publisher: Publisher | None = None

    @property
    def worker(self) -> Worker:
        """UnavailableError until the model is there."""
        if self.ready is None:
            raise loading()
        return self.ready

    @abstractmethod
    def register(self, server: GrpcServer) -> None: ...

    @abstractmethod
    def load_engine(self, config: Config, progress: Callable[[str], None]) -> LoadedEngine:
        """Blocks; on a thread of its own."""

    @abstractmethod
    def join(self, engine: LoadedEngine, pool: PagePool, limits: ModelLimits, parts: WorkerParts) -> Worker:
        """The worker, not started yet."""

    @abstractmethod
    def chunk_tokens(self, config: Config) -> int:
        """Most prompt tokens of one step."""

    async def load(self, parts: WorkerParts) -> EngineThread[Any]:
        config = parts.config
        engine = await in_background(lambda: self.load_engine(config, lambda text: log("loading", progress=text)))
        log("memory", pages=engine.num_pages, bytes=engine.memory_report)
        limits = ModelLimits(engine.model_config.vocab_size, engine.model_config.max_positions)
        self._loaded = worker = self.join(engine, PagePool(engine.num_pages), limits, parts)
        worker.start()
        log("loading", progress="warming up")
        await worker.engine.call(engine.warm_up)
        self._snapshot = Snapshot(
            role=self.role,
            layout=layout_to_proto(engine.layout),
            model=engine.model_config.name,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_tokens=limits.max_model_tokens,
            chunk_tokens=self.chunk_tokens(config),
        )
        self.ready, self._publisher = worker, parts.publisher
        return worker.engine

    def snapshot(self) -> Snapshot:
        if self._publisher is None:
            raise loading()
        self._snapshot.load.CopyFrom(self._publisher.load)
        return self._snapshot

    async def close(self) -> None:
        if self._loaded is not None:
            await self._loaded.stop()

    @classmethod
    def run(cls) -> int:
        """The process's main function; its exit code."""

        async def main(config: Config, stop: asyncio.Event) -> int:
            return await serve_worker(config, stop, cls())

        return run_service(main, name=cls.name)
