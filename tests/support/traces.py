"""One request's trace as the router gives it out."""

import asyncio
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opentelemetry.semconv
from cluster import Stub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage, TracesData

from pageferry.v1 import inference_pb2 as pb

PREFILL_RPC = "pageferry.v1.PrefillService/Prefill"
DECODE_RPC = "pageferry.v1.DecodeService/Decode"
# Name and kind of every span of a request that was handed over; a long prompt has more of `prefill.chunk`.
SPLIT_SPANS = Counter(
    {
        ("pageferry.request", "SERVER"): 1,
        ("queue", "INTERNAL"): 1,
        ("route", "INTERNAL"): 1,
        (PREFILL_RPC, "CLIENT"): 1,
        (PREFILL_RPC, "SERVER"): 1,
        ("prefill.queue", "INTERNAL"): 1,
        ("prefill.chunk", "INTERNAL"): 1,
        ("kv.push", "CLIENT"): 1,
        ("kv.push", "SERVER"): 1,
        (DECODE_RPC, "CLIENT"): 1,
        (DECODE_RPC, "SERVER"): 1,
        ("decode.queue", "INTERNAL"): 1,
        ("decode.generate", "INTERNAL"): 1,
    }
)


@dataclass(frozen=True)
class Span:
    name: str
    kind: str
    service: str
    span_id: bytes
    parent_id: bytes
    start_ns: int
    end_ns: int
    status: str
    attributes: dict[str, Any]
    trace_id: str = ""
    links: tuple[tuple[str, bytes], ...] = ()  # trace and span of each

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def _attributes(pairs: list[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def spans_of(traces_data: bytes) -> list[Span]:
    """The spans, earliest first."""
    spans = [
        Span(
            trace_id=span.trace_id.hex(),
            name=span.name,
            kind=SpanMessage.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            service=str(_attributes(list(resource.resource.attributes)).get("service.name", "")),
            span_id=span.span_id,
            parent_id=span.parent_span_id,
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            status=str(span.status.code),
            attributes=_attributes(list(span.attributes)),
            links=tuple((link.trace_id.hex(), link.span_id) for link in span.links),
        )
        for resource in TracesData.FromString(traces_data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    return sorted(spans, key=lambda span: span.start_ns)


def orphans(spans: list[Span], *, remote_parent: bytes = b"") -> list[str]:
    """Names of the spans whose parent is neither in the trace, nor absent, nor the caller's."""
    known = {span.span_id for span in spans} | {b"", remote_parent}
    return [span.name for span in spans if span.parent_id not in known]


def roots(spans: list[Span], *, remote_parent: bytes = b"") -> list[Span]:
    return [span for span in spans if span.parent_id == remote_parent]


def counts(spans: list[Span]) -> Counter[tuple[str, str]]:
    return Counter((span.name, span.kind) for span in spans)


def one(spans: list[Span], name: str, kind: str = "INTERNAL") -> Span:
    (found,) = [span for span in spans if (span.name, span.kind) == (name, kind)]
    return found


def parent(spans: list[Span], span: Span) -> Span:
    (found,) = [other for other in spans if other.span_id == span.parent_id]
    return found


async def wait_trace(stub: Stub, trace_id: str, wanted: Counter[tuple[str, str]], timeout_s: float = 60) -> list[Span]:
    """Until all wanted spans have come from the workers; fails with those that have not."""
    end = time.monotonic() + timeout_s
    while True:
        spans = spans_of((await stub.GetTrace(pb.GetTraceRequest(id=trace_id))).traces_data)
        missing = wanted - counts(spans)
        if not missing:
            return spans
        assert time.monotonic() < end, f"missing {dict(missing)} of {dict(counts(spans))}"
        await asyncio.sleep(0.05)


def conventional_names() -> set[str]:
    """Of attributes and metrics, as the installed conventions have them, without those that others have replaced."""
    (directory,) = opentelemetry.semconv.__path__
    sources = [path.read_text(encoding="utf-8") for path in Path(directory).rglob("*.py")]
    pattern = r': Final = "([a-z_.]+)"\n(?:"""\n(.*?)""")?'
    named = [match for source in sources for match in re.findall(pattern, source, re.S)]
    replaced = {name for name, text in named if re.match("Deprecated: (?!Moved to)", text)}
    return {name for name, _ in named} - replaced
