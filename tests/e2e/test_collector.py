"""Spans go to a collector where one is configured."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cluster import connected, generate, greedy, running
from loopback import free_port
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from traces import SPLIT_SPANS, Span, counts, orphans, spans_of

PATIENCE_S = 20


class Sink(TraceServiceServicer):  # type: ignore[misc]
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self._data = TracesData()
        self._changed = threading.Condition()

    def Export(self, request: collector.ExportTraceServiceRequest, context: object) -> object:
        with self._changed:
            self._data.resource_spans.extend(request.resource_spans)
            self._changed.notify_all()
        return collector.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        return spans_of(self._data.SerializeToString())

    def wait(self) -> list[Span]:
        """All spans, once those of a request that was handed over are there."""
        with self._changed:
            assert self._changed.wait_for(lambda: not SPLIT_SPANS - counts(self.spans), PATIENCE_S), counts(self.spans)
            return self.spans


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    """A collector that the processes started from here send to."""
    sink = Sink()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield sink
    server.stop(0).wait()


async def test_all_processes_export_to_the_collector(sink: Sink, tiny_model: Path) -> None:
    settings = {"router.local_prefill_tokens": "0"}
    arguments = ("--prefill", "1", "--decode", "1", "--model", str(tiny_model))
    with running(*arguments, settings=settings) as cluster:
        async with connected(cluster) as stub:
            await generate(stub, greedy([8] * 60, 5))
        spans = sink.wait()
    assert len({span.service for span in spans}) == 3
    assert orphans(spans) == []


async def test_a_collector_that_is_away_delays_nobody(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    arguments = ("--prefill", "1", "--decode", "1", "--model", str(tiny_model))
    with running(*arguments) as cluster:
        async with connected(cluster) as stub:
            for number in range(20):
                await generate(stub, greedy([8 + number] * 60, 5), timeout_s=5)
        assert cluster.stop(timeout_s=30) == 0
