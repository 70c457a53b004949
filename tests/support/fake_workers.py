"""Workers that replay a list of tokens instead of running a model, behind real gRPC servers, and a router over them.

A prefill worker hands over to a decode worker inside the process: its `commit` stands for the push. What a test wants
to go wrong is an attribute: a gate to wait at, or an error to raise.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Self

from answer import Answer
from links import hold_port
from opentelemetry.context import Context
from opentelemetry.trace import Tracer
from spans import SpanLog

from pageferry.core.config import Config, RouterConfig, ServerConfig
from pageferry.core.errors import PageferryError, UnavailableError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group
from pageferry.core.layout import CacheLayout
from pageferry.core.model_files import load_config_of, resolve_model
from pageferry.router.fleet import Fleet
from pageferry.router.frontend import Frontend
from pageferry.router.metrics import RouterMetrics
from pageferry.router.states import num_free_slots
from pageferry.router.telemetry import Telemetry
from pageferry.router.workers import Role
from pageferry.runtime.channels import open_channel
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.text.tokenizer import load_tokenizer
from pageferry.v1 import decode_pb2, inference_pb2 as pb, prefill_pb2, types_pb2 as types, worker_pb2
from pageferry.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from pageferry.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from pageferry.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

LAYOUT = CacheLayout(
    "f" * 32, PageFormat.parse("int8"), page_size=16, num_kv_heads=2, head_dim=16, groups=(full_group(2),)
)
MODEL = "tiny"
TOKENS = [*range(100, 140)]  # none special, none a stop
PAGE_BYTES = 1000  # as the fakes report it


@dataclass
class Script:
    """What the model would say, whatever the prompt: the token at each position of the output.

    `others` is what it would say as other choices than the first, which else say the same.
    """

    token_ids: Sequence[int]
    others: Mapping[int, Sequence[int]] = field(default_factory=dict)
    logprobs: Mapping[int, float] = field(default_factory=dict)  # of each token of a choice, where asked for
    prompt_logprobs: types.PromptLogprobs | None = None  # where asked for
    hypotheses: Sequence[types.Hypothesis] = ()  # of a beam search

    def of(self, work: types.WorkItem) -> "Script":
        """What it says to that."""
        return replace(self, token_ids=self.others[work.choice]) if work.choice in self.others else self

    def tell(self, position: int, work: types.WorkItem) -> types.GeneratedToken:
        """The token, with its log-probability where that was asked for."""
        token = self.token(position)
        if work.sampling.HasField("logprobs") and work.choice in self.logprobs:
            token.logprobs.sampled.token_id = token.token_id
            token.logprobs.sampled.logprob = self.logprobs[work.choice]
        return token

    def tell_prompt(self, work: types.WorkItem) -> types.PromptLogprobs | None:
        return self.prompt_logprobs if work.sampling.HasField("prompt_logprobs") else None

    def token(self, position: int) -> types.GeneratedToken:
        return types.GeneratedToken(position=position, token_id=self.token_ids[position])

    def reason(self, position: int, stop: types.StopConditions) -> types.FinishReason:
        """Why the token at the position ends the generation; UNSPECIFIED where it does not."""
        if position + 1 >= stop.min_tokens and self.token_ids[position] in stop.stop_token_ids:
            return types.FINISH_REASON_STOP
        return types.FINISH_REASON_LENGTH if position + 1 == stop.max_tokens else types.FINISH_REASON_UNSPECIFIED


class FakeWorker:
    """What both kinds share: the load that the router is told, and what was asked of them."""

    def __init__(self, script: Script, role: worker_pb2.WorkerRole, layout: CacheLayout = LAYOUT) -> None:
        self.script = script
        self.layout = layout
        self.snapshot = worker_pb2.Snapshot(
            role=role,
            model=MODEL,
            layout=layout_to_proto(layout),
            max_num_seqs=8,
            max_model_tokens=4096,
            chunk_tokens=256,
            load=pb.WorkerLoad(pages_total=100, pages_free=100),
        )
        if len(layout.groups) + layout.format.has_tails > 1:  # else it is as a worker that knows of no groups
            pools = [pb.PoolLoad(group=group, pages_total=100, pages_free=100) for group in range(len(layout.groups))]
            tails = [pb.PoolLoad(pages_total=100, pages_free=100)] if layout.format.has_tails else []
            self.snapshot.load.pools.extend([*pools, *tails])
        self.host, self.address = "127.0.0.1", ""
        self.works: list[types.WorkItem] = []
        self.num_live = 0
        self.num_cancelled = 0
        self.ended = asyncio.Event()
        self.awake = asyncio.Event()  # not set: it says nothing, as one that is frozen or out of reach
        self.awake.set()
        self.restart()

    def restart(self) -> None:
        """Be another process, as far as watchers can tell; watches that run go on as the old one."""
        self.hub = WorkerHub(os.urandom(16), lambda: self.snapshot)
        self.publish()

    def publish(self, **changes: Any) -> None:
        """Change fields of the load and tell the watchers."""
        for name, value in changes.items():
            setattr(self.snapshot.load, name, value)
        load = pb.WorkerLoad()
        load.CopyFrom(self.snapshot.load)
        self.hub.publish_load(load)

    async def wait_idle(self) -> None:
        """Until no call is live."""
        async with asyncio.timeout(60):
            while self.num_live:
                self.ended.clear()
                await self.ended.wait()

    async def _tracked(self, work: types.WorkItem, events: AsyncIterator[Any]) -> AsyncIterator[Any]:
        self.works.append(work)
        self.num_live += 1
        try:
            async with aclosing(events):
                async for event in events:
                    await self.awake.wait()
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_live -= 1
            self.ended.set()
            self.publish()


class FakePrefill(FakeWorker, PrefillServiceServicer):
    def __init__(self, script: Script, rig: "Rig", layout: CacheLayout = LAYOUT) -> None:
        super().__init__(script, worker_pb2.WORKER_ROLE_PREFILL, layout)
        self.rig = rig
        self.refusal: PageferryError | None = None  # instead of Accepted
        self.failure: PageferryError | None = None  # instead of the first token
        self.push_failure: PageferryError | None = None  # instead of the commit
        self.failure_after_commit: PageferryError | None = None  # instead of Shipped
        self.compute = asyncio.Event()  # the prompt's compute ends when it is set
        self.compute.set()
        self.push = asyncio.Event()  # the push ends when it is set
        self.push.set()
        self.accepted = asyncio.Event()

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        async for event in self._tracked(request.work, self._prefill(request)):
            yield event

    async def _prefill(self, request: prefill_pb2.PrefillRequest) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        work = request.work
        if self.refusal is not None:
            raise self.refusal
        yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted(cached_tokens=0))
        self.accepted.set()
        await self.compute.wait()
        if self.failure is not None:
            raise self.failure
        position, script = len(work.output_ids), self.script.of(work)
        first = prefill_pb2.FirstToken(
            token=None if work.HasField("beam") else script.tell(position, work),
            finish_reason=None if work.HasField("beam") else script.reason(position, work.stop),
            queue_ms=0.25,
            prefill_ms=0.5,
            prompt_logprobs=script.tell_prompt(work),
        )
        yield prefill_pb2.PrefillResponse(first_token=first)
        if not request.HasField("target") or first.finish_reason:
            return
        await self.push.wait()
        decode = self.rig.tickets[request.target.ticket]
        if self.push_failure is not None:
            decode.set_exception(UnavailableError("the hand-off broke off", reason="HANDOFF_BROKEN"))
            raise self.push_failure
        decode.set_result(first.token if first.HasField("token") else None)
        if self.failure_after_commit is not None:
            raise self.failure_after_commit
        pages = self.layout.num_pages(len(work.prompt_ids) + position) - request.target.cached_tokens // 16
        shipped = prefill_pb2.Shipped(pages=pages, bytes=pages * PAGE_BYTES, tail_ms=1.0, in_flight_ms=4.0)
        yield prefill_pb2.PrefillResponse(shipped=shipped)


class FakeDecode(FakeWorker, DecodeServiceServicer):
    def __init__(self, script: Script, rig: "Rig", layout: CacheLayout = LAYOUT) -> None:
        super().__init__(script, worker_pb2.WORKER_ROLE_DECODE, layout)
        self.rig = rig
        self.sources: list[decode_pb2.PromptSource] = []
        self.refusals: list[PageferryError] = []  # one each for the next calls
        self.admit = asyncio.Event()  # calls are reserved when it is set
        self.admit.set()
        self.fail_at: dict[int, PageferryError] = {}  # instead of the token at a position
        self.failing: set[int] | None = None  # the choices that `fail_at` is for; None: all
        self.pause_at: dict[int, asyncio.Event] = {}  # before the token at a position
        self.batch = 1  # tokens a message
        self.snapshot.subscriptions = rig.subscriptions
        self.feeds: dict[bytes, asyncio.Queue[decode_pb2.CallEvents | None]] = {}  # None ends one
        self.num_fed = 0  # events told in them
        self.feed = asyncio.Event()  # they are told when it is set
        self.feed.set()
        self.feed_failure: PageferryError | None = None  # then, instead

    async def Subscribe(self, request: decode_pb2.SubscribeRequest, context: Any) -> AsyncIterator[Any]:
        feed = self.feeds[request.subscription] = asyncio.Queue()
        try:
            yield decode_pb2.SubscribeResponse()
            while (events := await feed.get()) is not None:
                await self.feed.wait()
                await self.awake.wait()
                if self.feed_failure is not None:
                    raise self.feed_failure
                self.num_fed += 1
                yield decode_pb2.SubscribeResponse(calls=[events])
        finally:
            del self.feeds[request.subscription]

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        self.sources.append(request.source)
        feed = self.feeds.get(request.subscription)

        def tell(tokens: Sequence[types.GeneratedToken] = (), **end: Any) -> None:
            assert feed is not None
            feed.put_nowait(decode_pb2.CallEvents(call=request.call, tokens=tokens, **end))

        try:
            async for event in self._tracked(request.work, self._decode(request)):
                if event.HasField("reserved"):
                    event.reserved.subscribed = feed is not None
                if feed is None or event.HasField("reserved"):
                    yield event
                elif event.HasField("completed"):
                    tell(completed=event.completed)
                else:
                    prompt = event.tokens.prompt_logprobs if event.tokens.HasField("prompt_logprobs") else None
                    tell(event.tokens.tokens, prompt_logprobs=prompt)
        except PageferryError:
            if feed is not None:
                tell(failed=True)
            raise

    async def _decode(self, request: decode_pb2.DecodeRequest) -> AsyncIterator[decode_pb2.DecodeResponse]:
        work = request.work
        if self.refusals:
            raise self.refusals.pop(0)
        await self.admit.wait()
        position = len(work.output_ids)
        reserved = decode_pb2.Reserved(kv_endpoint=self.address, layout=layout_to_proto(self.layout), cached_pages=0)
        if request.source == decode_pb2.PROMPT_SOURCE_PUSHED:
            reserved.ticket = os.urandom(16)
            commit = self.rig.tickets[reserved.ticket] = asyncio.get_running_loop().create_future()
            yield decode_pb2.DecodeResponse(reserved=reserved)
            token = await commit
            assert (token is None) == work.HasField("beam")
            assert token is None or token.position == position
        else:
            yield decode_pb2.DecodeResponse(reserved=reserved)
        is_local = request.source == decode_pb2.PROMPT_SOURCE_LOCAL
        prompt = self.script.tell_prompt(work) if is_local else None
        async for event in self._generate(work, position):
            if prompt is not None and event.HasField("tokens"):
                event.tokens.prompt_logprobs.CopyFrom(prompt)
                prompt = None
            yield event

    async def _search(self) -> decode_pb2.DecodeResponse:
        if 0 in self.pause_at:
            await self.pause_at[0].wait()
        if 0 in self.fail_at:
            raise self.fail_at[0]
        hypotheses = self.script.hypotheses
        completed = decode_pb2.Completed(reason=hypotheses[0].reason, queue_ms=0.5, steps=9, hypotheses=hypotheses)
        return decode_pb2.DecodeResponse(completed=completed)

    async def _generate(self, work: types.WorkItem, position: int) -> AsyncIterator[decode_pb2.DecodeResponse]:
        if work.HasField("beam"):
            yield await self._search()
            return
        batch: list[types.GeneratedToken] = []
        script = self.script.of(work)
        reason = types.FINISH_REASON_UNSPECIFIED
        while reason == types.FINISH_REASON_UNSPECIFIED:
            if position in self.pause_at:
                await self.pause_at[position].wait()
            if position in self.fail_at and (self.failing is None or work.choice in self.failing):
                raise self.fail_at[position]
            if position == len(script.token_ids):
                await asyncio.Event().wait()  # the model thinks
            batch.append(script.tell(position, work))
            reason = script.reason(position, work.stop)
            position += 1
            if len(batch) == self.batch or reason:
                yield decode_pb2.DecodeResponse(tokens=decode_pb2.Tokens(tokens=batch))
                batch = []
        completed = decode_pb2.Completed(reason=reason, queue_ms=0.5, prefill_ms=1.0, steps=position, first_step_ms=2.0)
        yield decode_pb2.DecodeResponse(completed=completed)


@dataclass
class Rig:
    """A router over fake workers, in one event loop. Use as a context; it is ready inside."""

    model_dir: str
    script: Script
    num_prefill: int = 1
    num_decode: int = 1
    router: RouterConfig = field(default_factory=lambda: RouterConfig(local_prefill_tokens=0))
    config: Config = field(default_factory=Config)
    prefill_layout: CacheLayout = LAYOUT
    decode_hosts: Sequence[str] = ()  # of the first ones; the others' is 127.0.0.1
    decode_layouts: Sequence[CacheLayout] = ()  # of the first ones; the others' is LAYOUT
    wait_ready: bool = True
    clock: Callable[[], float] = time.monotonic
    silence_s: float = 60
    subscriptions: bool = True  # decode workers tell of all calls in one stream
    admin: tuple[str, ...] = ()  # credentials with which the status is asked for
    # What a resolver says of the names `prefill` and `decode`; set: workers are found there, and put there by tests.
    behind: dict[str, set[str] | OSError] | None = None
    at: dict[str, str] = field(default_factory=dict)  # the worker's own address, by the one that was looked up
    tickets: dict[bytes, Any] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        self.stack = AsyncExitStack()
        self.log = SpanLog()
        tracer = self.log.tracer()
        self.prefills = [FakePrefill(self.script, self, self.prefill_layout) for _ in range(self.num_prefill)]
        layouts = [*self.decode_layouts, *[LAYOUT] * self.num_decode][: self.num_decode]
        self.decodes = [FakeDecode(self.script, self, layout) for layout in layouts]
        for decode, host in zip(self.decodes, self.decode_hosts, strict=False):
            decode.host = host
        for prefill in self.prefills:
            await self.serve(prefill, tracer)
        for decode in self.decodes:
            await self.serve(decode, tracer)
        router = replace(
            self.router,
            prefill=tuple(prefill.address for prefill in self.prefills),
            decode=tuple(decode.address for decode in self.decodes),
        )
        if self.behind is not None:
            router = replace(router, prefill=("dns:///prefill:1",), decode=("dns:///decode:1",))
        files = resolve_model(self.model_dir)
        self.tokenizer = load_tokenizer(files)
        self.fleet = Fleet(
            router.prefill,
            router.decode,
            lambda address, _: open_channel(self.at.get(address, address), tracer),
            model=MODEL,
            silence_s=self.silence_s,
            discovery_s=0.01,
            resolve=self._resolve,
        )
        self.metrics = RouterMetrics()
        self.telemetry = Telemetry(tracer, self.metrics)
        self.frontend = Frontend(
            replace(self.config, router=router),
            replace(load_config_of(files), name=MODEL),
            self.tokenizer,
            self.fleet,
            self.telemetry,
            clock=self.clock,
        )
        self.stack.push_async_callback(self.fleet.close)
        self.fleet.start()
        if self.wait_ready:
            await self.until(lambda: all(worker.is_ready for worker in self.fleet.workers))
            if self.subscriptions:
                await eventually(lambda: all(worker.feed.is_live for worker in self.fleet.of(Role.DECODE)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    async def serve(self, worker: FakePrefill | FakeDecode, tracer: Tracer) -> GrpcServer:
        """Start a worker on its address, or on a free port where it has none."""
        if not worker.address:
            holder = hold_port(0, worker.host)  # also while it is away
            self.stack.callback(holder.close)
            worker.address = f"{worker.host}:{holder.getsockname()[1]}"
        port = int(worker.address.rpartition(":")[2])
        server = await self.stack.enter_async_context(GrpcServer(ServerConfig(host=worker.host, port=port), tracer))
        server.add(add_WorkerServiceServicer_to_server, _Watched(worker), "pageferry.v1.WorkerService")
        if isinstance(worker, FakePrefill):
            server.add(add_PrefillServiceServicer_to_server, worker, "pageferry.v1.PrefillService")
        else:
            server.add(add_DecodeServiceServicer_to_server, worker, "pageferry.v1.DecodeService")
        await server.start()
        worker.server = server
        return server

    async def _resolve(self, host: str) -> frozenset[str]:
        assert self.behind is not None
        found = self.behind[host]
        if isinstance(found, OSError):
            raise found
        return frozenset(found)

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds, looked at after each change that the router hears of."""
        changed = asyncio.Event()
        self.fleet.listeners.append(changed.set)
        try:
            async with asyncio.timeout(60):
                while not condition():
                    changed.clear()
                    await changed.wait()
        finally:
            self.fleet.listeners.remove(changed.set)

    async def generate(self, request: pb.GenerateRequest, **options: Any) -> "Answer":
        """Read one generation to its end."""
        async with aclosing(self.stream(request, **options)) as events:
            return await Answer().read(events)

    def stream(
        self,
        request: pb.GenerateRequest,
        *,
        deadline: float | None = None,
        parent: Context | None = None,
        authorization: Sequence[str] = (),
    ) -> Any:
        return self.frontend.generate(request, deadline=deadline, parent=parent, authorization=authorization)

    async def fill(self) -> None:
        """Take all slots of the decode workers."""
        for decode in self.decodes:
            decode.publish(running=decode.snapshot.max_num_seqs)
        await self.until(lambda: not any(map(num_free_slots, self.fleet.of(Role.DECODE))))

    def value(self, name: str, **labels: str) -> float:
        """A metric of the router's."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def check_idle(self) -> None:
        """Nothing is live anywhere, and nothing is counted against a worker."""
        for worker in (*self.prefills, *self.decodes):
            await worker.wait_idle()
        status = self.frontend.get_status(self.admin)
        assert (status.queued, status.running) == (0, 0)
        for worker in self.fleet.workers:
            assert not worker.view.uncounted
            assert worker.feed.num_calls == 0


Make = Callable[..., Rig]


async def eventually(condition: Callable[[], bool]) -> None:
    """Give way to others until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


class _Watched:
    """The WorkerService of a worker whose hub may be replaced."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Watch(self, request: worker_pb2.WatchRequest, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        async with aclosing(self._worker.hub.Watch(request, context)) as events:
            async for event in events:
                await self._worker.awake.wait()
                yield event
