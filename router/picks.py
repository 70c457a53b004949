"""Where a gateway is to send a request: what the router's own requests go through, up to the choice of workers.

The same checks, queue and policy; then the request goes to a router beside the chosen decode worker by way of the
gateway, and is seen again in that worker's load.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from pageferry.core.errors import PageferryError, ResourceExhaustedError, UnauthenticatedError, UnavailableError
from pageferry.router.able import RETRY_AFTER_MS
from pageferry.router.admission import Admission
from pageferry.router.ask import Ask, Grant
from pageferry.router.gateway.errors import in_the_body_s_words
from pageferry.router.live import LiveRequests
from pageferry.router.pick_metrics import PICKED, PickMetrics
from pageferry.router.request_span import attributes_at_start, describe_request, set_outcome, traceparent_of
from pageferry.router.serving import Serving
from pageferry.router.states import num_active
from pageferry.router.tenant import Caller
from pageferry.router.work import ask_of, demand_of
from pageferry.router.workers import Role
from pageferry.v1.inference_pb2 import GenerateRequest

PICK_SPAN = "pageferry.pick"
MAX_ENDPOINTS = 3  # the one picked, and those for a gateway's retries
# How long a request is on its way to its worker: an answer's first word says so sooner. By then the worker has told of
# it, and may have told of its end.
ARRIVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Question:
    """A generation that a gateway asks about."""

    request: GenerateRequest
    names: Mapping[str, str]  # that its body has for fields of the contract, for errors
    caller: Caller
    deadline: float | None  # by the router's clock
    only: frozenset[str] | None  # endpoints that it may go to; None: all
    parent: Context


class Place:
    """Endpoints for one request, the best first.

    It is counted against the workers of the first one until it must have arrived there, and holds nothing from then on,
    however long the gateway's stream lives.
    """

    def __init__(
        self, endpoints: tuple[str, ...], traceparent: str = "", release: Callable[[], None] | None = None
    ) -> None:
        """`traceparent` is that of the choice's span; `release`, of a generation, ends the count."""
        self.endpoints = endpoints
        self.traceparent = traceparent
        self.is_generation = release is not None
        self._release = release
        if release is not None:
            self._arrival = asyncio.get_running_loop().call_later(ARRIVAL_S, self.arrived)

    def arrived(self) -> None:
        """The worker has it, and counts it in its reports; idempotent."""
        if self._release is not None:
            self._arrival.cancel()
            release, self._release = self._release, None
            release()


@dataclass(frozen=True, slots=True)
class Picks:
    """Chooses for gateways, each worker by the endpoint of the router beside it: its host, and the picker's port."""

    serving: Serving
    admission: Admission
    check_caller: Callable[[Sequence[str]], Caller]
    live: LiveRequests
    metrics: PickMetrics

    def caller_of(self, authorization: Sequence[str]) -> Caller:
        """Who asks for a generation. Raises UnauthenticatedError, which counts as a refusal."""
        try:
            return self.check_caller(authorization)
        except UnauthenticatedError as error:
            self.metrics.count(error.code.lower(), 0.0)
            raise

    async def pick(self, question: Question) -> Place:
        """Raises the PageferryError of a request that is wrong, or that no worker can take."""
        with self._counted(), self.live.looked_at():
            attributes = attributes_at_start(question.request, self.admission.model) | question.caller.attributes
            span = self.serving.telemetry.tracer.start_span(PICK_SPAN, question.parent, SpanKind.SERVER, attributes)
            try:
                return await self._place(question, span)
            except PageferryError as error:
                set_outcome(span, error)
                raise in_the_body_s_words(error, question.names) from None
            finally:
                span.end()

    def any(self, only: frozenset[str] | None) -> Place:
        """For what is no generation: the least busy. Raises UnavailableError."""
        fleet = self.serving.fleet
        ready = [worker for worker in fleet.ready(Role.DECODE) if only is None or self._of(worker.address) in only]
        if not ready:
            reason = fleet.why_hopeless() or "no decode worker is ready that the gateway allows"
            raise UnavailableError(reason, reason="NO_WORKER", retry_after_ms=RETRY_AFTER_MS)
        ready.sort(key=lambda worker: (num_active(worker), worker.address))
        return Place(tuple(self._of(worker.address) for worker in ready[:MAX_ENDPOINTS]))

    async def _place(self, question: Question, span: Span) -> Place:
        fleet, dispatcher, caller = self.serving.fleet, self.serving.dispatcher, question.caller
        with caller.account.coming():
            dispatcher.check_room()
            admitted = await self.admission.admit(question.request, caller.tenant, caller.salt)
        describe_request(span, admitted)
        ask = ask_of(admitted, demand_of(admitted, 0, local_only=False, near=""), question.deadline)
        if question.only is not None:
            decodes = fleet.of(Role.DECODE)
            ask.only = frozenset(one.address for one in decodes if self._of(one.address) in question.only)
        dispatcher.enqueue(ask)
        with ExitStack() as stack:
            stack.callback(dispatcher.abandon, ask)
            grant = await self._granted(ask)
            endpoints = self._endpoints(ask, grant, question.only, span)
            span.set_attribute("pageferry.pick.tokenize_ms", admitted.tokenize_s * 1000)
            span.set_attribute("pageferry.pick.queue_ms", (grant.ended - ask.enqueued) * 1000)
            return Place(endpoints, traceparent_of(span), stack.pop_all().close)

    async def _granted(self, ask: Ask) -> Grant:
        wait_s = self.serving.config.picker_wait_s
        try:
            async with asyncio.timeout(wait_s):
                return await self.serving.dispatcher.wait(ask)
        except TimeoutError:
            raise ResourceExhaustedError(
                f"no worker had room for the request within {wait_s:g} s (router.picker_wait_s)",
                reason="NO_ROOM",
                retry_after_ms=RETRY_AFTER_MS,
            ) from None

    def _endpoints(self, ask: Ask, grant: Grant, only: frozenset[str] | None, span: Span) -> tuple[str, ...]:
        """The granted worker's, then those of others that have room; of a single token, which takes none, any."""
        others = self.serving.dispatcher.preferred(ask)
        if grant.decode is not None:
            others = [one for one in others if one[0].address != grant.decode.address]
        others = others[: MAX_ENDPOINTS - (grant.decode is not None)]
        addresses = [state.address for state, _ in others]
        if grant.decode is not None:
            addresses.insert(0, grant.decode.address)
        endpoints = tuple(map(self._of, addresses)) or self.any(only).endpoints
        span.set_attributes(
            {
                **grant.route.attributes,
                "pageferry.route.source": grant.route.source.value,
                "pageferry.pick.endpoint": endpoints[0],
                "pageferry.pick.fallbacks": endpoints[1:],
                "pageferry.pick.other_scores": [score for _, score in others],
                "pageferry.pick.other_cached_tokens": [state.cached_tokens for state, _ in others],
            }
        )
        return endpoints

    def _of(self, address: str) -> str:
        return f"{address.rpartition(':')[0]}:{self.serving.config.picker_port}"

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began, outcome = self.serving.clock(), "internal"
        try:
            yield
            outcome = PICKED
        except PageferryError as error:
            outcome = error.code.lower()
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.metrics.count(outcome, self.serving.clock() - began)
