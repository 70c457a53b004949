"""What the router observes of a request as a whole, on its span and in its metrics."""

from dataclasses import dataclass, field

from opentelemetry.trace import Span, Tracer, format_trace_id

from pageferry.core.errors import DataLossError, InternalError, PageferryError
from pageferry.router.metrics import RouterMetrics
from pageferry.router.record import Record
from pageferry.router.request_span import describe_times, describe_usage, set_outcome
from pageferry.router.timeline import Timeline
from pageferry.runtime.logs import log
from pageferry.runtime.metrics import exemplar_of
from pageferry.runtime.trace_store import TraceStore
from pageferry.v1.types_pb2 import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where observations go; `traces` is None where a collector keeps the spans."""

    tracer: Tracer
    metrics: RouterMetrics
    traces: TraceStore | None = None
    record: Record = field(default_factory=Record)

    def count_usage(self, span: Span, usage: Usage) -> None:
        describe_usage(span, usage)
        self.metrics.count_tokens(
            prompt=usage.prompt_tokens, cached=usage.cached_tokens, generated=usage.completion_tokens
        )

    def left_queue(self, span: Span, waited_s: float) -> None:
        """Of a request's span: a wait for workers is over, in vain or not."""
        self.metrics.queue_s.observe(waited_s, exemplar_of(span))

    def began(self, span: Span, ttft_s: float) -> None:
        """A request's first token has come."""
        self.metrics.ttft_s.observe(ttft_s, exemplar_of(span))
        self.record.ttfts.append(ttft_s)

    def tokens_came(self, num_tokens: int, gap_s: float | None) -> None:
        """So long after the ones before, if there were any."""
        self.record.num_tokens += num_tokens
        if gap_s is not None:
            self.metrics.itl_s.observe(gap_s)
            self.record.gaps.append(gap_s)

    def end(
        self, span: Span, timeline: Timeline, model: str, outcome: FinishReason | PageferryError, now: float
    ) -> None:
        """The request is over: of those that fail, no duration is counted."""
        describe_times(span, timeline, now)
        for objective, met in timeline.objectives().items():
            self.metrics.count_objective(timeline.profile_name, objective, met=met)
        name = set_outcome(span, outcome)
        self.metrics.count_request(name)
        span.end(timeline.wall_ns(now))
        reason = outcome.reason if isinstance(outcome, PageferryError) else ""
        context = span.get_span_context()
        trace_id = format_trace_id(context.trace_id) if context.trace_flags.sampled else ""
        self.record.ended(timeline, model, trace_id, name, reason, now)
        if isinstance(outcome, InternalError | DataLossError):
            facts = {"code": outcome.code, "reason": reason, "message": outcome.message, "trace_id": trace_id}
            log("request_failed", level="error", request_id=timeline.request_id, failure=facts)
        if not isinstance(outcome, PageferryError):
            self._observe(timeline, exemplar_of(span), now)
        elif timeline.first_token is None:
            self.metrics.count_rejection(outcome)

    def _observe(self, timeline: Timeline, exemplar: dict[str, str] | None, now: float) -> None:
        self.metrics.request_s.observe(now - timeline.arrival, exemplar)
        if timeline.first_token is not None:
            self.metrics.observe_first_token(timeline.first_token_ms())
            if timeline.pages.shipped:
                self.metrics.observe_second_token(timeline.second_token_ms())
