"""What all services of a simulation have: an address, and the process that is there now."""

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fake_engine import LAYOUT
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.trace import Tracer

from pageferry.core.config import Config, RouterConfig, SchedulerConfig, ServerConfig
from pageferry.core.layout import CacheLayout
from sim.loop import VirtualLoop
from sim.network import Network
from sim.process import Life, Process
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
    """The spans of one process: those that are open, that have ended, and that were ended twice."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.ended: list[ReadableSpan] = []
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
        self.ended.append(span)


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
