"""One run of a script against a deployment of its own: load and faults, then what is left when all is over."""

import asyncio
import contextlib
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from cluster import Stub, busy
from services import Deployment, Service, Settings

from chaos.clients import Clients
from chaos.faults import Faults
from chaos.processes import Level, Watch
from chaos.prompts import compute_goldens
from chaos.script import Ask, Fault, Script
from chaos.tracing import TraceCheck
from chaos.trouble import Trouble
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

# Compute and pages are exact, so that answers are the same wherever they are made; pools are small, so that they run
# full; a peer's silence is found out soon.
SETTINGS: Settings = {
    "engine.compute_dtype": "fp32",
    "engine.page_format": "fp32",
    "engine.speculation": "lookup",
    "handoff.lease_ms": "2000",
    "engine.num_pages": "400",
    "scheduler.max_num_seqs": "12",
    "handoff.transport": "auto",
    "router.local_prefill_tokens": "17",
    "router.max_queue": "40",
    "server.drain_grace_s": "10",
    "telemetry.max_traces": "1024",
}
SAMPLE_S = 5.0
REPORT_S = 60.0
REST_S = 60.0  # until nothing is left in use
SPARE_FILES, SPARE_THREADS = 2, 4  # beyond the level at rest
MAX_PROBLEMS = 20
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
)
Say = Callable[[str], None]


@dataclass(slots=True)
class Verdict:
    """What was wrong, in the order in which it was seen."""

    problems: list[str] = field(default_factory=list)
    failed_at_s: float | None = None  # of the script, when the first was seen while it ran
    summary: str = ""


class Run:
    """Use `play` once."""

    def __init__(self, script: Script, deployment: Deployment, say: Say, *, stop_at_once: bool = False) -> None:
        """`stop_at_once`: the first problem ends it."""
        self.verdict = Verdict()
        self._script = script
        self._deployment = deployment
        self._say = say
        self._trouble = Trouble()
        self._faults = Faults(deployment, self._trouble, self.complain)
        self._watch = Watch(deployment.services)
        self._over = asyncio.Event()  # set by a problem that shall end the run
        self._stop_at_once = stop_at_once
        self._began = 0.0

    def complain(self, problem: str) -> None:
        """Something is wrong."""
        at_s = time.monotonic() - self._began if self._began else 0.0
        if not self.verdict.problems and 0 < at_s < self._script.seconds:
            self.verdict.failed_at_s = at_s
        if len(self.verdict.problems) < MAX_PROBLEMS:
            self.verdict.problems.append(problem)
            self._say(f"WRONG at {at_s:.1f} s: {problem}")
        if self._stop_at_once:
            self._over.set()

    async def play(self) -> Verdict:
        """The whole script, then the checks at rest. The deployment is ready before, and after."""
        async with contextlib.AsyncExitStack() as stack:
            stubs = [
                InferenceServiceStub(await stack.enter_async_context(_channel(self._deployment.address_of(router))))
                for router in self._deployment.routers
            ]
            self._say(f"computing undisturbed answers to {len(self._script.asks)} requests")
            goldens = await compute_goldens(stubs[0])
            assert not (left := await self._left_over(stubs)), left
            level = Level.of(self._deployment.services)
            self._clients = Clients(stubs, goldens, self._trouble, self.complain)
            self._traces = TraceCheck(stubs, self._worker_names(), self._trouble, self.complain)
            self._began = time.monotonic()
            watching = asyncio.create_task(self._keep_watching())
            try:
                await self._play_events()
            finally:
                watching.cancel()
            if not self._over.is_set():
                await self._check_rest(stubs, level)
        self.verdict.summary = self._line()
        return self.verdict

    async def _play_events(self) -> None:
        """Begin each event at its time; back when all that they began is over."""
        events: list[Ask | Fault] = sorted((*self._script.asks, *self._script.faults), key=lambda event: event.at_s)
        async with asyncio.TaskGroup() as tasks:
            for event in events:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, self._began + event.at_s - time.monotonic())):
                        await self._over.wait()
                if self._over.is_set():
                    return
                tasks.create_task(self._begin(event))

    async def _begin(self, event: Ask | Fault) -> None:
        if isinstance(event, Fault):
            await self._faults.befall(event)
        else:
            await self._traces.check(await self._clients.ask(event))

    async def _keep_watching(self) -> None:
        reported = time.monotonic()
        while True:
            self._watch.take()
            if time.monotonic() - reported >= REPORT_S:
                reported += REPORT_S
                self._say(f"{(time.monotonic() - self._began) / 60:.0f} min: {self._line()}; {self._watch.line()}")
            await asyncio.sleep(SAMPLE_S)

    async def _check_rest(self, stubs: Sequence[Stub], level: Level) -> None:
        """Nothing is in use any more, and no process holds more than before, or grew while it was watched."""
        for problem in await self._left_over(stubs, level):
            self.complain(f"at rest: {problem}")
        half = self._began + self._script.seconds / 2
        for problem in self._watch.problems(half):
            self.complain(problem)
        for growth in self._watch.growths(half):
            self._say(f"size: {growth}")

    async def _left_over(self, stubs: Sequence[Stub], level: Level | None = None) -> list[str]:
        """What is still in use after `REST_S`, in words; empty, and at once, when nothing is."""
        services = self._deployment.services
        end = time.monotonic() + REST_S
        while True:
            left = [f"router{n}: {what}" for n, stub in enumerate(stubs) for what in await _in_use(stub)]
            left += [what for service in services for what in await asyncio.to_thread(_open_calls, service)]
            if level is not None:
                left += level.above(services, files=SPARE_FILES, threads=SPARE_THREADS)
            if not left or time.monotonic() > end:
                return left
            await asyncio.sleep(0.2)

    def _worker_names(self) -> Mapping[str, str]:
        """The workers by the addresses that routers know."""
        return {
            self._deployment.address_of(service): f"{service.role}{number}"
            for group in (self._deployment.prefill, self._deployment.decode)
            for number, service in enumerate(group)
        }

    def _line(self) -> str:
        parts = {
            "requests": self._clients.outcomes,
            "faults": self._faults.counts,
            "traces": self._traces.outcomes,
        }
        counted = "; ".join(f"{what}: " + (_counts(counter) or "none") for what, counter in parts.items())
        return f"{counted}; {self._clients.num_tokens} tokens; slowest OK {self._clients.slowest_s:.1f} s"


def _counts(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counter.items()))


def _open_calls(service: Service) -> list[str]:
    """Those that a drain would wait for, in words; none where the process doesn't say."""
    port = service.settings.get("telemetry.metrics_port")
    if port is None:
        return []
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            (number,) = re.findall(r"^pageferry_open_calls (\S+)$", answer.read().decode(), re.MULTILINE)
    except OSError as error:
        return [f"{service.name}: no metrics: {error}"]
    return [f"{service.name}: {float(number):g} open calls"] if float(number) else []


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


async def _in_use(stub: Stub) -> list[str]:
    try:
        return busy(await stub.GetStatus(pb.GetStatusRequest(), timeout=5))
    except grpc.aio.AioRpcError as error:
        return [f"no status: {error.code().name}"]
