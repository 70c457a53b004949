"""`python -m pageferry.prefill_svc --config FILE`: computes prompts and ships their pages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pageferry.core.config import Config
from pageferry.core.limits import ModelLimits
from pageferry.core.model_files import resolve_model
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.prefill_svc.shipping import DecodeChannels
from pageferry.prefill_svc.step import PrefillStep
from pageferry.prefill_svc.worker import PrefillWorker
from pageferry.runtime.channels import open_channel
from pageferry.runtime.page_transfer import PushParts
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.worker_main import LoadedEngine, WorkerMain, WorkerParts
from pageferry.runtime.worker_process import run_worker
from pageferry.text.grammar import Grammars
from pageferry.text.tokenizer import load_tokenizer
from pageferry.v1.prefill_pb2 import PrefillRequest
from pageferry.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from pageferry.v1.worker_pb2 import WORKER_ROLE_PREFILL


class PrefillMain(WorkerMain[PrefillWorker], PrefillServiceServicer):
    """A prefill worker's process, and its PrefillService."""

    name = "prefill"
    role = WORKER_ROLE_PREFILL

    def register(self, server: GrpcServer) -> None:
        server.add(add_PrefillServiceServicer_to_server, self, "pageferry.v1.PrefillService")

    async def Prefill(  # type: ignore[override]  # noqa: N802 - a coroutine that writes by itself
        self, request: PrefillRequest, context: Any
    ) -> None:
        await self.worker.prefill(request, context)

    def load_engine(self, config: Config, progress: Callable[[str], None]) -> LoadedEngine:
        # Imported here since that takes seconds, during which health is to be answered.
        from pageferry.engine.load import load_engine

        return load_engine(replace(config.engine, speculation="off"), config.scheduler, progress=progress)

    def join(self, engine: LoadedEngine, pools: PagePools, limits: ModelLimits, parts: WorkerParts) -> PrefillWorker:
        scheduler = PrefillScheduler(parts.config.scheduler, pools, engine.layout)
        traces_steps = parts.config.telemetry.trace_steps
        step = PrefillStep(scheduler, pools, engine.runner, parts.clock, traces_steps=traces_steps)
        push_parts = PushParts(
            engine.pages, parts.executor, parts.config.handoff, parts.tracer, clock=parts.clock, device=engine.pages
        )
        channels = DecodeChannels(lambda endpoint: open_channel(endpoint, parts.tracer, parts.certificates))
        worker = PrefillWorker(step, limits, push_parts, channels, parts.publisher, parts.clock)
        model = parts.config.engine.model
        worker.constraints = Grammars(lambda: load_tokenizer(resolve_model(model)), limits.vocab_size)
        return worker

    def chunk_tokens(self, config: Config) -> int:
        return config.scheduler.chunk_tokens


if __name__ == "__main__":
    run_worker(PrefillMain)
