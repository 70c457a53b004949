"""Simulated workers: their own code from `serve_worker` on, with an engine that is no thread."""

from dataclasses import replace
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer

from pageferry.core.config import HandoffConfig
from pageferry.core.pools import PagePools
from pageferry.decode_svc.__main__ import DecodeMain
from pageferry.prefill_svc.__main__ import PrefillMain
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.telemetry import Tracing
from pageferry.runtime.work_calls import WorkCalls
from pageferry.runtime.worker_process import WorkerParts, _serve
from sim.engine import SimEngine, SimExecutor, StepClock, make_model
from sim.nodes import Node
from sim.process import Process


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
                tracing = Tracing(tracer, TracerProvider(shutdown_on_exit=False, resource=Resource({})))
                await _serve(config, self.stop, self.main, self.server, tracing, executor, None)
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
