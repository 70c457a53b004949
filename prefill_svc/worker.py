"""The event loop's side of a prefill worker: calls, their pushes, and what the engine's thread tells them."""

import asyncio
from collections.abc import Callable, Sequence as ListLike
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from pageferry.core.errors import PageferryError, invalid
from pageferry.core.handoff import TICKET_BYTES
from pageferry.core.layout import Place
from pageferry.core.limits import ModelLimits
from pageferry.core.sender import HandoffStats
from pageferry.core.sequence import Sequence
from pageferry.prefill_svc.shipping import DecodeChannels, Shipment
from pageferry.prefill_svc.step import Drawn, Event, Failed, PrefillStep
from pageferry.runtime.convert import finish_to_proto, layout_from_proto, prompt_logprobs_to_proto, token_to_proto
from pageferry.runtime.convert_work import work_from_proto
from pageferry.runtime.page_transfer import PushParts
from pageferry.runtime.reports import Publisher
from pageferry.runtime.work_calls import WorkCalls, counted, profile_attributes
from pageferry.runtime.worker_step import ChunkDone, StepDone
from pageferry.v1.prefill_pb2 import (
    FirstToken,
    HandoffTarget,
    PrefillAccepted,
    PrefillRequest,
    PrefillResponse,
    Shipped,
)


@dataclass(slots=True, eq=False)
class _Call:
    """One live Prefill call; with a shipment, pages from `first_page` on go to a decode worker."""

    sequence: Sequence
    shipment: Shipment | None = None
    first_page: int | None = None
    as_tails: bool = False  # whether the decode worker keeps open pages as tails
    parent: Context = field(default_factory=otel_context.get_current)
    first_chunk: float | None = None
    outcomes: "asyncio.Queue[Drawn | HandoffStats | PageferryError]" = field(default_factory=asyncio.Queue)

    async def drawn(self) -> Drawn:
        outcome = await self._next()
        assert isinstance(outcome, Drawn)
        return outcome

    async def shipped(self) -> HandoffStats:
        outcome = await self._next()
        assert isinstance(outcome, HandoffStats)
        return outcome

    async def _next(self) -> Drawn | HandoffStats:
        outcome = await self.outcomes.get()
        if isinstance(outcome, PageferryError):
            raise outcome
        return outcome


