"""Tracing: one provider a process; whose spans are sampled, and where they go."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpc import StatusCode
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from pageferry.core.config import TelemetryConfig, collector_of
from pageferry.core.errors import invalid
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.span_export import EXPORT_TIMEOUT_S, SpanQueue
from pageferry.runtime.tls import Certificates, Loaded, channel_credentials, channel_options

_SAMPLER, _SAMPLER_ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_SAMPLERS: Mapping[str, Callable[[float], Sampler]] = {
    "always_on": lambda ratio: ALWAYS_ON,
    "always_off": lambda ratio: ALWAYS_OFF,
    "traceidratio": TraceIdRatioBased,
    "parentbased_always_on": lambda ratio: ParentBased(ALWAYS_ON),
    "parentbased_always_off": lambda ratio: ParentBased(ALWAYS_OFF),
    "parentbased_traceidratio": lambda ratio: ParentBased(TraceIdRatioBased(ratio)),
}
_NEVER = (StatusCode.OK,)  # of errors; none at all would be the exporter's default
_NOISY_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # has a line for each call that fails
# They have one for each header that is wrong, with the caller's text.
_QUOTING_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")


@dataclass(frozen=True, slots=True)
class Tracing:
    """A process's tracer; `shutdown` sends what is left and returns within two seconds, whatever the collector does."""

    tracer: Tracer
    _provider: TracerProvider
    _queue: SpanQueue | None = None  # where spans leave the process

    @property
    def is_exported(self) -> bool:
        """Whether spans go to a collector."""
        return self._queue is not None

    def count_losses(self, metrics: Metrics) -> None:
        """Have lost spans counted there."""
        if self._queue is not None:
            self._queue.on_lost = metrics.count_lost_spans

    def shutdown(self) -> None:
        self._provider.shutdown()


class _Exporter:
    """The SDK's exporter, and another one each time that the certificates which it is to show change."""

    def __init__(self, connect: Callable[[Loaded | None], SpanExporter], tls: Certificates | None) -> None:
        self._connect = connect
        self._tls = tls
        self._shown = tls.now if tls is not None else None
        self._inner = connect(self._shown)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._tls is not None and (loaded := self._tls.now) is not self._shown:
            self._inner.shutdown()
            self._shown, self._inner = loaded, self._connect(loaded)
        return self._inner.export(spans)

    def shutdown(self) -> None:
        self._inner.shutdown()


def configure_tracing(
    service_name: str,
    telemetry: TelemetryConfig,
    *,
    certificates: Certificates | None = None,
    local: SpanProcessor | None = None,
    instance_id: str = "",
    sample_ratio: float = 1.0,
) -> Tracing:
    """Spans go to the collector that a variable names, else to the configured one, else to `local`, else nowhere.

    The configured one is called with the certificates, unless it is an http:// URL; that of a variable as the
    OpenTelemetry variables beside it say. `sample_ratio` is of the traces that begin here, others being as their
    beginning was; OTEL_TRACES_SAMPLER wins over both.
    """
    for name in _QUOTING_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    attributes: dict[str, AttributeValue] = {
        "service.name": service_name,
        "service.instance.id": instance_id or os.urandom(8).hex(),
    }
    resource = Resource.create(attributes)
    provider = TracerProvider(sampler=_sampler(sample_ratio), resource=resource, shutdown_on_exit=False)
    queue = None
    named = collector_of(os.environ)
    endpoint = named or telemetry.otlp_endpoint
    if endpoint:
        queue = SpanQueue(_exporter(endpoint, None if named else certificates), endpoint)
        provider.add_span_processor(queue)
    elif local is not None:
        provider.add_span_processor(local)
    return Tracing(provider.get_tracer("pageferry"), provider, queue)


def _sampler(ratio: float) -> Sampler:
    """As OTEL_TRACES_SAMPLER has it, where it is set; the SDK would take what it does not know for its default."""
    name = os.environ.get(_SAMPLER, "").strip().lower()
    if not name:
        return ParentBased(TraceIdRatioBased(ratio))
    if name not in _SAMPLERS:
        raise invalid(_SAMPLER, name, f"must be one of {', '.join(_SAMPLERS)}")
    argument = os.environ.get(_SAMPLER_ARGUMENT, "").strip() or "1"
    try:
        return _SAMPLERS[name](float(argument))
    except ValueError:
        raise invalid(_SAMPLER_ARGUMENT, argument, "must be a number from 0 to 1") from None


def _exporter(endpoint: str, certificates: Certificates | None) -> _Exporter:
    logging.getLogger(_NOISY_LOGGER).setLevel(logging.CRITICAL)
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
            retryable_error_codes=_NEVER,  # the queue tries again
        )

    return _Exporter(connect, certificates)


class PastSpans:
    """Records spans of what is over, from seconds of a clock that starts anywhere."""

    def __init__(self, tracer: Tracer, offset_ns: Callable[[], int]) -> None:
        """`offset_ns`: what the wall clock said, or would have, when that clock was at 0."""
        self._tracer = tracer
        self._offset_ns = offset_ns

    def record(
        self,
        name: str,
        parent: Context,
        start: float,
        end: float,
        attributes: Mapping[str, AttributeValue],
        links: Sequence[Link] = (),
    ) -> None:
        """Its parent is the context's span."""
        offset_ns = self._offset_ns()
        start_ns, end_ns = (offset_ns + round(seconds * 1e9) for seconds in (start, end))
        span = self._tracer.start_span(name, parent, SpanKind.INTERNAL, attributes, links, start_time=start_ns)
        span.end(max(start_ns, end_ns))
