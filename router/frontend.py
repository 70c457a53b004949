"""What the router offers, whoever asks: the gRPC service and the HTTP gateway both call this."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import MappingProxyType

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.util.types import AttributeValue

from pageferry.core.config import Config
from pageferry.core.errors import (
    AlreadyExistsError,
    InternalError,
    NotFoundError,
    PageferryError,
    UnauthenticatedError,
)
from pageferry.core.model_config import ModelConfig
from pageferry.router.admission import MAX_REQUEST_ID_CHARACTERS, Admission, Admitted
from pageferry.router.choices import Choices
from pageferry.router.dispatch import Dispatcher
from pageferry.router.failures import why_left
from pageferry.router.fleet import Fleet
from pageferry.router.live import LiveRequests
from pageferry.router.pick_metrics import PickMetrics
from pageferry.router.picks import Picks
from pageferry.router.profiles import Profiles
from pageferry.router.request_span import attributes_at_start, describe_request, started_of
from pageferry.router.serving import Serving
from pageferry.router.states import limits_of
from pageferry.router.telemetry import Telemetry
from pageferry.router.tenant import Caller, Callers
from pageferry.router.timeline import Timeline
from pageferry.runtime.trace_store import REQUEST_SPAN
from pageferry.text.tokenizer import Tokenizer
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FinishReason

Events = AsyncGenerator[pb.GenerateResponse, None]


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
        own_limit = min(model.max_positions, config.engine.max_model_tokens or model.max_positions)
        self._limits = partial(limits_of, fleet, own_limit)
        profiles = Profiles(config.router.profiles_file, telemetry.metrics, clock)
        self._dispatcher = Dispatcher(fleet, profiles, config, clock)
        telemetry.metrics.follow(lambda: fleet.workers, self._dispatcher.profile_status)
        self._serving = Serving(fleet, self._dispatcher, telemetry, clock, config.router)
        self._callers = Callers(config.security.tenants_file, config.router.salt_key, clock)
        self._admission = Admission(
            model.name,
            tokenizer,
            vocab_size=model.vocab_size,
            config=config.router,
            limits=self._limits,
            defaults=sampling_defaults or {},
            profiles=profiles,
            clock=clock,
        )
        self._live = LiveRequests()

    def picks(self) -> Picks:
        """The choice of workers alone, for gateways; made once."""
        metrics = PickMetrics(self._telemetry.metrics.registry)
        return Picks(self._serving, self._admission, self.check_caller, self._live, metrics)

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self._fleet.is_ready and not self._live.draining

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
        protocol: Mapping[str, AttributeValue] = MappingProxyType({}),
    ) -> Events:
        """Started, deltas, then Finished; or it raises a PageferryError.

        `deadline` is a time of `clock`; `parent` is the context of the caller's span; `authorization` are credentials
        as they came; `protocol` says on the request's span how it came. The caller closes the generator
        (`contextlib.aclosing`): that ends everything that was begun.
        """
        caller = self.check_caller(authorization)
        timeline = Timeline(self.clock(), request_id=request.request_id[:MAX_REQUEST_ID_CHARACTERS])
        attributes = {**attributes_at_start(request, self._model.name), **caller.attributes, **protocol}
        tracer, parent = self._telemetry.tracer, parent or Context()
        span = tracer.start_span(REQUEST_SPAN, parent, SpanKind.SERVER, attributes, start_time=timeline.arrival_ns)
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
            outcome = outcome or why_left(deadline, self.clock())
            raise
        finally:
            outcome = outcome or InternalError("the request failed", reason="FAILED")
            self._telemetry.end(span, timeline, self._model.name, outcome, self.clock())

    async def _generate(
        self, request: pb.GenerateRequest, caller: Caller, deadline: float | None, timeline: Timeline, span: Span
    ) -> Events:
        admitted = await self._admit(request, caller, timeline, span)
        account = caller.account
        with account.live(len(admitted.prompt_ids), admitted.num_pages):
            answers = Choices(self._serving, admitted, self._tokenizer.pieces, timeline, set_span_in_context(span))
            started = started_of(admitted, self._model.name, span)
            num_spent = 0
            with self._live.hold(admitted.work_id, answers):
                try:
                    async with aclosing(answers.events(started, deadline)) as events:
                        async for event in events:
                            num_spent += len(event.delta.tokens)
                            account.spend(len(event.delta.tokens))
                            yield event
                finally:
                    account.spend(answers.usage.completion_tokens - num_spent)  # of answers that were not sent
                    timeline.usage = answers.usage
                    self._telemetry.count_usage(span, timeline.usage)

    async def _admit(self, request: pb.GenerateRequest, caller: Caller, timeline: Timeline, span: Span) -> Admitted:
        """All that may refuse a request, what costs least first."""
        with self._live.coming(), caller.account.coming():
            self._dispatcher.check_room()
            admitted = await self._admission.admit(request, caller.tenant, caller.salt)
        timeline.parts.tokenize_ms = admitted.tokenize_s * 1000
        timeline.profile, timeline.request_id = admitted.profile, admitted.request_id
        describe_request(span, admitted)
        if admitted.work_id in self._live:
            raise AlreadyExistsError(f"request_id {admitted.request_id!r} is live", reason="REQUEST_ID_LIVE")
        return admitted

    async def tokenize(self, request: pb.TokenizeRequest, authorization: Sequence[str] = ()) -> pb.TokenizeResponse:
        self.check_caller(authorization).account.count_request()
        ids = await self._admission.tokenize(request)
        return pb.TokenizeResponse(ids=ids, pieces=[self._tokenizer.piece(id_) for id_ in ids])

    def check_caller(self, authorization: Sequence[str]) -> Caller:
        """Who calls. One without a right to leaves no span, as the trace store could be filled with them.

        Raises UnauthenticatedError.
        """
        try:
            return self._callers.of(authorization)
        except UnauthenticatedError as error:
            self._telemetry.metrics.count_refusal(error)
            raise

    def check_admin(self, authorization: Sequence[str], what: str) -> None:
        """Raises UnauthenticatedError, or PermissionDeniedError for a caller who is no admin."""
        self.check_caller(authorization).check_admin(what)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, which need not be whole characters; special ones are shown."""
        return self._tokenizer.pieces.bytes_of(token_id)

    def list_models(self, authorization: Sequence[str] = ()) -> pb.ListModelsResponse:
        self.check_caller(authorization)
        model = pb.Model(
            name=self._model.name,
            max_model_tokens=self._limits().max_model_tokens,
            vocab_size=self._model.vocab_size,
            ready=self.ready,
        )
        return pb.ListModelsResponse(models=[model])

    def get_status(self, authorization: Sequence[str] = ()) -> pb.GetStatusResponse:
        self.check_admin(authorization, "the status")
        queued, running = self._load()
        return pb.GetStatusResponse(
            workers=self._fleet.status(),
            queued=queued,
            running=running,
            profiles=self._dispatcher.profile_status(),
            draining=self._live.draining,
        )

    async def keep_record(self) -> None:
        """Note the router's figures every few seconds, for ever."""
        await self._telemetry.record.keep(self._load)

    def _load(self) -> tuple[int, int]:
        """Answers to requests that wait, and those that run."""
        queued = self._dispatcher.num_queued
        return queued, self._live.num_answers - queued

    def get_trace(self, request: pb.GetTraceRequest, authorization: Sequence[str] = ()) -> pb.GetTraceResponse:
        self.check_admin(authorization, "traces")
        traces = self._telemetry.traces
        if traces is None:
            raise NotFoundError("traces go to a collector; none is kept here", reason="NO_TRACE_STORE")
        trace_id = traces.find(request.id)
        return pb.GetTraceResponse(trace_id=trace_id, traces_data=traces.get(trace_id))

    async def drain(self, grace_s: float) -> int:
        return await self._live.drain(grace_s)