class PrefillWorker(WorkCalls[_Call, Event]):
    """Serves Prefill calls with one engine thread."""

    def __init__(
        self,
        step: PrefillStep,
        limits: ModelLimits,
        push_parts: PushParts,
        channels: DecodeChannels,
        publisher: Publisher,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(step, push_parts.tracer, publisher, clock)
        self._step = step
        self._limits = limits
        self._push_parts = replace(push_parts, on_over=publisher.count_push)
        self._channels = channels
        self._shipments: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """After the server's end: end the pushes, then the engine's thread."""
        for shipment in self._shipments:
            shipment.cancel()
        if self._shipments:
            await asyncio.wait(self._shipments)
        await self._channels.close_idle(0)
        await super().stop()

    async def prefill(self, request: PrefillRequest, context: Any) -> None:
        with counted(self._publisher.metrics) as outcome:
            work = work_from_proto(request.work)
            self._limits.check(work)
            call = _Call(await self._new_sequence(work, context, computes_prompt=True))
            if request.HasField("target"):
                self._prepare_shipment(call, request.target)
            with self._ids.claim(work.request_id):
                self._calls[call.sequence] = call  # before the engine knows of it, so that no event is lost
                try:
                    drawn = await self._serve(call, context)
                    outcome.name = drawn.reason.value if drawn.reason is not None else "handed_over"
                finally:
                    self._release(call)

    async def _serve(self, call: _Call, context: Any) -> Drawn:
        sequence, metrics = call.sequence, self._publisher.metrics
        await self.engine.call(lambda: self._step.add(sequence, call.first_page, as_tails=call.as_tails))
        if call.shipment is not None:
            task = call.shipment.start()
            self._shipments.add(task)
            task.add_done_callback(self._shipments.discard)
        await context.write(PrefillResponse(accepted=PrefillAccepted(cached_tokens=sequence.num_cached)))
        drawn = await call.drawn()
        num_generated = int(drawn.token is not None)
        metrics.count_tokens(prompt=sequence.num_prompt, cached=sequence.num_cached, generated=num_generated)
        await context.write(PrefillResponse(first_token=self._first_token(call, drawn)))
        if call.shipment is not None and drawn.reason is None:
            stats = await call.shipped()
            await context.write(PrefillResponse(shipped=_shipped(stats)))
        return drawn

    def _release(self, call: _Call) -> None:
        """The one place where a call ends, however it ends: the push is broken off unless it is over, all is freed."""
        del self._calls[call.sequence]
        if call.shipment is not None:
            call.shipment.cancel()
        self.engine.post(lambda: self._step.abort(call.sequence))

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ChunkDone():
                    self._take_chunk(event)
                case Drawn() | Failed():
                    self._take_end(event)
                case StepDone():
                    self._record_step("prefill.step", event)
                case report:
                    self._publisher.publish(report)

    def _take_chunk(self, chunk: ChunkDone) -> None:
        call = self._calls.get(chunk.sequence)
        if call is None:
            self._give_back([place for _, place in chunk.pages])
            return
        if call.first_chunk is None:
            call.first_chunk = chunk.started
            self._publisher.metrics.queue_s.observe(chunk.started - call.sequence.arrival)
            profile = profile_attributes(call.sequence.work)
            self._spans.record("prefill.queue", call.parent, call.sequence.arrival, chunk.started, profile)
        self._record_chunk(call.parent, chunk)
        if call.shipment is not None:
            call.shipment.add(chunk.pages)

    def _take_end(self, event: Drawn | Failed) -> None:
        call = self._calls.get(event.sequence)
        if call is None:
            return
        if isinstance(event, Failed):
            call.outcomes.put_nowait(event.error)
            return
        call.outcomes.put_nowait(event)
        if call.shipment is not None and event.reason is None:
            covered_tokens = len(call.sequence.work.prompt_ids) + len(call.sequence.work.output_ids)
            call.shipment.finish(covered_tokens, None if event.token is None else (event.position, event.token))

    def _take_outcome(self, call: _Call, outcome: HandoffStats | PageferryError) -> None:
        if isinstance(outcome, PageferryError):
            self._log("handoff_broken", call.sequence, outcome)
        call.outcomes.put_nowait(outcome)

    def _prepare_shipment(self, call: _Call, target: HandoffTarget) -> None:
        """Raise InvalidArgumentError for what no decode worker sends, FailedPreconditionError for a layout not ours."""
        if len(target.ticket) != TICKET_BYTES:
            raise invalid("target.ticket", f"{len(target.ticket)} bytes", f"must be {TICKET_BYTES} bytes")
        if not target.kv_endpoint:
            raise invalid("target.kv_endpoint", target.kv_endpoint, "must be host:port")
        layout = layout_from_proto(target.layout)
        source, num_tokens = self._push_parts.source, len(call.sequence.token_ids)
        source.layout.check_ships_to(layout, ours="prefill worker", theirs="decode worker")
        if target.cached_tokens >= num_tokens or target.cached_tokens % layout.page_size:
            limit = f"must be a multiple of {layout.page_size} below the {num_tokens} tokens"
            raise invalid("target.cached_tokens", target.cached_tokens, limit)
        parts, over = replace(self._push_parts, source=source.converted(layout)), partial(self._take_outcome, call)
        call.shipment = Shipment(self._channels, target, call.sequence.work.request_id, parts, self._give_back, over)
        call.first_page, call.as_tails = target.cached_tokens // layout.page_size, layout.format.has_tails

    def _first_token(self, call: _Call, drawn: Drawn) -> FirstToken:
        work = call.sequence.work
        first_chunk = call.first_chunk if call.first_chunk is not None else drawn.time
        prompt_logprobs = call.sequence.prompt_logprobs  # all of them, as the first token is drawn
        token, want_logprobs = drawn.token, work.sampling.num_logprobs is not None
        return FirstToken(
            token=None if token is None else token_to_proto(drawn.position, token, want_logprobs),
            finish_reason=finish_to_proto(drawn.reason),
            queue_ms=(first_chunk - call.sequence.arrival) * 1000,
            prefill_ms=(drawn.time - first_chunk) * 1000,
            cached_tokens=call.sequence.num_cached,
            prompt_logprobs=None if prompt_logprobs is None else prompt_logprobs_to_proto(prompt_logprobs),
        )

    def _fail(self, call: _Call, error: PageferryError) -> None:
        call.outcomes.put_nowait(error)

    def _give_back(self, places: ListLike[Place]) -> None:
        held = list(places)
        self.engine.post(lambda: self._step.release_pages(held))


def _shipped(stats: HandoffStats) -> Shipped:
    return Shipped(
        pages=stats.pages, bytes=stats.bytes, tail_ms=stats.tail_s * 1000, in_flight_ms=stats.in_flight_s * 1000
    )
