"""What the request's own span says."""

from opentelemetry.trace import Span, Status, StatusCode, format_trace_id, set_span_in_context

from pageferry.core.errors import PageferryError
from pageferry.router.admission import MAX_REQUEST_ID_CHARACTERS, Admitted
from pageferry.router.timeline import Timeline
from pageferry.runtime.rpc_spans import inject_context
from pageferry.runtime.trace_store import REQUEST_ID
from pageferry.v1.inference_pb2 import GenerateRequest, Started
from pageferry.v1.types_pb2 import FinishReason, Usage


def attributes_at_start(request: GenerateRequest, model: str) -> dict[str, str]:
    """What is known before the request is checked."""
    operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "pageferry",
        "gen_ai.request.model": model,
        REQUEST_ID: request.request_id[:MAX_REQUEST_ID_CHARACTERS],
    }


def describe_request(span: Span, admitted: Admitted) -> None:
    sampling = admitted.sampling
    span.set_attributes(
        {
            REQUEST_ID: admitted.request_id,
            "gen_ai.request.max_tokens": admitted.stop.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "pageferry.priority": admitted.priority,
            **admitted.profile.attributes,
        }
    )
    if admitted.num_choices > 1:
        span.set_attribute("gen_ai.request.choice.count", admitted.n)
    if admitted.beam is not None:
        span.set_attribute("pageferry.beam_width", admitted.beam.width)


def started_of(admitted: Admitted, model: str, span: Span) -> Started:
    """What the caller is told first."""
    return Started(
        request_id=admitted.request_id,
        trace_id=format_trace_id(span.get_span_context().trace_id),
        model=model,
        prompt_tokens=len(admitted.prompt_ids),
        traceparent=traceparent_of(span),
    )


def traceparent_of(span: Span) -> str:
    """The header by which others continue its trace."""
    return inject_context(set_span_in_context(span)).get("traceparent", "")


def describe_usage(span: Span, usage: Usage) -> None:
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )


def describe_times(span: Span, timeline: Timeline, now: float) -> None:
    """Put the parts of the time to first token, and those of the second token's gap, on the request's span."""
    attributes: dict[str, float] = {"gen_ai.server.request.duration": now - timeline.arrival}
    if timeline.first_token is not None:
        attributes["gen_ai.server.time_to_first_token"] = timeline.ttft_s
        attributes |= {f"pageferry.ttft.{part}_ms": part_ms for part, part_ms in timeline.first_token_ms().items()}
        if timeline.per_token_s is not None:
            attributes["gen_ai.server.time_per_output_token"] = timeline.per_token_s
        attributes |= {f"pageferry.slo.{objective}_met": met for objective, met in timeline.objectives().items()}
        attributes |= {f"pageferry.second_token.{part}_ms": ms for part, ms in timeline.second_token_ms().items()}
        if timeline.pages.shipped or timeline.pages.cached:
            names = ("shipped", "cached", "bytes", "hidden")
            attributes |= {f"pageferry.pages.{name}": getattr(timeline.pages, name) for name in names}
    span.set_attributes(attributes)  # at once: each call has locks of its own


def finish_name(reason: FinishReason) -> str:
    """The reason's name: "stop", "length" or "repetition"."""
    return FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def set_outcome(span: Span, outcome: FinishReason | PageferryError) -> str:
    """Put the end on the span; returns its name for the counters: a finish reason or a status code, in lower case."""
    if not isinstance(outcome, PageferryError):
        name = finish_name(outcome)
        span.set_attributes({"gen_ai.response.finish_reasons": [name], "rpc.response.status_code": "OK"})
        return name
    code = {"rpc.response.status_code": outcome.code, "error.type": outcome.code}
    span.set_attributes({**code, "pageferry.reason": outcome.reason})
    span.set_status(Status(StatusCode.ERROR, outcome.code))
    return outcome.code.lower()
