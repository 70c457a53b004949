"""The event loop's side of a decode worker: calls, and what the engine's thread tells them."""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Tracer

from pageferry.core.config import HandoffConfig
from pageferry.core.errors import CancelledError, PageferryError, invalid
from pageferry.core.handoff import TICKET_BYTES
from pageferry.core.limits import ModelLimits
from pageferry.core.plan import Emitted
from pageferry.decode_svc.call import Call, first_own_ms
from pageferry.decode_svc.desk import EngineDesk
from pageferry.decode_svc.step import Begun, Completed, DecodeStep, Event, Failed, Figures, HandoffEnded
from pageferry.decode_svc.subscriptions import Subscriptions
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.convert_work import work_from_proto
from pageferry.runtime.device_spans import device_attributes
from pageferry.runtime.engine_thread import call_on_loop
from pageferry.runtime.receive import PageReceiver
from pageferry.runtime.reports import Publisher
from pageferry.runtime.work_calls import WorkCalls, counted, profile_attributes
from pageferry.runtime.worker_main import PageStore
from pageferry.runtime.worker_step import ChunkDone, StepDone
from pageferry.v1 import decode_pb2 as pb


@dataclass(frozen=True, slots=True)
class Served:
    """What the worker serves, and where its PageService is."""

    limits: ModelLimits
    pages: PageStore
    executor: ThreadPoolExecutor  # the one transfer thread
    kv_endpoint: str
    handoff: HandoffConfig


