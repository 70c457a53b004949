"""`python -m pageferry.decode_svc --config FILE`: receives pages and generates by continuous batching."""

from collections.abc import Callable
from typing import Any

from pageferry.core.config import Config
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.drafts import DraftSource
from pageferry.core.handoff import TicketTable
from pageferry.core.limits import ModelLimits
from pageferry.core.model_files import resolve_model
from pageferry.core.pools import PagePools
from pageferry.core.speculation import Speculation
from pageferry.decode_svc.step import DecodeStep
from pageferry.decode_svc.worker import DecodeWorker, Served
from pageferry.runtime.carriers import INLINE
from pageferry.runtime.page_wire import add_page_service
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.staging import MAX_STAGED_BYTES
from pageferry.runtime.worker_main import LoadedEngine, WorkerMain, WorkerParts, advertised_host
from pageferry.runtime.worker_process import run_worker
from pageferry.text.grammar import Grammars
from pageferry.text.tokenizer import load_tokenizer
from pageferry.v1.decode_pb2 import DecodeRequest, SubscribeRequest
from pageferry.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from pageferry.v1.page_pb2_grpc import PageServiceServicer
from pageferry.v1.worker_pb2 import WORKER_ROLE_DECODE


class DecodeMain(WorkerMain[DecodeWorker], DecodeServiceServicer, PageServiceServicer):
    """A decode worker's process, and its DecodeService and PageService."""

    name = "decode"
    role = WORKER_ROLE_DECODE

    def register(self, server: GrpcServer) -> None:
        server.add(add_DecodeServiceServicer_to_server, self, "pageferry.v1.DecodeService")
        server.add(add_page_service, self, "pageferry.v1.PageService")

    async def Decode(  # type: ignore[override]  # noqa: N802 - a coroutine that writes by itself
        self, request: DecodeRequest, context: Any
    ) -> None:
        await self.worker.decode(request, context)

    async def Subscribe(  # type: ignore[override]  # noqa: N802 - a coroutine that writes by itself
        self, request: SubscribeRequest, context: Any
    ) -> None:
        await self.worker.subscriptions.serve(request, context)

    async def Push(  # type: ignore[override]  # noqa: N802 - a coroutine that reads and writes by itself
        self, request_iterator: Any, context: Any
    ) -> None:
        await self.worker.receiver.Push(request_iterator, context)

    async def drained(self) -> None:
        if self.ready is not None:
            await self.ready.subscriptions.close()

    async def load(self, parts: WorkerParts) -> Any:
        advertised_host(parts.config.server)  # before the model's loading: it may be what is missing
        return await super().load(parts)

    def load_engine(self, config: Config, progress: Callable[[str], None]) -> LoadedEngine:
        # Imported here since that takes seconds, during which health is to be answered.
        from pageferry.engine.load import load_engine

        staging_bytes = 0 if config.handoff.transport == INLINE else MAX_STAGED_BYTES
        return load_engine(config.engine, config.scheduler, progress=progress, staging_bytes=staging_bytes)

    def join(self, engine: LoadedEngine, pools: PagePools, limits: ModelLimits, parts: WorkerParts) -> DecodeWorker:
        handoff = parts.config.handoff
        reservation_s = handoff.reservation_ms / 1000
        tickets = TicketTable(parts.incarnation, handoff.lease_ms / 1000, engine.layout, reservation_s=reservation_s)
        engine_config = parts.config.engine
        speculation = Speculation(DraftSource.parse(engine_config.speculation), engine_config.max_draft_tokens)
        scheduler = DecodeScheduler(parts.config.scheduler, pools, engine.layout, speculation)
        traces_steps = parts.config.telemetry.trace_steps
        step = DecodeStep(scheduler, pools, tickets, engine.runner, parts.clock, traces_steps=traces_steps)
        server = parts.config.server
        kv_endpoint = f"{advertised_host(server)}:{server.advertised_port or parts.port}"
        served = Served(limits, engine.pages, parts.executor, kv_endpoint, handoff)
        worker = DecodeWorker(step, served, parts.tracer, parts.publisher, parts.clock)
        model = parts.config.engine.model
        worker.constraints = Grammars(lambda: load_tokenizer(resolve_model(model)), limits.vocab_size)
        return worker

    def chunk_tokens(self, config: Config) -> int:
        return config.scheduler.local_chunk_tokens


if __name__ == "__main__":
    run_worker(DecodeMain)
