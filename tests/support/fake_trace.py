"""A made-up trace of one request that was handed over, for what shows traces."""

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status, TracesData

TRACE_ID = bytes(range(16))
START_NS = 1_700_000_000_000_000_000
KINDS = {"": Span.SPAN_KIND_INTERNAL, "client": Span.SPAN_KIND_CLIENT, "server": Span.SPAN_KIND_SERVER}


def value(plain: object) -> AnyValue:
    match plain:
        case bool():
            return AnyValue(bool_value=plain)
        case int():
            return AnyValue(int_value=plain)
        case float():
            return AnyValue(double_value=plain)
        case list():
            return AnyValue(array_value=ArrayValue(values=map(value, plain)))
        case _:
            return AnyValue(string_value=str(plain))


def span(ids: tuple[int, int], name: str, kind: str, times_ms: tuple[float, float], **attributes: object) -> Span:
    own, parent = ids
    return Span(
        trace_id=TRACE_ID,
        span_id=own.to_bytes(8),
        parent_span_id=parent.to_bytes(8) if parent else b"",
        name=name,
        kind=KINDS[kind],
        start_time_unix_nano=START_NS + int(times_ms[0] * 1e6),
        end_time_unix_nano=START_NS + int(times_ms[1] * 1e6),
        attributes=[KeyValue(key=key.replace("__", "."), value=value(plain)) for key, plain in attributes.items()],
    )


def of_service(name: str, *spans: Span) -> ResourceSpans:
    resource = Resource(attributes=[KeyValue(key="service.name", value=value(name))])
    return ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=spans)])


PREFILL, DECODE = "pageferry.v1.PrefillService/Prefill", "pageferry.v1.DecodeService/Decode"


def example() -> TracesData:
    """Spans of three services, out of order."""
    push = {
        "pageferry__handoff__format": "int8",
        "pageferry__handoff__pages": 3,
        "pageferry__handoff__bytes": 1_105_920,
    }
    request = {
        "gen_ai__request__model": "tiny",
        "gen_ai__server__time_to_first_token": 0.0551,
        "gen_ai__response__finish_reasons": ["stop"],
        "pageferry__request_id": "r",
        "pageferry__streamed": True,
    }
    router = of_service(
        "pageferry-router",
        span((1, 0), "pageferry.request", "server", (0, 120), **request),
        span((2, 1), "queue", "", (0.2, 0.3)),
        span((11, 1), "route", "", (0.3, 0.4), pageferry__route__source="pushed", pageferry__route__reason="a b"),
        span((3, 1), DECODE, "client", (0.5, 119), rpc__method=DECODE),
        span((4, 1), PREFILL, "client", (1, 55)),
    )
    prefill = of_service(
        "pageferry-prefill",
        span((5, 4), PREFILL, "server", (1.5, 54.5)),
        span((6, 5), "prefill.chunk", "", (2, 50), pageferry__chunk__start=0, pageferry__chunk__tokens=37),
        span(
            (7, 5),
            "kv.push",
            "client",
            (3, 54),
            **push,
            pageferry__handoff__transport="shm",
            pageferry__handoff__hidden=0.71,
        ),
    )
    decode = of_service(
        "pageferry-decode",
        span((8, 3), DECODE, "server", (0.7, 118)),
        span((9, 8), "decode.generate", "", (55, 118), pageferry__steps=8, pageferry__first_step_ms=12.3456),
        span((10, 7), "kv.push", "server", (3.2, 53.9), **push),
    )
    decode.scope_spans[0].spans[1].status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message="CANCELLED"))
    return TracesData(resource_spans=[decode, router, prefill])
