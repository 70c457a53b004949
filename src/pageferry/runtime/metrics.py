"""A process's Prometheus metrics: what all services have, and what their own are made of.

Labels take values from fixed sets, so that series stay few, and there are from the start, so that rates see the first
event. What is observed for each token or request is bound to its series beforehand.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from opentelemetry.trace import Span, format_trace_id
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pageferry import __version__
from pageferry.runtime.scrapes import Scrapes
from pageferry.runtime.tls import Certificates

# Of all durations: neighbours differ by a factor of 2 at most, from 1 ms to the longest lease that can be set, an hour.
SECONDS = (*(float(f"{factor}e{power}") for power in range(-3, 3) for factor in (1, 2, 3, 5)), 1000.0, 2000.0, 3600.0)
SILENCE_S = 10.0  # of a connection, whose thread then ends
OTHER = "other"
OUTCOMES = (
    "stop",
    "length",
    "repetition",
    "handed_over",
    "cancelled",
    "deadline_exceeded",
    "invalid_argument",
    "unauthenticated",
    "permission_denied",
    "not_found",
    "already_exists",
    "failed_precondition",
    "resource_exhausted",
    "unimplemented",
    "aborted",
    "unavailable",
    "data_loss",
    "internal",
    OTHER,
)
TOKEN_KINDS = ("prompt", "cached", "generated")
_Series = TypeVar("_Series", Counter, Histogram)


def bound(metric: _Series, values: Iterable[str]) -> dict[str, _Series]:
    """The series of each value of the metric's one label."""
    return {value: metric.labels(value) for value in values}


def exemplar_of(span: Span) -> dict[str, str] | None:
    """What leads from an observation to the trace; None where none is kept."""
    context = span.get_span_context()
    return {"trace_id": format_trace_id(context.trace_id)} if context.trace_flags.sampled else None


class Reading(Collector):
    """A gauge, or a counter, that is read whenever metrics are: `read` gives labels' values, and the value."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry, is_counter: bool = False
    ) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self.type = "counter" if is_counter else "gauge"
        self.read: Callable[[], Iterable[tuple[Sequence[str], float]]] = lambda: ()
        registry.register(self)

    def follow(self, read: Callable[[], float]) -> None:
        """Of one without labels."""
        self.read = lambda: [((), read())]

    def describe(self) -> list[Any]:
        return [self._family()]

    def collect(self) -> list[Any]:
        family = self._family()
        for values, value in self.read():
            family.add_metric(values, value)
        return [family]

    def _family(self) -> GaugeMetricFamily | CounterMetricFamily:
        make = CounterMetricFamily if self.type == "counter" else GaugeMetricFamily
        return make(self.name, self.text, labels=self.labels)


class Metrics:
    """What every process counts, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # which double the series, and which nothing reads
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        reading = partial(Reading, registry=self.registry)
        requests = counter("pageferry_requests", "Requests ended, by outcome.", ("outcome",))
        tokens = counter("pageferry_tokens", "Tokens of prompts, of them found cached, and generated.", ("kind",))
        self._requests, self._tokens = bound(requests, OUTCOMES), bound(tokens, TOKEN_KINDS)
        self._open_calls = reading("pageferry_open_calls", "Calls that a drain would wait for.")
        self._lost_spans = counter("pageferry_spans_lost", "Spans that ended and could not be sent to the collector.")
        build = reading("pageferry_build_info", "1, with the version that runs.", ("version",))
        build.read = lambda: [((__version__,), 1)]
        ProcessCollector(registry=self.registry)

    def follow_open_calls(self, num_open: Callable[[], int]) -> None:
        """Ask for the number of open calls whenever metrics are read."""
        self._open_calls.follow(num_open)

    def count_lost_spans(self, num_spans: int) -> None:
        """Any thread may call."""
        self._lost_spans.inc(num_spans)

    def count_request(self, outcome: str) -> None:
        """`outcome` is a finish reason or the lower-case name of a status code; an unknown one counts as "other"."""
        self._requests[outcome if outcome in self._requests else OTHER].inc()

    def count_tokens(self, *, prompt: int = 0, cached: int = 0, generated: int = 0) -> None:
        """`cached`: tokens found in the prefix cache; those of the prompt count, so that a hit ratio is at most 1."""
        for kind, number in (("prompt", prompt), ("cached", min(cached, prompt)), ("generated", generated)):
            self._tokens[kind].inc(number)

    def serve(self, host: str, port: int, certificates: Certificates | None = None) -> None:
        """Answer /metrics on its own port and thread until the process ends; with certificates, as peers are."""
        shown: dict[str, Any] = {}
        if certificates is not None:
            files = certificates.files
            ca = files.ca or None
            shown = {
                "certfile": files.cert,
                "keyfile": files.key,
                "client_cafile": ca,
                "client_auth_required": bool(ca),
            }
        server: Any = start_http_server(port, host, self.registry, **shown)[0]
        server.set_app(Scrapes(self.registry).answer)
        server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": SILENCE_S})
        server.handle_error = lambda *_: None  # of a connection that broke, by whomever: it would print a traceback
        if certificates is not None:
            server.socket.do_handshake_on_connect = (
                False  # each connection's thread does: a silent one holds up no other
            )
            certificates.follow(server.socket.context)
