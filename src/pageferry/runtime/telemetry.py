"""Tracing: one provider a process, exported over OTLP without ever holding up a request or the process's end."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
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
from pageferry.runtime.tls import Certificates, Loaded, channel_credentials, channel_options

EXPORT_DELAY_MS = 200
EXPORT_TIMEOUT_S = 10.0  # of a batch with its retries: so long a collector may be away before spans are lost
MAX_QUEUED_SPANS = 4096
SHUTDOWN_S = 1.5
# These log each batch that fails, and a full queue; the exporter below logs the change of state instead.
_NOISY_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")


@dataclass(frozen=True, slots=True)
class Tracing:
    """A process's tracer; `shutdown` sends what is left and returns within two seconds, whatever the collector does."""

    tracer: Tracer
    _provider: TracerProvider
    _exporter: "_CountingExporter | None" = None  # where spans leave the process

    @property
    def is_exported(self) -> bool:
        """Whether spans go to a collector."""
        return self._exporter is not None

    def shutdown(self) -> None:
        # The exporter may be waiting for a collector that doesn't answer; it must not keep the process from ending.
        sending = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        sending.start()
        sending.join(SHUTDOWN_S)
        if self._exporter is not None and self._exporter.num_lost:
            log("spans_lost", level="warning", endpoint=self._exporter.endpoint, spans=self._exporter.num_lost)


class _CountingProcessor(BatchSpanProcessor):
    """Counts the spans that shall be sent, since a full queue drops some silently."""

    def __init__(self, exporter: "_CountingExporter") -> None:
        super().__init__(exporter, max_queue_size=MAX_QUEUED_SPANS, schedule_delay_millis=EXPORT_DELAY_MS)
        self._counter = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._counter.num_ended += 1
        super().on_end(span)


class _CountingExporter(SpanExporter):
    """Knows how many spans were not sent, and logs when sending begins to fail and when it works again."""

    def __init__(
        self, connect: Callable[[Loaded | None], SpanExporter], endpoint: str, tls: Certificates | None
    ) -> None:
        """`connect` makes an exporter that shows these certificates; another one each time they change."""
        self.endpoint = endpoint
        self.num_ended = 0
        self._num_sent = 0
        self._connect = connect
        self._tls = tls
        self._shown = tls.now if tls is not None else None
        self._inner = connect(self._shown)
        self._failing = False

    @property
    def num_lost(self) -> int:
        """Spans that ended and were not sent, or not yet."""
        return max(0, self.num_ended - self._num_sent)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._renew()
        result = self._inner.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        self._num_sent += 0 if failed else len(spans)
        if failed != self._failing:
            self._failing = failed
            if failed:
                log("span_export_failing", level="warning", endpoint=self.endpoint, spans=len(spans))
            else:
                log("span_export_working", endpoint=self.endpoint)
        return result

    def _renew(self) -> None:
        if self._tls is not None and (loaded := self._tls.now) is not self._shown:
            self._inner.shutdown()
            self._shown, self._inner = loaded, self._connect(loaded)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def configure_tracing(
    service_name: str,
    telemetry: TelemetryConfig,
    *,
    certificates: Certificates | None = None,
    local_exporter: SpanExporter | None = None,
    instance_id: str = "",
) -> Tracing:
    """Spans go to OTEL_EXPORTER_OTLP_ENDPOINT, else the configured endpoint, else `local_exporter`, else nowhere.

    The configured one is called with the certificates, unless it is an http:// URL; that of the variable as the
    OpenTelemetry variables beside it say.
    """
    attributes: dict[str, AttributeValue] = {
        "service.name": service_name,
        "service.instance.id": instance_id or os.urandom(8).hex(),
    }
    resource = Resource.create(attributes)
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)
    exporter = None
    named = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    endpoint = named or telemetry.otlp_endpoint
    if endpoint:
        exporter = _counting_exporter(endpoint, None if named else certificates)
        provider.add_span_processor(_CountingProcessor(exporter))
    elif local_exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(local_exporter))
    return Tracing(provider.get_tracer("pageferry"), provider, exporter)


def _counting_exporter(endpoint: str, certificates: Certificates | None) -> _CountingExporter:
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    scheme = "http" if certificates is None else "https"
    url = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    if not url.startswith("https://"):
        certificates = None

    def connect(loaded: Loaded | None) -> SpanExporter:
        return OTLPSpanExporter(
            endpoint=url,
            insecure=not url.startswith("https://"),
            credentials=channel_credentials(loaded) if loaded is not None else None,
            channel_options=(channel_options(certificates.files) or None) if certificates is not None else None,
            timeout=EXPORT_TIMEOUT_S,
        )

    return _CountingExporter(connect, endpoint, certificates)


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
