"""Where spans go, and that a collector that is away holds nothing up."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from collectors import closed_port, stuck
from loopback import free_port
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import NoOpTracer
from spans import SpanLog, assert_one_tree

from pageferry.core.config import ServerConfig, TelemetryConfig
from pageferry.core.errors import InvalidArgumentError
from pageferry.runtime import span_export
from pageferry.runtime.rpc_spans import extract_context
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.telemetry import PastSpans, configure_tracing
from pageferry.runtime.trace_store import TraceReceiver, TraceStore

PROCESS = """
import sys
from pageferry.core.config import TelemetryConfig
from pageferry.runtime import telemetry
from pageferry.runtime.logs import configure_logging
telemetry.EXPORT_TIMEOUT_S = 3600.0  # which whoever waits for the collector waits for
configure_logging("test", "info")
tracing = telemetry.configure_tracing("test", TelemetryConfig(otlp_endpoint=sys.argv[1]))
for _ in range(100):
    with tracing.tracer.start_as_current_span("request"):
        pass
tracing.shutdown()
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT", "TRACES_SAMPLER", "TRACES_SAMPLER_ARG"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


@pytest.mark.parametrize("away", [closed_port, stuck])
def test_a_collector_that_is_away_holds_up_neither_spans_nor_the_end(
    away: Callable[[], AbstractContextManager[str]],
) -> None:
    with away() as url:
        command = [sys.executable, "-c", PROCESS, url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) <= 2, "a line when sending begins to fail, and one with what was lost"
    assert any("spans_lost" in line and '"spans": 100' in line for line in lines)
    assert span_export.SHUTDOWN_S < 5, "all that the end waits for"


@pytest.mark.parametrize("scheme", ["", "http://"])
async def test_spans_reach_a_collector(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "SHUTDOWN_S", 60)
    store = TraceStore(4)
    async with GrpcServer(ServerConfig(), NoOpTracer()) as server:
        register = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        server.add(register, TraceReceiver(store), "opentelemetry.proto.collector.trace.v1.TraceService")
        port = await server.start()
        tracing = configure_tracing("pageferry-decode", TelemetryConfig(otlp_endpoint=f"{scheme}127.0.0.1:{port}"))
        span = tracing.tracer.start_span("decode.queue")
        span.end()
        trace_id = f"{span.get_span_context().trace_id:032x}"
        await asyncio.to_thread(tracing.shutdown)  # as from another process: the collector runs on this loop
        assert store.find(trace_id) == trace_id


async def test_spans_outlast_a_collector_that_starts_again() -> None:
    store, port = TraceStore(4), free_port()
    with socket.create_server(("127.0.0.1", port)) as ending:
        tracing = configure_tracing("pageferry-decode", TelemetryConfig(otlp_endpoint=f"127.0.0.1:{port}"))
        tracing.tracer.start_span("decode.queue").end()
        connection, _ = await asyncio.to_thread(ending.accept)
        connection.close()  # so ends the first try
    async with GrpcServer(ServerConfig(port=port), NoOpTracer()) as server:
        register = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        server.add(register, TraceReceiver(store), "opentelemetry.proto.collector.trace.v1.TraceService")
        await server.start()
        end = time.monotonic() + 60
        while not len(store):
            assert time.monotonic() < end, "the span never came"
            await asyncio.sleep(0.02)
        await asyncio.to_thread(tracing.shutdown)


async def test_the_environment_wins_over_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TraceStore(4)
    tracing = configure_tracing("x", TelemetryConfig(otlp_endpoint=""), local=store)
    tracing.tracer.start_span("local").end()
    tracing.shutdown()
    assert len(store) == 1
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracing = configure_tracing("x", TelemetryConfig(otlp_endpoint="127.0.0.1:2"), local=store)
    assert tracing._queue is not None
    assert tracing._queue.endpoint == "http://127.0.0.1:1"
    tracing.tracer.start_span("sent").end()
    tracing.shutdown()
    assert len(store) == 1


def test_without_any_endpoint_nothing_is_kept() -> None:
    tracing = configure_tracing("x", TelemetryConfig())
    tracing.tracer.start_span("nowhere").end()
    tracing.shutdown()


