"""An OpenTelemetry collector that keeps what comes, spans of Envoy's and of ours alike."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from collectors import working
from moments import until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from traces import Span, spans_of

PATIENCE_S = 60.0


class Collector:
    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Span] = []

    def take(self, request: ExportTraceServiceRequest) -> None:
        self.spans += spans_of(TracesData(resource_spans=request.resource_spans).SerializeToString())

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def of(self, service: str, trace_id: str) -> list[Span]:
        return [span for span in self.spans if (span.service, span.trace_id) == (service, trace_id)]

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        try:
            await until(reached, what, PATIENCE_S)
        except AssertionError as error:
            error.add_note(f"of {Counter((span.service, span.name) for span in self.spans)}")
            raise


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with working(take=collector.take) as url:
        collector.address = url.removeprefix("http://")
        yield collector
