"""A whole deployment in one simulation: its requests, what must hold of each, and that nothing is left."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import pytest
from answer import Answer
from fake_engine import golden

from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.work_calls import WorkCalls
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub
from sim.client_rpc import SimChannel
from sim.engine import SimEngine
from sim.loop import VirtualLoop
from sim.network import Kind, Network, Sight
from sim.nodes import Node, Settings
from sim.process import Life, Process, current_process
from sim.routers import RouterNode
from sim.server_rpc import SimServer
from sim.workers import DecodeNode, PrefillNode, WorkerNode

READY_S = 20.0
OK = "OK"
CANCELLED = "cancelled"


@dataclass(eq=False)
class Request:
    """One request of a client: what it asks, and what it got."""

    name: str
    prompt: list[int]
    num_tokens: int
    deadline_s: float | None = None
    read_s: float = 0.0  # pause after each message
    profile: str = ""
    num_answers: int = 1
    stop: str = ""
    answer: Answer = field(default_factory=Answer)
    outcome: str = ""  # OK, a status, or CANCELLED
    reason: str = ""
    began: float = 0.0
    first: float = 0.0  # when its first token had come
    ended: float = 0.0
    task: "asyncio.Task[None] | None" = None
    process: Process | None = None

    def check(self, settings: Settings, allowed: Iterable[str]) -> None:
        """One end; positions once and in order (see Answer); the right tokens, all of them if it went well."""
        assert self.outcome in allowed, f"{self.name}: {self.outcome} ({self.reason})"
        right = golden(self.prompt, self.num_tokens, settings.layout)
        got = self.answer.token_ids
        assert got == right[: len(got)], f"{self.name}: wrong tokens {got}, should be {right}"
        is_finished = self.answer.finished is not None
        assert is_finished == (self.outcome == OK) or self.outcome == CANCELLED, f"{self.name}: {self.outcome}"
        if self.outcome == OK:
            assert got == right, f"{self.name}: {len(got)} of {len(right)} tokens"
            assert self.answer.usage.completion_tokens == len(right)


class World:
    """Two prefill and two decode workers, a router and a client, unless said otherwise. Use `simulate`."""

    def __init__(
        self, seed: int, settings: Settings, *, prefill: int = 2, decode: int = 2, named: bool = False
    ) -> None:
        """`named`: the router looks workers up behind the names in `behind`, which the scenario may change."""
        self.seed = seed
        self.settings = settings
        self.rng = Random(seed)
        self.loop = VirtualLoop()
        self.network = Network(self.loop, self.rng)
        self.trace: list[str] = []
        self.requests: list[Request] = []
        self.network.observers.append(self._note)
        self._make = make = (self.loop, self.network, settings, self.rng)
        self.prefills = [PrefillNode(f"p{number}", *make) for number in range(1, prefill + 1)]
        self.decodes = [DecodeNode(f"d{number}", *make) for number in range(1, decode + 1)]
        self.behind = {"p": {node.name for node in self.prefills}, "d": {node.name for node in self.decodes}}
        self.lookups_fail = False
        self.router = RouterNode(
            "router",
            *make,
            prefill=["dns:///p:1"] if named else [node.address for node in self.prefills],
            decode=["dns:///d:1"] if named else [node.address for node in self.decodes],
            resolve=self._resolve,
        )
        self.clients: list[Process] = []
        self.num_pending = 0  # faults that are still to be undone

    @property
    def workers(self) -> list[WorkerNode]:
        return [*self.prefills, *self.decodes]

    @property
    def nodes(self) -> list[Node]:
        return [*self.workers, self.router]

    @property
    def names(self) -> list[str]:
        return [*(node.name for node in self.nodes), "client"]

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def say(self, text: str) -> None:
        self.trace.append(f"{self.loop.time():12.6f} {text}")

    def _note(self, sight: Sight) -> None:
        frame = sight.frame
        if frame.kind in (Kind.PING, Kind.PONG) or frame.method.endswith("/Watch"):
            return
        size = len(frame.payload) if isinstance(frame.payload, bytes) else frame.payload[0] if frame.payload else ""
        size = len(size) if isinstance(size, bytes) else size
        arrow = "=>" if sight.has_arrived else "->"
        method = frame.method.rpartition("/")[2]
        self.say(f"{sight.source} {arrow} {sight.target} {method} {frame.stream} {frame.kind.value} {size}")

    async def start(self) -> None:
        for node in self.nodes:
            node.start()
        await self.until(lambda: self.is_whole, READY_S, "all are ready")
        self._tasks = {node.name: node.task_names() for node in self.nodes}

    @property
    def is_whole(self) -> bool:
        """Whether all are up and the router knows all workers as ready."""
        has_started = all(node.is_up and node.is_started and not node.is_draining for node in self.nodes)
        return has_started and all(self.router.knows(worker) for worker in self.workers)

    def draining(self) -> list[str]:
        """Nodes that are about to end."""
        return [node.name for node in self.nodes if node.is_draining and node.process.life is not Life.DEAD]

    async def _resolve(self, host: str) -> frozenset[str]:
        if self.lookups_fail:
            raise OSError("no server answers")
        return frozenset(self.behind[host])

    def join(self, name: str) -> WorkerNode:
        """Start another worker, p… or d…, and let its kind's name lead to it."""
        node: WorkerNode = PrefillNode(name, *self._make) if name[0] == "p" else DecodeNode(name, *self._make)
        group: list[Any] = self.prefills if name[0] == "p" else self.decodes
        group.append(node)
        self.behind[name[0]].add(name)
        node.start()
        return node

    async def until_as_before(self, limit_s: float) -> None:
        """Until nothing is held, and all nodes run the tasks that they ran at the start, and no more."""
        await self.until_idle(limit_s)

        def changed() -> list[str]:
            return [
                f"{node.name}: {node.task_names()}"
                for node in self.nodes
                if node.task_names() != self._tasks[node.name]
            ]

        began = self.loop.time()
        while changed():
            assert self.loop.time() < began + limit_s, f"tasks are {changed()}, and were {self._tasks}"
            await asyncio.sleep(0.1)

    def live_requests(self) -> list[Request]:
        """Those whose clients wait for more."""
        live = [request for request in self.requests if not request.outcome]
        return [request for request in live if request.process is not None and request.process.life is not Life.DEAD]

    async def until(self, condition: Callable[[], bool], limit_s: float, what: str = "") -> None:
        began = self.loop.time()
        while not condition():
            assert not self.loop.problems, "\n".join(self.loop.problems)
            assert self.loop.time() < began + limit_s, f"not within {limit_s:g} s: {what or 'the condition'}"
            await asyncio.sleep(max(0.001, (self.loop.time() - began) / 50))

    def ask(self, request: Request) -> Request:
        """Send it, from a client of its own."""
        client = Process(self.loop, "client", self.network)
        self.clients.append(client)
        self.requests.append(request)
        request.process = client
        request.began = self.loop.time()
        request.task = client.spawn(self._ask(request, client), f"request {request.name}")
        request.task.add_done_callback(lambda task: self._note_unbegun(request, task))
        return request

    def _note_unbegun(self, request: Request, task: "asyncio.Task[None]") -> None:
        """A task that is cancelled before its first step never runs at all."""
        if task.cancelled() and not request.outcome:
            request.outcome, request.ended = CANCELLED, self.loop.time()

    async def _ask(self, request: Request, client: Process) -> None:
        channel = SimChannel(client, self.router.address)
        stub: Any = InferenceServiceStub(channel)
        message = pb.GenerateRequest(
            request_id=request.name,
            profile=request.profile,
            n=request.num_answers,
            token_ids=pb.TokenIds(ids=request.prompt),
            sampling=types.SamplingParams(temperature=0, seed=1),
            stop=types.StopConditions(max_tokens=request.num_tokens),
            stop_strings=[request.stop] if request.stop else (),
        )
        call = stub.Generate(message, timeout=request.deadline_s)
        try:
            async for response in call:
                request.answer.take(response)
                if request.answer.token_ids and not request.first:
                    request.first = self.loop.time()
                if request.read_s:
                    await asyncio.sleep(request.read_s)
            request.outcome = OK
        except grpc.aio.AioRpcError as error:
            request.outcome, request.reason = error.code().name, from_rpc_error(error).message
        except asyncio.CancelledError:
            request.outcome = CANCELLED
            call.cancel()
        finally:
            request.outcome = request.outcome or "broken"
            request.ended = self.loop.time()
            self.say(f"{request.name} ends: {request.outcome} {request.reason}")
            await channel.close()

    def leftovers(self) -> list[str]:
        """What is live on nodes that can act, although nothing should be."""
        live = [node for node in self.nodes if node.can_act]
        found = [f"{node.name}: {what}" for node in live for what in node.leftovers()]
        waiting = [request for request in self.live_requests() if request.process and request.process.life is Life.UP]
        return found + [f"request {request.name} is live" for request in waiting]

    async def until_idle(self, limit_s: float) -> None:
        began, pause_s = self.loop.time(), 0.01
        while left := self.leftovers():
            assert self.loop.time() < began + limit_s, f"left after {limit_s:g} s: {left}"
            await asyncio.sleep(pause_s)
            pause_s = max(0.01, (self.loop.time() - began) / 20)

    async def end(self) -> None:
        processes = [process for node in self.nodes for process in node.processes]
        for process in (*self.clients, *processes):
            await process.bury()


