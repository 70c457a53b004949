"""The last traces, kept in memory where no collector is configured: local spans and those that workers send."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pageferry.core.errors import NotFoundError, ResourceExhaustedError

REQUEST_SPAN = "pageferry.request"
REQUEST_ID = "pageferry.request_id"
TRACE_ID_BYTES = 16
MAX_SPANS_PER_TRACE = 2048
MAX_EXPORT_BYTES = 4 * 2**20


class _Trace:
    """Own spans, encoded only when somebody asks, and others by resource; `request_ids` to clean the index."""

    __slots__ = ("num_spans", "own", "request_ids", "resources")

    def __init__(self) -> None:
        self.num_spans = 0
        self.own: list[ReadableSpan] = []
        self.request_ids: set[str] = set()
        self.resources: dict[bytes, tuple[Resource, dict[bytes, Span]]] = {}  # spans by their ids


class TraceStore(SpanExporter):
    """Bounded by traces (the one touched longest ago goes first) and by spans a trace. Any thread may call."""

    def __init__(self, max_traces: int) -> None:
        self._max_traces = max_traces
        self._lock = threading.Lock()
        self._traces: OrderedDict[bytes, _Trace] = OrderedDict()
        self._by_request: dict[str, bytes] = {}
        self._latest = b""

    def __len__(self) -> int:
        return len(self._traces)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            for span in spans:
                if span.context is not None:
                    request_id = (span.attributes or {}).get(REQUEST_ID)
                    trace = self._take(span.context.trace_id.to_bytes(TRACE_ID_BYTES), span.name, request_id)
                    if trace is not None:
                        trace.own.append(span)
        return SpanExportResult.SUCCESS

    def add(self, resource_spans: Iterable[ResourceSpans]) -> int:
        """Returns how many spans were left out: those without a trace id, or without room in their trace."""
        num_rejected = 0
        with self._lock:
            for group in resource_spans:
                key = group.resource.SerializeToString(deterministic=True)
                for span in (span for scope in group.scope_spans for span in scope.spans):
                    num_rejected += not self._add_span(key, group.resource, span)
        return num_rejected

    def find(self, name: str) -> str:
        """The hex trace id of a request id, of itself, or ("") of the latest finished request; else NotFoundError."""
        with self._lock:
            return self._find(name).hex()

    def get(self, name: str) -> bytes:
        """The trace that `find` finds, as serialised TracesData."""
        with self._lock:
            trace = self._traces[self._find(name)]
            groups = list(encode_spans(trace.own).resource_spans) if trace.own else []
            groups += [
                ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=spans.values())])
                for resource, spans in trace.resources.values()
            ]
            return TracesData(resource_spans=groups).SerializeToString()

    def _add_span(self, key: bytes, resource: Resource, span: Span) -> bool:
        known = self._traces.get(span.trace_id)
        if known is not None and span.span_id in known.resources.get(key, (resource, {}))[1]:
            return True  # sent again, since the answer to the first time was lost
        ids = (entry.value.string_value for entry in span.attributes if entry.key == REQUEST_ID)
        trace = self._take(span.trace_id, span.name, next(ids, None))
        if trace is None:
            return False
        kept = Span()
        kept.CopyFrom(span)  # alone: a part of a message would keep the whole of it in memory
        trace.resources.setdefault(key, (resource, {}))[1][span.span_id] = kept
        return True

    def _take(self, trace_id: bytes, name: str, request_id: object) -> _Trace | None:
        """The trace that a span belongs to, now counted and found; None where the span must be left out."""
        if len(trace_id) != TRACE_ID_BYTES:
            return None
        trace = self._traces.setdefault(trace_id, _Trace())
        self._traces.move_to_end(trace_id)
        while len(self._traces) > self._max_traces:
            self._forget(*self._traces.popitem(last=False))
        if trace.num_spans >= MAX_SPANS_PER_TRACE:
            return None
        trace.num_spans += 1
        if isinstance(request_id, str):
            trace.request_ids.add(request_id)
            self._by_request[request_id] = trace_id
        if name == REQUEST_SPAN:
            self._latest = trace_id
        return trace

    def _forget(self, trace_id: bytes, trace: _Trace) -> None:
        for request_id in trace.request_ids:
            if self._by_request.get(request_id) == trace_id:
                del self._by_request[request_id]

    def _find(self, name: str) -> bytes:
        trace_id = self._by_request.get(name, b"") if name else self._latest
        if not trace_id and len(name) == 2 * TRACE_ID_BYTES:
            try:
                trace_id = bytes.fromhex(name)
            except ValueError:
                trace_id = b""
        if trace_id not in self._traces:
            what = f"no trace {name!r} is" if name else "no finished request's trace is"
            raise NotFoundError(f"{what} among the last {self._max_traces} traces kept", reason="TRACE_NOT_FOUND")
        return trace_id


class TraceReceiver(TraceServiceServicer):
    """Takes the workers' spans over OTLP. `check` is as `Admin`'s."""

    def __init__(self, store: TraceStore, check: Callable[[Any], None] = lambda context: None) -> None:
        self._store = store
        self._check = check

    async def Export(  # noqa: N802 - named by the contract
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        self._check(context)
        if request.ByteSize() > MAX_EXPORT_BYTES:
            raise ResourceExhaustedError(f"export is {request.ByteSize()} bytes, the limit is {MAX_EXPORT_BYTES}")
        response = ExportTraceServiceResponse()
        num_rejected = self._store.add(request.resource_spans)
        if num_rejected:
            response.partial_success.rejected_spans = num_rejected
            response.partial_success.error_message = f"a trace holds at most {MAX_SPANS_PER_TRACE} spans"
        return response