async def test_a_recorded_span_has_its_own_times_and_its_contexts_parent() -> None:
    log = SpanLog()
    tracer = log.tracer()
    parent = tracer.start_span("pageferry.request", start_time=1_000)
    context = trace.set_span_in_context(parent)
    spans = PastSpans(tracer, lambda: 1_000)
    spans.record("queue", context, 1e-6, 4e-6, {"pageferry.priority": 3})
    spans.record("never negative", context, 6e-6, 5e-6, {})
    parent.end(9_000)
    queue, backwards, _ = log.spans
    assert_one_tree(log.spans)
    assert times(queue) == (2_000, 5_000)
    assert times(backwards) == (7_000, 7_000)
    assert dict(queue.attributes or {}) == {"pageferry.priority": 3}


def times(span: ReadableSpan) -> tuple[int | None, int | None]:
    return span.start_time, span.end_time


def test_the_resource_names_service_and_instance() -> None:
    store = TraceStore(1)
    tracing = configure_tracing("pageferry-prefill", TelemetryConfig(), local=store, instance_id="abc")
    span = tracing.tracer.start_span("x")
    assert isinstance(span, ReadableSpan)
    assert span.resource.attributes["service.name"] == "pageferry-prefill"
    assert span.resource.attributes["service.instance.id"] == "abc"
    span.end()


def sampled(num_traces: int, sample_ratio: float, parent: str = "") -> int:
    """How many of the traces that begin here, or with a caller, are sampled."""
    store = TraceStore(num_traces)
    tracing = configure_tracing("x", TelemetryConfig(), local=store, sample_ratio=sample_ratio)
    for number in range(1, num_traces + 1):
        metadata = [("traceparent", f"00-{number:032x}-00000000000000ab-{parent}")] if parent else []
        tracing.tracer.start_span("pageferry.request", extract_context(metadata)).end()
    return len(store)


@pytest.mark.parametrize(
    ("ratio", "parent", "expected"), [(1.0, "", 50), (0.0, "", 0), (0.0, "01", 50), (1.0, "00", 0), (0.5, "01", 50)]
)
def test_the_callers_flag_decides_and_the_ratio_where_there_is_none(ratio: float, parent: str, expected: int) -> None:
    assert sampled(50, ratio, parent) == expected


def test_a_ratio_is_one_of_traces() -> None:
    assert 300 < sampled(1000, 0.4) < 500  # by six standard deviations


@pytest.mark.parametrize(
    ("sampler", "argument", "parent", "expected"),
    [
        ("always_on", "", "00", 20),
        ("always_off", "", "01", 0),
        ("parentbased_always_on", "", "00", 0),
        ("parentbased_always_off", "", "", 0),
        ("parentbased_always_off", "", "01", 20),
        ("parentbased_traceidratio", "0", "", 0),
        ("parentbased_traceidratio", "0.0", "01", 20),
        ("traceidratio", "", "", 20),
    ],
)
def test_the_sampler_of_the_environment_wins(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, parent: str, expected: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    assert sampled(20, 0.5 if expected else 1.0, parent) == expected


@pytest.mark.parametrize(
    ("sampler", "argument", "message"),
    [
        ("sometimes", "", "OTEL_TRACES_SAMPLER is 'sometimes', must be one of always_on"),
        ("traceidratio", "half", "OTEL_TRACES_SAMPLER_ARG is 'half', must be a number from 0 to 1"),
        ("parentbased_traceidratio", "1.5", "OTEL_TRACES_SAMPLER_ARG is '1.5', must be a number from 0 to 1"),
    ],
)
def test_a_sampler_that_is_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, message: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    with pytest.raises(InvalidArgumentError, match=message):
        configure_tracing("x", TelemetryConfig())


def test_headers_that_are_wrong_are_not_repeated_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    configure_tracing("test", TelemetryConfig())
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
    for given, state in ((traceparent, "=secret"), (traceparent, "a=b," * 3000), (traceparent + "-" * 600, "a=b")):
        extract_context([("traceparent", given), ("tracestate", state)])
    assert not caplog.records
