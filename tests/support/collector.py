"""An OpenTelemetry collector that keeps what comes, spans of Envoy's and of ours alike."""

import threading
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
        self.url = ""
        self._spans: list[Span] = []
        self._changed = threading.Condition()

    def take(self, request: ExportTraceServiceRequest) -> None:
        come = spans_of(TracesData(resource_spans=request.resource_spans).SerializeToString())
        with self._changed:
            self._spans += come
            self._changed.notify_all()

    @property
    def address(self) -> str:
        """host:port."""
        return self.url.removeprefix("http://")

    @property
    def spans(self) -> list[Span]:
        """All that have come, earliest first."""
        with self._changed:
            return sorted(self._spans, key=lambda span: span.start_ns)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def of(self, service: str, trace_id: str) -> list[Span]:
        return [span for span in self.spans if (span.service, span.trace_id) == (service, trace_id)]

    def wait(self, ready: Callable[[list[Span]], bool]) -> list[Span]:
        """All spans, once they are as `ready` wants them."""
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self._spans), PATIENCE_S), self._told()
        return self.spans

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        try:
            await until(reached, what, PATIENCE_S)
        except AssertionError as error:
            error.add_note(self._told())
            raise

    def _told(self) -> str:
        return f"of {Counter((span.service, span.name, span.kind) for span in self._spans)}"


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with working(take=collector.take) as url:
        collector.url = url
        yield collector
