"""Tracing: one provider a process, exported over OTLP without ever holding up a request or the process's end."""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from pageferry.core.config import TelemetryConfig
from pageferry.runtime.logs import log

EXPORT_DELAY_MS = 200
EXPORT_TIMEOUT_S = 1.0
MAX_QUEUED_SPANS = 4096
SHUTDOWN_S = 1.5


@dataclass(frozen=True, slots=True)
class Tracing:
    """A process's tracer; `shutdown` sends what is left and returns within two seconds, whatever the collector does."""

    tracer: Tracer
    _provider: TracerProvider

    def shutdown(self) -> None:
        # The exporter may be waiting for a collector that doesn't answer; it must not keep the process from ending.
        worker = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        worker.start()
        worker.join(SHUTDOWN_S)


class _CountingExporter(SpanExporter):
    """Counts spans that could not be sent, and logs when sending begins to fail and when it works again."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._failing = False
        self.num_dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self.num_dropped += len(spans)
        if failed != self._failing:
            self._failing = failed
            event = "span_export_failing" if failed else "span_export_working"
            log(event, level="warning" if failed else "info", endpoint=self._endpoint, dropped_spans=self.num_dropped)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def configure_tracing(
    service_name: str,
    telemetry: TelemetryConfig,
    *,
    local_exporter: SpanExporter | None = None,
    instance_id: str = "",
) -> Tracing:
    """Spans go to OTEL_EXPORTER_OTLP_ENDPOINT, else the configured endpoint, else `local_exporter`, else nowhere."""
    attributes: dict[str, AttributeValue] = {"service.name": service_name}
    attributes["service.instance.id"] = instance_id or os.urandom(8).hex()
    provider = TracerProvider(
        sampler=ParentBased(ALWAYS_ON), resource=Resource.create(attributes), shutdown_on_exit=False
    )
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "") or telemetry.otlp_endpoint
    if endpoint:
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(
            BatchSpanProcessor(
                _CountingExporter(exporter, endpoint),
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=EXPORT_DELAY_MS,
            )
        )
    elif local_exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(local_exporter))
    return Tracing(provider.get_tracer("pageferry"), provider)


def record_span(
    tracer: Tracer,
    name: str,
    context: Context | None,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, AttributeValue],
) -> Span:
    """A span of something that is over; times are wall-clock nanoseconds. Its parent is the context's span."""
    span = tracer.start_span(name, context, SpanKind.INTERNAL, attributes, start_time=start_ns)
    span.end(max(start_ns, end_ns))
    return span