class _Errors(logging.Handler):
    """What was logged as our own fault."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "engine_stalled":  # as faults let it
            return
        self.lines.append(f"{record.getMessage()} {getattr(record, 'pageferry_fields', {})}")


def simulate(
    scenario: Callable[[World], Awaitable[Any]], seed: int = 0, settings: Settings | None = None, **options: Any
) -> World:
    """Run a scenario to its end; a failure shows the seed and the last events before it."""
    world = World(seed, settings or Settings(), **options)
    errors = _Errors()
    logger = logging.getLogger("pageferry")
    logger.addHandler(errors)

    async def main() -> None:
        try:
            await world.start()
            await scenario(world)
            assert not errors.lines, "\n".join(errors.lines)
            assert not world.loop.problems, world.loop.problems
        finally:
            await world.end()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpc.aio, "server", _server)
            patch.setattr(grpc.aio, "insecure_channel", _channel)
            patch.setattr(WorkCalls, "engine_type", SimEngine)
            world.loop.run(main())
    except BaseException as error:
        error.add_note(f"seed {seed}; the last events:\n" + "\n".join(world.trace[-60:]))
        raise
    finally:
        logger.removeHandler(errors)
        world.loop.close()
    return world


def _server(interceptors: Sequence[Any], **_: Any) -> SimServer:
    return SimServer(current_process(), interceptors)


def _channel(target: str, **_: Any) -> SimChannel:
    return SimChannel(current_process(), target)


def is_dead(node: Node) -> bool:
    return node.process.life is Life.DEAD
