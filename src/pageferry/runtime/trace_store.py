"""The last traces, kept in memory where no collector is configured: local spans and those that workers send."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.trace import ReadableSpan

from pageferry.core.config import TelemetryConfig
from pageferry.core.errors import NotFoundError, ResourceExhaustedError

REQUEST_SPAN = "pageferry.request"
REQUEST_ID = "pageferry.request_id"
STEP_SPANS = frozenset({"prefill.step", "decode.step"})  # each a trace of its own, linked to its requests'
ERROR_TYPE = "error.type"
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
MAX_SPANS_PER_TRACE = 2048
MAX_TRACE_BYTES = 4 * 2**20
MAX_BYTES = 64 * 2**20  # of all traces; as spans are sent, which is less than what they take in memory
OWN_SPAN_BYTES = 1024  # of a span that was not sent, about
MAX_STEP_SPANS = MAX_SPANS_PER_TRACE // 2  # from so many spans on no step is kept with a trace: others are to come
MAX_EXPORT_BYTES = 4 * 2**20
# How requests end that nothing here has failed: their caller left or asked for what can't be, or there were too many.
_NO_FAULT = {
    "CANCELLED",
    "INVALID_ARGUMENT",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
}


class _Trace:
    """Own spans, encoded only when somebody asks, and others by resource; `request_ids` to clean the index."""

    __slots__ = ("is_notable", "num_bytes", "num_live", "num_spans", "own", "request_ids", "resources")

    def __init__(self) -> None:
        self.num_live = 0  # requests that have begun in this process, and not ended
        self.is_notable = False
        self.num_spans = 0
        self.num_bytes = 0
        self.own: list[ReadableSpan] = []
        self.request_ids: set[str] = set()
        self.resources: dict[bytes, tuple[Resource, dict[bytes, Span]]] = {}  # spans by their ids


class TraceStore(sdk.SpanProcessor):
    """Bounded by traces, by spans and bytes a trace, and by bytes in all. Any thread may call.

    Where there are too many, the trace touched longest ago goes, but not one of a request that is live, and one of a
    request that failed or was slow only once there are `num_kept` later ones. Whatever workers tell of a trace later
    on, when it is kept, stands beside what is there.
    """

    def __init__(self, max_traces: int, num_kept: int = 0, slow_s: float = float("inf")) -> None:
        """The last of all traces is kept in any case."""
        self._max_traces = max_traces
        self._num_kept = min(num_kept, max_traces - 1)
        self._slow_s = slow_s
        self._lock = threading.Lock()
        # Each trace is in one of these, the one touched longest ago first.
        self._live: dict[bytes, _Trace] = {}
        self._past: OrderedDict[bytes, _Trace] = OrderedDict()
        self._notable: OrderedDict[bytes, _Trace] = OrderedDict()
        self._by_request: dict[str, bytes] = {}
        self._latest = b""
        self._num_bytes = 0

    @classmethod
    def of(cls, telemetry: TelemetryConfig) -> Self:
        return cls(telemetry.max_traces, telemetry.kept_traces, telemetry.slow_request_s)

    def __len__(self) -> int:
        return len(self._live) + len(self._past) + len(self._notable)

    def on_start(self, span: sdk.Span, parent_context: Context | None = None) -> None:
        if span.name == REQUEST_SPAN and span.context.trace_flags.sampled:
            with self._lock:
                trace_id = span.context.trace_id.to_bytes(TRACE_ID_BYTES)
                trace = self._pop(trace_id)
                trace.num_live += 1
                self._live[trace_id] = trace

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        attributes = span.attributes or {}
        with self._lock:
            trace_id = span.context.trace_id.to_bytes(TRACE_ID_BYTES)
            trace = self._pop(trace_id)
            if span.name == REQUEST_SPAN:
                seconds = ((span.end_time or 0) - (span.start_time or 0)) / 1e9
                self._note_end(trace_id, trace, seconds, attributes.get(ERROR_TYPE))
                trace.num_live = max(0, trace.num_live - 1)
            if self._takes(trace_id, trace, OWN_SPAN_BYTES, attributes.get(REQUEST_ID)):
                trace.own.append(span)
            self._put(trace_id, trace)

    def add(self, resource_spans: Iterable[ResourceSpans]) -> int:
        """Returns how many spans were left out: those without proper ids, or without room in their trace."""
        num_rejected = 0
        with self._lock:
            for group in resource_spans:
                key = group.resource.SerializeToString(deterministic=True)
                resource = Resource()
                resource.CopyFrom(group.resource)  # alone: a part of a message would keep the whole of it in memory
                for span in (span for scope in group.scope_spans for span in scope.spans):
                    num_rejected += not self._add_span(key, resource, span)
        return num_rejected

    def find(self, name: str) -> str:
        """The hex trace id of a request id, of itself, or ("") of the latest finished request; else NotFoundError."""
        with self._lock:
            return self._find(name)[0].hex()

    def get(self, name: str) -> bytes:
        """The trace that `find` finds, as serialised TracesData."""
        with self._lock:
            trace = self._find(name)[1]
            groups = list(encode_spans(trace.own).resource_spans) if trace.own else []
            groups += [
                ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=spans.values())])
                for resource, spans in trace.resources.values()
            ]
            return TracesData(resource_spans=groups).SerializeToString()

    def _add_span(self, key: bytes, resource: Resource, span: Span) -> bool:
        if len(span.trace_id) != TRACE_ID_BYTES or len(span.span_id) != SPAN_ID_BYTES:
            return False
        if span.name in STEP_SPANS:
            self._add_step(key, resource, span)
            return True
        trace = self._pop(span.trace_id)
        is_known = span.span_id in trace.resources.get(key, (resource, {}))[1]  # the answer to the first time was lost
        texts: dict[str, str] = {}
        if is_request := span.name == REQUEST_SPAN:
            texts = {entry.key: entry.value.string_value for entry in span.attributes}
        num_bytes = _size(trace, key, span)
        is_taken = is_known or self._takes(span.trace_id, trace, num_bytes, texts.get(REQUEST_ID))
        if is_taken and not is_known:
            if is_request:
                seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
                self._note_end(span.trace_id, trace, seconds, texts.get(ERROR_TYPE))
            kept = Span()
            kept.CopyFrom(span)  # alone, as the resource
            trace.resources.setdefault(key, (resource, {}))[1][span.span_id] = kept
        self._put(span.trace_id, trace)
        return is_taken

    def _add_step(self, key: bytes, resource: Resource, step: Span) -> None:
        """Keep it with the traces that it is linked to, as far as they are here: traces of steps would push all out."""
        kept = Span()
        kept.CopyFrom(step)
        for trace_id in {link.trace_id for link in step.links}:
            places = (traces[trace_id] for traces in (self._live, self._past, self._notable) if trace_id in traces)
            trace = next(places, None)
            if trace is None or trace.num_spans >= MAX_STEP_SPANS:
                continue
            is_known = step.span_id in trace.resources.get(key, (resource, {}))[1]
            if not is_known and self._takes(trace_id, trace, _size(trace, key, step)):
                trace.resources.setdefault(key, (resource, {}))[1][step.span_id] = kept

    def _takes(self, trace_id: bytes, trace: _Trace, num_bytes: int, request_id: object = None) -> bool:
        """Count another span, and know its trace by its request; False where the trace is full."""
        if trace.num_spans >= MAX_SPANS_PER_TRACE or trace.num_bytes + num_bytes > MAX_TRACE_BYTES:
            return False
        trace.num_spans += 1
        trace.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if isinstance(request_id, str):
            trace.request_ids.add(request_id)
            self._by_request[request_id] = trace_id
        return True

    def _note_end(self, trace_id: bytes, trace: _Trace, seconds: float, error: object) -> None:
        """A request of the trace is over."""
        self._latest = trace_id
        has_failed = error is not None and error not in _NO_FAULT
        trace.is_notable = trace.is_notable or has_failed or seconds >= self._slow_s

    def _pop(self, trace_id: bytes) -> _Trace:
        """The trace, or a new one; the caller puts it back where it belongs now."""
        for traces in (self._live, self._past, self._notable):
            if (trace := traces.pop(trace_id, None)) is not None:
                return trace
        return _Trace()

    def _put(self, trace_id: bytes, trace: _Trace) -> None:
        if trace.num_live:
            self._live[trace_id] = trace
            return
        (self._notable if trace.is_notable else self._past)[trace_id] = trace
        while len(self._notable) > self._num_kept:
            trace_id, trace = self._notable.popitem(last=False)
            self._past[trace_id] = trace
        self._make_room()

    def _make_room(self) -> None:
        while self._num_bytes > MAX_BYTES or len(self._past) + len(self._notable) > self._max_traces:
            if not (traces := self._past or self._notable):  # what is left is live
                return
            self._forget(*traces.popitem(last=False))

    def _forget(self, trace_id: bytes, trace: _Trace) -> None:
        self._num_bytes -= trace.num_bytes
        for request_id in trace.request_ids:
            if self._by_request.get(request_id) == trace_id:
                del self._by_request[request_id]

    def _find(self, name: str) -> tuple[bytes, _Trace]:
        trace_id = self._by_request.get(name, b"") if name else self._latest
        if not trace_id and len(name) == 2 * TRACE_ID_BYTES:
            try:
                trace_id = bytes.fromhex(name)
            except ValueError:
                trace_id = b""
        for traces in (self._live, self._past, self._notable):
            if (trace := traces.get(trace_id)) is not None:
                return trace_id, trace
        what = f"no trace {name!r} is" if name else "no finished request's trace is"
        where = f"among the last {self._max_traces} traces kept; a request that is not sampled leaves none"
        raise NotFoundError(f"{what} {where}", reason="TRACE_NOT_FOUND")


def _size(trace: _Trace, key: bytes, span: Span) -> int:
    """What the span would add to the trace."""
    return span.ByteSize() + (0 if key in trace.resources else 2 * len(key))


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
            limits = f"{MAX_SPANS_PER_TRACE} spans of {MAX_TRACE_BYTES} bytes"
            response.partial_success.error_message = f"a trace holds at most {limits}, with ids of 16 and 8 bytes"
        return response
