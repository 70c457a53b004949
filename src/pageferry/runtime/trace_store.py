"""The last traces, kept in memory where no collector is configured: local spans and those that workers send."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Self

from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceServicer
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.trace import ReadableSpan

from pageferry.core.config import TelemetryConfig
from pageferry.core.errors import NotFoundError, ResourceExhaustedError
from pageferry.runtime.kept_trace import MAX_SPANS_PER_TRACE, MAX_TRACE_BYTES, SPAN_ID_BYTES, KeptTrace

REQUEST_SPAN = "pageferry.request"
REQUEST_ID = "pageferry.request_id"
STEP_SPANS = frozenset({"prefill.step", "decode.step"})  # each a trace of its own, linked to its requests'
ERROR_TYPE = "error.type"
TRACE_ID_BYTES = 16
MAX_BYTES = 64 * 2**20  # of all traces
MAX_STEP_SPANS = MAX_SPANS_PER_TRACE // 2  # from so many sent spans on no step is kept with a trace: others are to come
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


class TraceStore(sdk.SpanProcessor):
    """Bounded by traces, by spans and bytes a trace, and by bytes in all. Any thread may call.

    Where there are too many, the trace touched longest ago goes, but not one of a request that is live, and one of a
    request that failed or was slow only once there are `num_kept` later ones. Those without a span of our own go first
    where they are more than half, or it is bytes that are too many. Whatever workers tell of a trace later on, when it
    is kept, stands beside what is there.

    What was sent may be forged. So a request's id names the last trace of our own that has it, or else the first one
    that was sent; and what was sent decides neither which trace is the latest, nor what our own spans say.
    """

    def __init__(self, max_traces: int, num_kept: int = 0, slow_s: float = float("inf")) -> None:
        """The last of all traces is kept in any case."""
        self._max_traces = max_traces
        self._num_kept = min(num_kept, max_traces - 1)
        self._slow_s = slow_s
        self._lock = threading.Lock()
        # Each trace is in one of these, the one touched longest ago first.
        self._live: OrderedDict[bytes, KeptTrace] = OrderedDict()
        self._foreign: OrderedDict[bytes, KeptTrace] = OrderedDict()  # without a span of our own
        self._past: OrderedDict[bytes, KeptTrace] = OrderedDict()
        self._notable: OrderedDict[bytes, KeptTrace] = OrderedDict()
        self._by_request: dict[str, bytes] = {}
        self._latest = b""
        self._num_bytes = 0

    @classmethod
    def of(cls, telemetry: TelemetryConfig) -> Self:
        return cls(telemetry.max_traces, telemetry.kept_traces, telemetry.slow_request_s)

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def on_start(self, span: sdk.Span, parent_context: Context | None = None) -> None:
        if span.name == REQUEST_SPAN and span.context.trace_flags.sampled:
            with self._lock:
                trace_id = span.context.trace_id.to_bytes(TRACE_ID_BYTES)
                trace = self._pop(trace_id)
                trace.num_live += 1
                self._name(trace_id, trace, (span.attributes or {}).get(REQUEST_ID))
                self._put(trace_id, trace)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        attributes = span.attributes or {}
        with self._lock:
            trace_id = span.context.trace_id.to_bytes(TRACE_ID_BYTES)
            trace = self._pop(trace_id)
            if span.name == REQUEST_SPAN:
                self._latest = trace_id
                seconds = ((span.end_time or 0) - (span.start_time or 0)) / 1e9
                self._note_end(trace, seconds, attributes.get(ERROR_TYPE))
                trace.num_live = max(0, trace.num_live - 1)
            self._name(trace_id, trace, attributes.get(REQUEST_ID))
            trace.take_own(span)
            self._put(trace_id, trace)

    def add(self, resource_spans: Iterable[ResourceSpans]) -> int:
        """Returns how many spans were left out: those without proper ids, or without room in their trace."""
        num_rejected = 0
        with self._lock:
            for group in resource_spans:
                key = group.resource.SerializeToString(deterministic=True)
                resource = Resource()
                resource.CopyFrom(group.resource)  # alone: a part of a message would keep the whole of it in memory
                for sent in (span for scope in group.scope_spans for span in scope.spans):
                    span = Span()
                    span.CopyFrom(sent)  # likewise
                    num_rejected += not self._add_span(key, resource, span)
        return num_rejected

    def find(self, name: str) -> str:
        """The hex trace id of a request id, of itself, or ("") of the latest request of ours that is over.

        NotFoundError where there is none.
        """
        with self._lock:
            return self._find(name)[0].hex()

    def get(self, name: str) -> bytes:
        """The trace that `find` finds, as serialised TracesData."""
        with self._lock:
            return self._find(name)[1].encoded()

    @property
    def _all(self) -> tuple[OrderedDict[bytes, KeptTrace], ...]:
        """Those without a span of our own last: whoever sends them may choose their ids."""
        return self._live, self._past, self._notable, self._foreign

    def _add_span(self, key: bytes, resource: Resource, span: Span) -> bool:
        if len(span.trace_id) != TRACE_ID_BYTES or len(span.span_id) != SPAN_ID_BYTES:
            return False
        if span.name in STEP_SPANS:
            self._add_step(key, resource, span)
            return True
        trace = self._pop(span.trace_id)
        is_taken = trace.take(key, resource, span)
        if is_taken and span.name == REQUEST_SPAN:
            texts = {entry.key: entry.value.string_value for entry in span.attributes}
            seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            self._note_end(trace, seconds, texts.get(ERROR_TYPE))
            if (request_id := texts.get(REQUEST_ID)) not in self._by_request:
                self._name(span.trace_id, trace, request_id)
        self._put(span.trace_id, trace)
        return is_taken

    def _add_step(self, key: bytes, resource: Resource, step: Span) -> None:
        """Keep it with the traces that it is linked to, as far as they are here: traces of steps would push all out.

        All have the same one: it is as large as it has links.
        """
        for trace_id in {link.trace_id for link in step.links}:
            places = (traces[trace_id] for traces in self._all if trace_id in traces)
            trace = next(places, None)
            if trace is not None and trace.num_sent < MAX_STEP_SPANS:
                self._num_bytes -= trace.num_bytes
                trace.take(key, resource, step)
                self._num_bytes += trace.num_bytes
        self._make_room()

    def _name(self, trace_id: bytes, trace: KeptTrace, request_id: object) -> None:
        """Know the trace by a request's id, where there is one."""
        if isinstance(request_id, str) and len(trace.request_ids) < MAX_SPANS_PER_TRACE:
            self._by_request[request_id] = trace_id
            trace.request_ids.add(request_id)

    def _note_end(self, trace: KeptTrace, seconds: float, error: object) -> None:
        """A request of the trace is over."""
        has_failed = error is not None and error not in _NO_FAULT
        trace.is_notable = trace.is_notable or has_failed or seconds >= self._slow_s

    def _pop(self, trace_id: bytes) -> KeptTrace:
        """The trace, or a new one; the caller puts it back where it belongs now."""
        for traces in self._all:
            if (trace := traces.pop(trace_id, None)) is not None:
                self._num_bytes -= trace.num_bytes
                return trace
        return KeptTrace()

    def _put(self, trace_id: bytes, trace: KeptTrace) -> None:
        self._num_bytes += trace.num_bytes
        if trace.num_live:
            self._live[trace_id] = trace
        elif not trace.own:
            self._foreign[trace_id] = trace
        elif not trace.is_notable:
            self._past[trace_id] = trace
        else:
            self._notable[trace_id] = trace
            if len(self._notable) > self._num_kept:
                trace_id, trace = self._notable.popitem(last=False)
                self._past[trace_id] = trace
        self._make_room()

    def _make_room(self) -> None:
        while (too_large := self._num_bytes > MAX_BYTES) or len(self) - len(self._live) > self._max_traces:
            own = self._past or self._notable
            if too_large or len(self._foreign) > self._max_traces // 2:
                traces = self._foreign or own
            else:
                traces = own
            if not traces:  # what is left is live
                return
            trace_id, trace = traces.popitem(last=False)
            self._num_bytes -= trace.num_bytes
            for request_id in trace.request_ids:
                if self._by_request.get(request_id) == trace_id:
                    del self._by_request[request_id]

    def _find(self, name: str) -> tuple[bytes, KeptTrace]:
        trace_ids = [self._by_request.get(name, b"")] if name else [self._latest]
        with suppress(ValueError):
            trace_ids.append(bytes.fromhex(name))
        for traces in self._all:
            for trace_id in trace_ids:
                if (trace := traces.get(trace_id)) is not None:
                    return trace_id, trace
        what = f"no trace {name!r} is" if name else "no finished request's trace is"
        where = f"among the last {self._max_traces} traces kept; a request that is not sampled leaves none"
        raise NotFoundError(f"{what} {where}", reason="TRACE_NOT_FOUND")


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
