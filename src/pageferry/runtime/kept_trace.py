"""One of the traces that a process keeps: its own spans, and beside them those that others have sent."""

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData
from opentelemetry.sdk.trace import ReadableSpan

SPAN_ID_BYTES = 8
MAX_SPANS_PER_TRACE = 2048  # of one's own, and so many of others'
MAX_TRACE_BYTES = 4 * 2**20  # of others' spans, as they are sent
OWN_SPAN_BYTES = 1024  # about


class KeptTrace:
    """Anybody may have sent a span: it takes no room from one's own, and never stands in the place of one."""

    __slots__ = ("_num_sent_bytes", "_sent", "_sent_ids", "is_notable", "num_live", "own", "request_ids")

    def __init__(self) -> None:
        self.num_live = 0  # requests that have begun in this process, and not ended
        self.is_notable = False
        self.request_ids: set[str] = set()  # that name it
        self.own: list[ReadableSpan] = []  # encoded only when somebody asks
        self._sent: dict[bytes, tuple[Resource, list[Span]]] = {}  # by resource
        self._sent_ids: set[bytes] = set()
        self._num_sent_bytes = 0

    @property
    def num_sent(self) -> int:
        return len(self._sent_ids)

    @property
    def num_bytes(self) -> int:
        """As spans are sent, which is less than what they take in memory."""
        return self._num_sent_bytes + len(self.own) * OWN_SPAN_BYTES

    def take_own(self, span: ReadableSpan) -> None:
        if len(self.own) < MAX_SPANS_PER_TRACE:
            self.own.append(span)

    def take(self, key: bytes, resource: Resource, span: Span) -> bool:
        """Keep what was sent, `key` being its resource as bytes; False where there is no room for it.

        The span is kept as it is, and may be in several traces: it must be no part of a message, which it would hold.
        Of spans with one id the first counts: it is sent again where the answer to the first time was lost.
        """
        if span.span_id in self._sent_ids:
            return True
        num_bytes = span.ByteSize() + (0 if key in self._sent else 2 * len(key))
        if self.num_sent >= MAX_SPANS_PER_TRACE or self._num_sent_bytes + num_bytes > MAX_TRACE_BYTES:
            return False
        self._sent.setdefault(key, (resource, []))[1].append(span)
        self._sent_ids.add(span.span_id)
        self._num_sent_bytes += num_bytes
        return True

    def encoded(self) -> bytes:
        """As serialised TracesData."""
        own_ids = {span.context.span_id.to_bytes(SPAN_ID_BYTES) for span in self.own if span.context is not None}
        groups = list(encode_spans(self.own).resource_spans) if self.own else []
        for resource, spans in self._sent.values():
            others = [span for span in spans if span.span_id not in own_ids]
            groups.append(ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=others)]))
        return TracesData(resource_spans=groups).SerializeToString()
