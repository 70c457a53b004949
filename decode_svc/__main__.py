"""`python -m pageferry.decode_svc --config FILE`: receives pages and generates by continuous batching."""

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from pageferry.core.config import Config
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.handoff import TicketTable
from pageferry.core.limits import ModelLimits
from pageferry.core.pool import PagePool
from pageferry.decode_svc.service import DecodeService
from pageferry.decode_svc.step import DecodeStep
from pageferry.decode_svc.worker import DecodeWorker, Served
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.logs import log
from pageferry.runtime.process import run_service
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.work_calls import PastSpans, loading
from pageferry.runtime.worker_process import WorkerParts, advertised_host, in_background, serve_worker
from pageferry.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from pageferry.v1.page_pb2_grpc import add_PageServiceServicer_to_server
from pageferry.v1.worker_pb2 import WORKER_ROLE_DECODE, Snapshot

if TYPE_CHECKING:
    from pageferry.engine.load import Engine


class DecodeMain:
    """A decode worker's process."""

    name = "decode"

    def __init__(self) -> None:
        self._service = DecodeService()
        self._snapshot: Snapshot | None = None
        self._publisher: Publisher | None = None
        self._worker: DecodeWorker | None = None

    def register(self, server: GrpcServer) -> None:
        server.add(add_DecodeServiceServicer_to_server, self._service, "pageferry.v1.DecodeService")
        server.add(add_PageServiceServicer_to_server, self._service, "pageferry.v1.PageService")

    async def load(self, parts: WorkerParts) -> EngineThread[Any]:
        config = parts.config
        kv_endpoint = f"{advertised_host(config.server)}:{parts.port}"
        engine = await in_background(partial(_load, config))
        log("memory", pages=engine.num_pages, bytes=engine.memory_report)
        pool = PagePool(engine.num_pages)
        scheduler = DecodeScheduler(config.scheduler, pool, engine.layout)
        tickets = TicketTable(parts.incarnation, config.handoff.lease_ms / 1000, engine.layout)
        step = DecodeStep(scheduler, pool, tickets, engine.runner, engine.layout, parts.clock)
        limits = ModelLimits(engine.model_config.vocab_size, engine.model_config.max_positions)
        served = Served(limits, engine.layout, kv_endpoint, config.handoff.lease_ms)
        spans = PastSpans(parts.tracer, parts.clock)
        self._worker = DecodeWorker(step, served, spans, parts.publisher, parts.clock)
        self._worker.start()
        log("loading", progress="warming up")
        await self._worker.engine.call(engine.warm_up)
        self._publisher = parts.publisher
        self._snapshot = Snapshot(
            role=WORKER_ROLE_DECODE,
            layout=layout_to_proto(engine.layout),
            model=engine.model_config.name,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_tokens=limits.max_model_tokens,
            chunk_tokens=config.scheduler.local_chunk_tokens,
        )
        self._service.attach(self._worker, engine.pages, parts.executor)
        return self._worker.engine

    def snapshot(self) -> Snapshot:
        if self._snapshot is None or self._publisher is None:
            raise loading()
        self._snapshot.load.CopyFrom(self._publisher.load)
        return self._snapshot

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.engine.stop()


def _load(config: Config) -> "Engine":
    # Imported here since that takes seconds, during which health is to be answered.
    from pageferry.engine.load import load_engine

    return load_engine(config.engine, config.scheduler, progress=lambda text: log("loading", progress=text))


async def main(config: Config, stop: asyncio.Event) -> int:
    """Serve until `stop`, then drain."""
    return await serve_worker(config, stop, DecodeMain())


if __name__ == "__main__":
    sys.exit(run_service(main, name="decode"))
