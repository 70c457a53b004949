"""What the router offers, whoever asks: the gRPC service and the HTTP gateway both call this."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, format_trace_id, set_span_in_context

from pageferry.core.config import Config
from pageferry.core.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    PageferryError,
    UnauthenticatedError,
    UnavailableError,
)
from pageferry.core.model_config import ModelConfig
from pageferry.router.admission import Admission, Admitted
from pageferry.router.detokenize import TextStream
from pageferry.router.dispatch import Dispatcher
from pageferry.router.fleet import Fleet
from pageferry.router.policy import Settings
from pageferry.router.recovery import Retries
from pageferry.router.request import Generation, Serving
from pageferry.router.request_span import Timeline, attributes_at_start, describe_request, describe_usage, set_outcome
from pageferry.router.states import limits_of
from pageferry.router.tenant import Caller, Callers
from pageferry.router.tokenizer import Tokenizer
from pageferry.runtime.logs import log
from pageferry.runtime.metrics import RouterMetrics
from pageferry.runtime.rpc_spans import inject_context
from pageferry.runtime.trace_store import REQUEST_SPAN, TraceStore
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FinishReason, Usage

Events = AsyncGenerator[pb.GenerateResponse, None]
_EARLY_S = 0.02  # by which a call may be ended before what is taken for its deadline here


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where the router's observations go; `traces` is None where a collector keeps the spans."""

    tracer: Tracer
    metrics: RouterMetrics
    traces: TraceStore | None = None


