"""Spans go to a collector where one is configured; what one that is away costs is in faults/cases/test_tracing.py."""

import threading
from pathlib import Path

import pytest
from cluster import connected, generate, greedy, running
from collectors import working
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from traces import SPLIT_SPANS, Span, counts, orphans, spans_of

PATIENCE_S = 30


class Sink:
    """Keeps what a collector is sent."""

    def __init__(self) -> None:
        self._data = TracesData()
        self._changed = threading.Condition()

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            self._data.resource_spans.extend(request.resource_spans)
            self._changed.notify_all()

    @property
    def spans(self) -> list[Span]:
        return spans_of(self._data.SerializeToString())

    def wait(self) -> list[Span]:
        """All spans, once those of a request that was handed over are there."""
        with self._changed:
            assert self._changed.wait_for(lambda: not SPLIT_SPANS - counts(self.spans), PATIENCE_S), counts(self.spans)
            return self.spans


@pytest.mark.field("open-telemetry/opentelemetry-python#4215", "open-telemetry/opentelemetry-python#1567")
async def test_every_process_that_up_starts_sends_its_spans_and_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink()
    with working(take=sink.take) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        settings = {"router.local_prefill_tokens": "0"}
        arguments = ("--prefill", "1", "--decode", "1", "--model", str(tiny_model))
        with running(*arguments, settings=settings) as cluster:
            async with connected(cluster) as stub:
                await generate(stub, greedy([8] * 60, 5))
            spans = sink.wait()
    assert len({span.service for span in spans}) == 3
    assert orphans(spans) == []
