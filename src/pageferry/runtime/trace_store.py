"""The last traces, kept in memory where no collector is configured: local spans and those that workers send."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

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
    """Spans by resource; `request_ids` so that the index can be cleaned."""

    __slots__ = ("num_spans", "request_ids", "resources")

    def __init__(self) -> None:
        self.num_spans = 0
        self.request_ids: set[str] = set()
        self.resources: dict[bytes, tuple[Resource, list[Span]]] = {}


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
        self.add(encode_spans(spans).resource_spans)
        return SpanExportResult.SUCCESS

    def add(self, resource_spans: Iterable[ResourceSpans]) -> int:
        """Returns how many spans were left out: those without a trace id, or without room in their trace."""
        num_rejected = 0
        with self._lock:
            for group in resource_spans:
                key = group.resource.SerializeToString(deterministic=True)
                for scope in group.scope_spans:
                    for span in scope.spans:
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
            groups = [
                ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=spans)])
                for resource, spans in trace.resources.values()
            ]
            return TracesData(resource_spans=groups).SerializeToString()

    def _add_span(self, key: bytes, resource: Resource, span: Span) -> bool:
        if len(span.trace_id) != TRACE_ID_BYTES:
            return False
        trace = self._traces.setdefault(span.trace_id, _Trace())
        self._traces.move_to_end(span.trace_id)
        while len(self._traces) > self._max_traces:
            self._forget(*self._traces.popitem(last=False))
        if trace.num_spans >= MAX_SPANS_PER_TRACE:
            return False
        trace.num_spans += 1
        kept = Span()
        kept.CopyFrom(span)  # alone: a part of a message would keep the whole of it in memory
        trace.resources.setdefault(key, (resource, []))[1].append(kept)
        for attribute in span.attributes:
            if attribute.key == REQUEST_ID:
                trace.request_ids.add(attribute.value.string_value)
                self._by_request[attribute.value.string_value] = span.trace_id
        if span.name == REQUEST_SPAN:
            self._latest = span.trace_id
        return True

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
    """Takes the workers' spans over OTLP."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(  # noqa: N802 - named by the contract
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        if request.ByteSize() > MAX_EXPORT_BYTES:
            raise ResourceExhaustedError(f"export is {request.ByteSize()} bytes, the limit is {MAX_EXPORT_BYTES}")
        response = ExportTraceServiceResponse()
        num_rejected = self._store.add(request.resource_spans)
        if num_rejected:
            response.partial_success.rejected_spans = num_rejected
            response.partial_success.error_message = f"a trace holds at most {MAX_SPANS_PER_TRACE} spans"
        return response
