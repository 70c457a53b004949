"""`python -m pageferry.prefill_svc --config FILE`: computes prompts and ships their pages."""

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from pageferry.core.config import Config
from pageferry.core.limits import ModelLimits
from pageferry.core.pool import PagePool
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.prefill_svc.service import PrefillService
from pageferry.prefill_svc.shipping import DecodeChannels
from pageferry.prefill_svc.step import PrefillStep
from pageferry.prefill_svc.worker import PrefillWorker
from pageferry.runtime.channels import open_channel
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.logs import log
from pageferry.runtime.process import run_service
from pageferry.runtime.push import PushParts
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.work_calls import loading
from pageferry.runtime.worker_process import WorkerParts, in_background, serve_worker
from pageferry.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from pageferry.v1.worker_pb2 import WORKER_ROLE_PREFILL, Snapshot

if TYPE_CHECKING:
    from pageferry.engine.load import Engine


class PrefillMain:
    """A prefill worker's process."""

    name = "prefill"

    def __init__(self) -> None:
        self._service = PrefillService()
        self._snapshot: Snapshot | None = None
        self._publisher: Publisher | None = None
        self._worker: PrefillWorker | None = None

    def register(self, server: GrpcServer) -> None:
        server.add(add_PrefillServiceServicer_to_server, self._service, "pageferry.v1.PrefillService")

    async def load(self, parts: WorkerParts) -> EngineThread[Any]:
        config = parts.config
        engine = await in_background(partial(_load, config))
        log("memory", pages=engine.num_pages, bytes=engine.memory_report)
        pool = PagePool(engine.num_pages)
        scheduler = PrefillScheduler(config.scheduler, pool, engine.layout)
        step = PrefillStep(scheduler, pool, engine.runner, engine.layout, parts.clock)
        limits = ModelLimits(engine.model_config.vocab_size, engine.model_config.max_positions)
        push_parts = PushParts(engine.pages, parts.executor, config.handoff, parts.tracer)
        channels = DecodeChannels(lambda endpoint: open_channel(endpoint, parts.tracer))
        self._worker = PrefillWorker(step, limits, push_parts, channels, parts.publisher, parts.clock)
        self._worker.start()
        log("loading", progress="warming up")
        await self._worker.engine.call(engine.warm_up)
        self._publisher = parts.publisher
        self._snapshot = Snapshot(
            role=WORKER_ROLE_PREFILL,
            layout=layout_to_proto(engine.layout),
            model=engine.model_config.name,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_tokens=limits.max_model_tokens,
            chunk_tokens=config.scheduler.chunk_tokens,
        )
        self._service.worker = self._worker
        return self._worker.engine

    def snapshot(self) -> Snapshot:
        if self._snapshot is None or self._publisher is None:
            raise loading()
        self._snapshot.load.CopyFrom(self._publisher.load)
        return self._snapshot

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.stop()


def _load(config: Config) -> "Engine":
    # Imported here since that takes seconds, during which health is to be answered.
    from pageferry.engine.load import load_engine

    return load_engine(config.engine, config.scheduler, progress=lambda text: log("loading", progress=text))


async def main(config: Config, stop: asyncio.Event) -> int:
    """Serve until `stop`, then drain."""
    return await serve_worker(config, stop, PrefillMain())


if __name__ == "__main__":
    sys.exit(run_service(main, name="prefill"))
