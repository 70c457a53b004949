"""What the request's own span says."""

import grpc
from opentelemetry.trace import Span, Status, StatusCode

from pageferry.core.errors import PageferryError
from pageferry.router.admission import Admitted
from pageferry.runtime.trace_store import REQUEST_ID
from pageferry.v1.inference_pb2 import GenerateRequest
from pageferry.v1.types_pb2 import FinishReason, Usage


def attributes_at_start(request: GenerateRequest, model: str) -> dict[str, str]:
    """What is known before the request is checked."""
    operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "pageferry",
        "gen_ai.request.model": model,
        REQUEST_ID: request.request_id,
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
        }
    )


def describe_usage(span: Span, usage: Usage) -> None:
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )


def finish_name(reason: FinishReason) -> str:
    """The reason's name, "stop" or "length"."""
    return FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def set_outcome(span: Span, outcome: FinishReason | PageferryError) -> str:
    """Put the end on the span; returns its name for the counters: a finish reason or a status code, in lower case."""
    if not isinstance(outcome, PageferryError):
        name = finish_name(outcome)
        span.set_attribute("gen_ai.response.finish_reasons", [name])
        span.set_attribute("rpc.response.status_code", grpc.StatusCode.OK.name)
        return name
    span.set_attribute("rpc.response.status_code", outcome.code)
    span.set_attribute("error.type", outcome.code)
    span.set_attribute("pageferry.reason", outcome.reason)
    span.set_status(Status(StatusCode.ERROR, outcome.code))
    return outcome.code.lower()