class Frontend:
    """Serves one model over the workers of a fleet, which the caller starts and closes."""

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        tokenizer: Tokenizer,
        fleet: Fleet,
        telemetry: Telemetry,
        sampling_defaults: Mapping[str, float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sampling_defaults` are the model's own for what a request leaves out."""
        self.clock = clock  # seconds; deadlines are times of it
        self._fleet = fleet
        self._telemetry = telemetry
        self._model = model
        self._tokenizer = tokenizer
        self._own_limit = min(model.max_positions, config.engine.max_model_tokens or model.max_positions)
        settings = Settings(
            config.router.local_prefill_tokens, config.scheduler.headroom_pages, config.router.local_advantage
        )
        self._dispatcher = Dispatcher(
            fleet,
            settings,
            max_queue=config.router.max_queue,
            ageing_tokens_per_s=config.scheduler.ageing_tokens_per_s,
            clock=clock,
        )
        self._serving = Serving(
            fleet,
            self._dispatcher,
            telemetry.metrics,
            telemetry.tracer,
            clock,
            Retries(config.router.prefill_retries, config.router.resumes),
            config.router.max_unread_tokens,
        )
        self._callers = Callers(config.security.tenants_file, config.router.salt_key, clock)
        self._admission = Admission(
            model.name,
            tokenizer,
            vocab_size=model.vocab_size,
            config=config.router,
            limits=lambda: limits_of(fleet, self._own_limit),
            defaults=sampling_defaults or {},
            clock=clock,
        )
        self._live: dict[str, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self._fleet.is_ready and not self._draining

    @property
    def num_live(self) -> int:
        """Requests that are not over, of either server."""
        return len(self._live)

    async def generate(
        self,
        request: pb.GenerateRequest,
        *,
        deadline: float | None,
        parent: Context | None,
        authorization: Sequence[str] = (),
    ) -> Events:
        """Started, deltas, then Finished; or it raises a PageferryError.

        `deadline` is a time of `clock`; `parent` is the context of the caller's span; `authorization` are
        the caller's credentials as they came. The caller closes the generator (`contextlib.aclosing`): closing it
        early ends everything that was begun.
        """
        caller = self._caller(authorization)
        timeline = Timeline(self.clock())
        attributes = attributes_at_start(request, self._model.name) | {"pageferry.tenant": caller.tenant.name}
        span = self._telemetry.tracer.start_span(REQUEST_SPAN, parent or Context(), SpanKind.SERVER, attributes)
        outcome: FinishReason | PageferryError | None = None
        try:
            async with aclosing(self._generate(request, caller, deadline, timeline, span)) as events:
                async for event in events:
                    if event.HasField("finished"):
                        outcome = event.finished.reason
                    yield event
        except PageferryError as error:
            outcome = error
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = outcome or self._why_left(deadline)
            raise
        finally:
            self._end(span, timeline, outcome or InternalError("the request failed", reason="FAILED"))

    async def _generate(
        self,
        request: pb.GenerateRequest,
        caller: Caller,
        deadline: float | None,
        timeline: Timeline,
        span: Span,
    ) -> Events:
        if self._draining:
            raise UnavailableError("the router is draining", reason="DRAINING")
        caller.account.check_requests()
        self._dispatcher.check_room()
        admitted = await self._admission.admit(request, caller.tenant, caller.salt)
        timeline.parts.tokenize_ms = admitted.tokenize_s * 1000
        describe_request(span, admitted)
        if admitted.work_id in self._live:
            raise AlreadyExistsError(f"request_id {admitted.request_id!r} is live", reason="REQUEST_ID_LIVE")
        with caller.account.live(len(admitted.prompt_ids), admitted.num_pages):
            async with aclosing(self._run(admitted, deadline, timeline, span)) as events:
                async for event in events:
                    caller.account.spend(len(event.delta.tokens))
                    yield event

    async def _run(self, admitted: Admitted, deadline: float | None, timeline: Timeline, span: Span) -> Events:
        text = TextStream(
            self._tokenizer.pieces,
            admitted.stop_strings,
            skip_special=admitted.skip_special,
            min_tokens=admitted.stop.min_tokens,
        )
        generation = Generation(self._serving, admitted, text, timeline, set_span_in_context(span))
        started = self._started(admitted, span)
        self._live[admitted.work_id] = generation
        self._idle.clear()
        try:
            async with aclosing(generation.events(started, deadline)) as events:
                async for event in events:
                    yield event
        finally:
            del self._live[admitted.work_id]
            if not self._live:
                self._idle.set()
            self._count(span, generation.usage)

    def _started(self, admitted: Admitted, span: Span) -> pb.Started:
        return pb.Started(
            request_id=admitted.request_id,
            trace_id=format_trace_id(span.get_span_context().trace_id),
            model=self._model.name,
            prompt_tokens=len(admitted.prompt_ids),
            traceparent=inject_context(set_span_in_context(span)).get("traceparent", ""),
        )

    def _count(self, span: Span, usage: Usage) -> None:
        describe_usage(span, usage)
        self._telemetry.metrics.count_tokens(
            prompt=usage.prompt_tokens, cached=usage.cached_tokens, generated=usage.completion_tokens
        )

    def _end(self, span: Span, timeline: Timeline, outcome: FinishReason | PageferryError) -> None:
        now = self.clock()
        timeline.describe(span, now)
        span.set_attribute("gen_ai.server.request.duration", now - timeline.arrival)
        name = set_outcome(span, outcome)
        span.end()
        self._telemetry.metrics.count_request(name)
        if not isinstance(outcome, PageferryError):
            self._telemetry.metrics.request_s.observe(now - timeline.arrival)

    def _why_left(self, deadline: float | None) -> PageferryError:
        """Why the caller stopped listening, as far as can be told."""
        if deadline is not None and deadline - _EARLY_S <= self.clock():
            return DeadlineExceededError("the caller's deadline passed")
        return CancelledError("the caller went away")

    async def tokenize(self, request: pb.TokenizeRequest, authorization: Sequence[str] = ()) -> pb.TokenizeResponse:
        self._caller(authorization).account.count_request()
        ids = await self._admission.tokenize(request)
        return pb.TokenizeResponse(ids=ids, pieces=[self._tokenizer.piece(id_) for id_ in ids])

    def _caller(self, authorization: Sequence[str]) -> Caller:
        """Who calls. One who has no right to leaves no span: whoever has none could fill the trace store with them."""
        try:
            return self._callers.of(authorization)
        except UnauthenticatedError as error:
            self._telemetry.metrics.count_request(error.code.lower())
            raise

    def check_caller(self, authorization: Sequence[str]) -> None:
        """Raises UnauthenticatedError."""
        self._caller(authorization)

    def check_admin(self, authorization: Sequence[str], what: str) -> None:
        """Raises UnauthenticatedError, or PermissionDeniedError for a caller who is no admin."""
        self._caller(authorization).check_admin(what)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, which need not be whole characters; special ones are shown."""
        return self._tokenizer.pieces.bytes_of(token_id)

    def list_models(self, authorization: Sequence[str] = ()) -> pb.ListModelsResponse:
        self._caller(authorization)
        model = pb.Model(
            name=self._model.name,
            max_model_tokens=limits_of(self._fleet, self._own_limit).max_model_tokens,
            vocab_size=self._model.vocab_size,
            ready=self.ready,
        )
        return pb.ListModelsResponse(models=[model])

    def get_status(self, authorization: Sequence[str] = ()) -> pb.GetStatusResponse:
        self.check_admin(authorization, "the status")
        return pb.GetStatusResponse(
            workers=[worker.status() for worker in self._fleet.workers],
            queued=self._dispatcher.num_queued,
            running=self.num_live - self._dispatcher.num_queued,
        )

    def get_trace(self, request: pb.GetTraceRequest, authorization: Sequence[str] = ()) -> pb.GetTraceResponse:
        self.check_admin(authorization, "traces")
        traces = self._telemetry.traces
        if traces is None:
            raise NotFoundError("traces go to a collector; none is kept here", reason="NO_TRACE_STORE")
        trace_id = traces.find(request.id)
        return pb.GetTraceResponse(trace_id=trace_id, traces_data=traces.get(trace_id))

    async def drain(self, grace_s: float) -> int:
        """Take nothing more, let live requests end, and end what still lives after `grace_s` with UnavailableError.

        Returns how many were ended.
        """
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
            return 0
        except TimeoutError:
            pass
        overdue = list(self._live.values())
        error = UnavailableError(f"the router drains, and its grace of {grace_s:g} s is over", reason="DRAINED")
        for generation in overdue:
            generation.end(error)
        log("requests_ended_by_drain", requests=len(overdue))
        return len(overdue)