class DecodeWorker(WorkCalls[Call, Event]):
    """Serves Decode calls, and by its `receiver` the pushes of pages, with one engine thread."""

    def __init__(
        self, step: DecodeStep, served: Served, tracer: Tracer, publisher: Publisher, clock: Callable[[], float]
    ) -> None:
        super().__init__(step, tracer, publisher, clock)
        self._step = step
        self._served = served
        self._layout = served.pages.layout
        self.desk = EngineDesk(
            step.desk,
            self.engine,
            clock,
            lease_ms=served.handoff.lease_ms,
            vocab_size=served.limits.vocab_size,
        )
        self.subscriptions = Subscriptions()
        self.receiver = PageReceiver(
            self.desk,
            served.pages,
            served.executor,
            served.handoff,
            on_over=publisher.count_push,
            clock=served.pages,
        )

    async def decode(self, request: pb.DecodeRequest, context: Any) -> None:
        with counted(self._publisher.metrics) as outcome:
            work = work_from_proto(request.work)
            self._served.limits.check(work)
            if request.source not in (pb.PROMPT_SOURCE_PUSHED, pb.PROMPT_SOURCE_LOCAL):
                raise invalid("source", request.source, "must be PUSHED or LOCAL")
            is_pushed = request.source == pb.PROMPT_SOURCE_PUSHED
            with self._ids.claim(work.request_id):
                sequence = await self._new_sequence(work, context, computes_prompt=not is_pushed)
                call = Call(sequence, is_pushed, request.call)
                self.subscriptions.join(request.subscription, call)
                self._calls[sequence] = call  # before the engine knows of it, so that no event is lost
                try:
                    await context.write(pb.DecodeResponse(reserved=await self._accept(call)))
                    completed = await self._stream(call, context)
                    outcome.name = completed.reason.value
                finally:
                    self._release(call)

    async def _accept(self, call: Call) -> pb.Reserved:
        sequence = call.sequence
        reserved = pb.Reserved(layout=layout_to_proto(self._layout), subscribed=call.subscription is not None)
        if not call.is_pushed:
            await self.engine.call(lambda: self._step.add(sequence))
            return reserved
        reserved.ticket = ticket = secrets.token_bytes(TICKET_BYTES)
        await self.engine.call(lambda: self._step.reserve(sequence, ticket))
        reserved.kv_endpoint = self._served.kv_endpoint
        reserved.cached_tokens = sequence.num_cached
        reserved.cached_pages = sequence.num_cached // self._layout.page_size
        return reserved

    async def _stream(self, call: Call, context: Any) -> Completed:
        """Until the sequence's end, and tell of it all unless the subscription does."""
        while True:
            await call.changed.wait()
            call.changed.clear()
            end = call.end
            if call.subscription is None:
                news = call.news()
                if news.tokens:
                    tokens = pb.Tokens(tokens=news.tokens)
                    if news.HasField("prompt_logprobs"):
                        tokens.prompt_logprobs.CopyFrom(news.prompt_logprobs)
                    if news.HasField("first_steps"):
                        tokens.first_steps.CopyFrom(news.first_steps)
                    await context.write(pb.DecodeResponse(tokens=tokens))
                if news.HasField("completed"):
                    await context.write(pb.DecodeResponse(completed=news.completed))
                if call.tokens:
                    call.changed.set()
                    continue
            if isinstance(end, Completed):
                return end
            if end is not None:
                raise end

    def _release(self, call: Call) -> None:
        """The one place where a call ends, however it ends: the engine forgets it and frees all that it held."""
        del self._calls[call.sequence]
        if call.subscription is not None:
            call.subscription.leave(call)
        self._count_tokens(call)
        gone = CancelledError("the request that the pages are for is over", reason="REQUEST_OVER")
        loop = asyncio.get_running_loop()

        def abort() -> None:
            call_on_loop(loop, self._record_end, call, self._step.abort(call.sequence, gone))

        if not isinstance(call.end, Completed):  # where it failed, the engine may know already
            self.engine.post(abort)

    def _count_tokens(self, call: Call) -> None:
        if call.num_emitted == 0:
            return
        sequence, metrics = call.sequence, self._publisher.metrics
        metrics.count_tokens(prompt=sequence.num_prompt, cached=sequence.num_cached, generated=call.num_drawn)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Begun() | Emitted() | Completed() | Failed() | ChunkDone():
                    call = self._calls.get(event.sequence)
                    if call is not None:
                        self._take(call, event)
                case HandoffEnded():
                    event.push.end(event.error)
                case StepDone():
                    self._record_step("decode.step", event)
                case report:
                    self._publisher.publish(report)

    def _take(self, call: Call, event: Begun | Emitted | Completed | Failed | ChunkDone) -> None:
        match event:
            case Emitted():
                call.take_token(event)
            case Begun():
                call.begun = event.figures
            case ChunkDone():
                self._record_chunk(call.parent, event)
            case Completed():
                call.take_end(event)
                self._record_end(call, event.figures)
            case Failed():
                call.take_end(event.error)
                self._record_end(call, event.figures)
                self._log("request_failed", call.sequence, event.error)

    def _fail(self, call: Call, error: PageferryError) -> None:
        call.take_end(error)

    def _record_end(self, call: Call, figures: Figures | None) -> None:
        if figures is None:
            return
        self._publisher.metrics.count_drafts(figures.num_drafted, figures.num_accepted, call.num_drawn)
        first_step = figures.ended if figures.first_step is None else figures.first_step
        self._publisher.metrics.queue_s.observe(first_step - figures.ready)
        attributes = {
            "pageferry.steps": figures.num_steps,
            "pageferry.forward_ms": figures.forward_s * 1000,
            "pageferry.preemptions": figures.num_preemptions,
            "pageferry.drafted": figures.num_drafted,
            "pageferry.accepted": figures.num_accepted,
            "pageferry.first_step_ms": first_own_ms(figures),
            **device_attributes(self.device_name, figures.first_device_s, of="first_step_"),
        }
        if (beam := call.sequence.work.beam) is not None:
            attributes["pageferry.beam_width"] = beam.width
        profile = profile_attributes(call.sequence.work)
        self._spans.record("decode.queue", call.parent, figures.ready, first_step, profile)
        self._spans.record("decode.generate", call.parent, first_step, figures.ended, {**profile, **attributes})
