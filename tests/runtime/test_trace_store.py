"""The traces that a router keeps: found by any of their names, bounded, workers' spans beside its own."""

import os
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData
from opentelemetry.trace import NoOpTracer

from pageferry.core.config import ServerConfig, TelemetryConfig
from pageferry.core.errors import NotFoundError
from pageferry.runtime import trace_store
from pageferry.runtime.channels import open_channel
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.telemetry import configure_tracing
from pageferry.runtime.trace_store import TraceReceiver, TraceStore


def text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def group(service: str, *spans: Span) -> ResourceSpans:
    return ResourceSpans(
        resource=Resource(attributes=[text("service.name", service)]), scope_spans=[ScopeSpans(spans=spans)]
    )


def a_span(trace_id: bytes, name: str, request_id: str = "") -> Span:
    attributes = [text("pageferry.request_id", request_id)] if request_id else []
    return Span(trace_id=trace_id, span_id=os.urandom(8), name=name, attributes=attributes)


def names(traces_data: bytes) -> list[tuple[str, str]]:
    return [
        (resource.resource.attributes[0].value.string_value, span.name)
        for resource in TracesData.FromString(traces_data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def trace_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_trace_is_found_by_all_its_names() -> None:
    store = TraceStore(10)
    one, two = trace_id(1), trace_id(2)
    store.add([group("router", a_span(one, "pageferry.request", "req-1"), a_span(one, "queue"))])
    store.add([group("prefill", a_span(one, "prefill.chunk"))])
    store.add([group("router", a_span(two, "pageferry.request", "req-2"))])
    store.add([group("router", a_span(one, "route"))])
    whole = [("router", "pageferry.request"), ("router", "queue"), ("router", "route"), ("prefill", "prefill.chunk")]
    assert names(store.get("req-1")) == whole
    assert names(store.get(one.hex())) == names(store.get(one.hex().upper())) == whole
    assert store.find("") == two.hex()
    assert names(store.get("")) == [("router", "pageferry.request")]


@pytest.mark.parametrize("name", ["", "req-9", "f" * 32, "z" * 32, "ff"])
def test_a_trace_that_is_not_there(name: str) -> None:
    store = TraceStore(10)
    for lookup in (store.find, store.get):
        with pytest.raises(NotFoundError, match="among the last 10 traces kept"):
            lookup(name)


def test_the_trace_touched_longest_ago_is_forgotten_first() -> None:
    store = TraceStore(2)
    store.add([group("r", a_span(trace_id(1), "pageferry.request", "req-1"))])
    store.add([group("r", a_span(trace_id(2), "pageferry.request", "req-2"))])
    store.add([group("r", a_span(trace_id(1), "late"))])
    store.add([group("r", a_span(trace_id(3), "pageferry.request", "req-3"))])
    assert [bool(store.find(name)) for name in ("req-1", "req-3")] == [True, True]
    with pytest.raises(NotFoundError):
        store.find("req-2")
    assert len(store) == 2


def test_a_request_id_used_again_names_the_later_trace() -> None:
    store = TraceStore(2)
    for number in (1, 2, 3):
        store.add([group("r", a_span(trace_id(number), "pageferry.request", "same"))])
    assert store.find("same") == trace_id(3).hex()


def test_spans_of_a_trace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_store, "MAX_SPANS_PER_TRACE", 3)
    store = TraceStore(2)
    assert store.add([group("r", *(a_span(trace_id(1), f"s{number}") for number in range(5)))]) == 2
    assert len(names(store.get(trace_id(1).hex()))) == 3


def test_a_span_that_is_sent_again_is_there_once() -> None:
    store = TraceStore(2)
    spans = [a_span(trace_id(1), "pageferry.request"), a_span(trace_id(1), "queue")]
    assert store.add([group("r", spans[0])]) == 0
    assert store.add([group("r", *spans)]) == 0
    assert names(store.get("")) == [("r", "pageferry.request"), ("r", "queue")]


def test_spans_without_a_proper_trace_id_are_rejected() -> None:
    store = TraceStore(2)
    assert store.add([group("r", a_span(b"short", "x"))]) == 1
    assert len(store) == 0


def test_local_spans_are_there_as_soon_as_they_end() -> None:
    store = TraceStore(2)
    tracing = configure_tracing("pageferry-router", TelemetryConfig(), local_exporter=store)
    span = tracing.tracer.start_span("pageferry.request", attributes={"pageferry.request_id": "req-1"})
    span.end()
    assert store.find("req-1") == f"{span.get_span_context().trace_id:032x}"
    assert [name for _, name in names(store.get("req-1"))] == ["pageferry.request"]
    tracing.shutdown()


async def test_workers_send_their_spans() -> None:
    store = TraceStore(2)
    async with GrpcServer(ServerConfig(max_message_bytes=16 * 2**20), NoOpTracer()) as server:
        register = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        server.add(register, TraceReceiver(store), "opentelemetry.proto.collector.trace.v1.TraceService")
        port = await server.start()
        async with open_channel(f"127.0.0.1:{port}", NoOpTracer()) as channel:
            stub: Any = trace_service_pb2_grpc.TraceServiceStub(channel)
            request = trace_service_pb2.ExportTraceServiceRequest
            answer = await stub.Export(request(resource_spans=[group("decode", a_span(trace_id(5), "decode.queue"))]))
            assert answer.partial_success.rejected_spans == 0
            assert names(store.get(trace_id(5).hex())) == [("decode", "decode.queue")]
            with pytest.raises(grpc.aio.AioRpcError, match="the limit is 4194304") as caught:
                await stub.Export(request(resource_spans=[group("d", a_span(trace_id(6), "x" * (4 * 2**20 + 1)))]))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
