"""The traces that a router keeps: found by any of their names, bounded, workers' spans beside its own."""

import contextlib
import os
from typing import Any

import grpc
import pytest
from fake_trace import of_service as group, value
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData
from opentelemetry.trace import NoOpTracer, Tracer, set_span_in_context

from pageferry.core.config import ServerConfig, TelemetryConfig
from pageferry.core.errors import NotFoundError
from pageferry.runtime import kept_trace, trace_store
from pageferry.runtime.channels import open_channel
from pageferry.runtime.rpc_spans import extract_context
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.telemetry import configure_tracing
from pageferry.runtime.trace_store import TraceReceiver, TraceStore


def text(key: str, text: str) -> KeyValue:
    return KeyValue(key=key, value=value(text))


def a_span(trace_id: bytes, name: str, request_id: str = "") -> Span:
    attributes = [text("pageferry.request_id", request_id)] if request_id else []
    return Span(trace_id=trace_id, span_id=os.urandom(8), name=name, attributes=attributes)


def names(traces_data: bytes) -> list[tuple[str, str]]:
    return [
        (attribute.value.string_value, span.name)
        for resource in TracesData.FromString(traces_data).resource_spans
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def trace_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def tracer_of(store: TraceStore) -> Tracer:
    """For spans of the store's own process, the router."""
    return configure_tracing("router", TelemetryConfig(), local=store).tracer


def serve(tracer: Tracer, number: int, *, seconds: float = 0.1, error: str = "", request_id: str = "") -> None:
    """A request that the router itself has served, in the trace of that number."""
    context = extract_context([("traceparent", f"00-{number:032x}-00000000000000ab-01")])
    attributes = {"pageferry.request_id": request_id or f"req-{number}"} | ({"error.type": error} if error else {})
    tracer.start_span("pageferry.request", context, attributes=attributes, start_time=0).end(round(seconds * 1e9))


def test_a_trace_is_found_by_all_its_names() -> None:
    store = TraceStore(10)
    one, two = trace_id(1), trace_id(2)
    tracer = tracer_of(store)
    serve(tracer, 1)
    store.add([group("prefill", a_span(one, "prefill.chunk"))])
    serve(tracer, 2)
    store.add([group("prefill", a_span(one, "kv.push"), a_span(two, "kv.push"))])
    whole = [("router", "pageferry.request"), ("prefill", "prefill.chunk"), ("prefill", "kv.push")]
    assert names(store.get("req-1")) == whole
    assert names(store.get(one.hex())) == names(store.get(one.hex().upper())) == whole
    assert store.find("") == two.hex()
    assert names(store.get("")) == [whole[0], whole[-1]]


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
    tracer = tracer_of(store)
    for number in (1, 2, 3):
        serve(tracer, number, request_id="same")
    assert store.find("same") == trace_id(3).hex()


def test_a_request_of_another_router_is_found_by_its_id_and_is_not_the_latest() -> None:
    store = TraceStore(10)
    tracer_of(store).start_span("pageferry.pick").end()
    store.add([group("beside", a_span(trace_id(1), "pageferry.request", "req-1"))])
    assert store.find("req-1") == trace_id(1).hex()
    with pytest.raises(NotFoundError):
        store.find("")
    store.add([group("beside", a_span(trace_id(2), "pageferry.request", "req-1"))])
    assert store.find("req-1") == trace_id(1).hex()


@pytest.mark.parametrize("comes", ["before", "meanwhile", "after"])
def test_a_forged_span_takes_no_request_s_name(comes: str) -> None:
    """Not its id, nor its trace's, nor that of the latest one."""
    store = TraceStore(10)
    tracer = tracer_of(store)
    hexed = trace_id(0xAB).hex()
    forged = [a_span(trace_id(666), "pageferry.request", name) for name in ("mine", trace_id(1).hex())]
    forged.append(a_span(trace_id(0xAB), "pageferry.request"))
    if comes == "before":
        store.add([group("router", *forged)])
    serve(tracer, 2, request_id=hexed)
    context = extract_context([("traceparent", f"00-{1:032x}-00000000000000ab-01")])
    live = tracer.start_span("pageferry.request", context, attributes={"pageferry.request_id": "mine"})
    if comes == "meanwhile":
        store.add([group("router", *forged)])
        assert store.find("mine") == trace_id(1).hex()
    live.end()
    if comes == "after":
        store.add([group("router", *forged)])
    assert [store.find(name) for name in ("mine", trace_id(1).hex(), "")] == [trace_id(1).hex()] * 3
    assert store.find(hexed) == trace_id(2).hex()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_forged_span_stands_in_no_place_of_an_own_one(is_first: bool) -> None:
    store = TraceStore(10)
    span = tracer_of(store).start_span("pageferry.request")
    context = span.get_span_context()
    own_id, forged_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
    forged = group("router", Span(trace_id=own_id, span_id=forged_id, name="forged"), a_span(own_id, "queue"))
    if is_first:
        assert store.add([forged]) == 0
    span.end()
    store.add([forged])
    assert names(store.get("")) == [("router", "pageferry.request"), ("router", "queue")]


def test_forged_spans_take_no_room_from_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_trace, "MAX_SPANS_PER_TRACE", 3)
    store = TraceStore(6, 1)
    tracer = tracer_of(store)
    store.add([group("router", *(a_span(trace_id(1), f"s{number}") for number in range(5)))])
    for number in (1, 2, 3, 4):
        serve(tracer, number, error="INTERNAL" if number == 1 else "")
    store.add([group("router", *(ended(number, error="INTERNAL") for number in range(5, 30)))])
    assert kept(store, range(30)) == [1, 3, 4, 27, 28, 29]
    assert names(store.get("req-1"))[0] == ("router", "pageferry.request")
    monkeypatch.setattr(trace_store, "MAX_BYTES", 5000)
    store.add([group("router", a_span(trace_id(30), "x" * 4900))])
    assert kept(store, range(30)) == [1, 3, 4]


def test_spans_of_a_trace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_trace, "MAX_SPANS_PER_TRACE", 3)
    store = TraceStore(2)
    assert store.add([group("r", *(a_span(trace_id(1), f"s{number}") for number in range(5)))]) == 2
    assert len(names(store.get(trace_id(1).hex()))) == 3
    tracer = tracer_of(store)
    for _ in range(5):
        serve(tracer, 1)
    assert len(names(store.get("req-1"))) == 6


def test_bytes_of_a_trace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_trace, "MAX_TRACE_BYTES", 5000)
    store = TraceStore(2)
    large = [a_span(trace_id(1), "x" * 2000) for _ in range(4)]
    assert store.add([group("r", *large)]) == 2
    assert store.add([group("x" * 2000, a_span(trace_id(1), "small"))]) == 1  # with what sent it, it is not small
    steps = [a_span(trace_id(50), "decode.step") for _ in range(9)]
    for step in steps:
        step.links.add(trace_id=trace_id(1), span_id=b"x" * 200)
    assert store.add([group("r", *steps)]) == 0
    assert 4 <= len(names(store.get(trace_id(1).hex()))) < 11


def test_bytes_of_all_traces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_store, "MAX_BYTES", 5000)
    store = TraceStore(100, 50, 5.0)
    for number in range(20):
        store.add([group("r", ended(number, error="INTERNAL"), a_span(trace_id(number), "x" * 900))])
    assert kept(store, range(20)) == [16, 17, 18, 19]
    store.add([group("r", *(a_span(trace_id(19), f"s{number}", "x" * 900) for number in range(5)))])
    assert len(store) <= 1


def test_a_live_trace_makes_others_go_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_store, "MAX_BYTES", 5000)
    monkeypatch.setattr(kept_trace, "OWN_SPAN_BYTES", 1000)
    store = TraceStore(100)
    tracer = tracer_of(store)
    live = tracer.start_span("pageferry.request", attributes={"pageferry.request_id": "req-0"})
    for number in range(9):
        tracer.start_span(f"part {number}", set_span_in_context(live)).end()
    store.add([group("r", ended(1))])
    assert len(store) == 1
    assert len(names(store.get(f"{live.get_span_context().trace_id:032x}"))) == 9


def test_a_span_that_is_sent_again_is_there_once() -> None:
    store = TraceStore(2)
    spans = [a_span(trace_id(1), "pageferry.request"), a_span(trace_id(1), "queue")]
    assert store.add([group("r", spans[0])]) == 0
    assert store.add([group("r", *spans)]) == 0
    assert names(store.get(trace_id(1).hex())) == [("r", "pageferry.request"), ("r", "queue")]


def test_a_step_is_kept_with_the_traces_of_its_requests_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_store, "MAX_STEP_SPANS", 3)
    store = TraceStore(2)
    for number in (1, 2):
        store.add([group("router", a_span(trace_id(number), "pageferry.request", f"req-{number}"))])
    steps = [a_span(trace_id(50 + number), "decode.step") for number in range(5)]
    for step in steps:
        step.links.extend(Span.Link(trace_id=trace_id(number), span_id=b"12345678") for number in (1, 9))
    assert store.add([group("decode", *steps)]) == store.add([group("decode", *steps[:1])]) == 0
    assert names(store.get("req-1")) == [("router", "pageferry.request"), *2 * [("decode", "decode.step")]]
    assert names(store.get("req-2")) == [("router", "pageferry.request")]
    assert len(store) == 2


def test_steps_take_little_memory_however_many_requests_they_are_linked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    num_copies = 0

    def copy() -> Span:
        nonlocal num_copies
        num_copies += 1
        return Span()

    store = TraceStore(100)
    store.add([group("router", *(a_span(trace_id(number), "pageferry.request") for number in range(9)))])
    step = a_span(trace_id(50), "decode.step")
    step.links.extend(Span.Link(trace_id=trace_id(number), span_id=b"12345678") for number in range(9))
    for module in (kept_trace, trace_store):
        monkeypatch.setattr(module, "Span", copy)
    store.add([group("decode", step)])
    assert num_copies == 1
    assert len(store) == 9
    monkeypatch.setattr(trace_store, "MAX_BYTES", 1000)
    store.add([group("decode", step)])
    assert 1 <= len(store) < 9


def test_spans_without_proper_ids_are_rejected() -> None:
    store = TraceStore(2)
    assert store.add([group("r", a_span(b"short", "x"))]) == 1
    for span_id in (b"", b"1234567", b"x" * 400):  # every root would be a child of one without
        assert store.add([group("r", Span(trace_id=trace_id(1), span_id=span_id, name="x"))]) == 1
    assert len(store) == 0


def test_local_spans_are_there_as_soon_as_they_end() -> None:
    store = TraceStore(2)
    tracing = configure_tracing("pageferry-router", TelemetryConfig(), local=store)
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


def ended(number: int, *, seconds: float = 0.1, error: str = "") -> Span:
    """The span of a request that is over."""
    span = a_span(trace_id(number), "pageferry.request", f"req-{number}")
    span.end_time_unix_nano = round(seconds * 1e9)
    if error:
        span.attributes.append(text("error.type", error))
    return span


def kept(store: TraceStore, numbers: range) -> list[int]:
    found = []
    for number in numbers:
        with contextlib.suppress(NotFoundError):
            store.find(f"req-{number}")
            found.append(number)
    return found


@pytest.mark.parametrize(
    ("seconds", "error", "is_kept"),
    [
        (0.1, "INTERNAL", True),
        (0.1, "UNAVAILABLE", True),
        (0.1, "DEADLINE_EXCEEDED", True),
        (5, "", True),
        (5, "CANCELLED", True),
        (4.9, "", False),
        (0.1, "CANCELLED", False),
        (0.1, "INVALID_ARGUMENT", False),
        (0.1, "RESOURCE_EXHAUSTED", False),
    ],
)
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "of another router"])
def test_what_failed_or_was_slow_is_kept_when_others_push_it_out(
    is_own: bool, seconds: float, error: str, is_kept: bool
) -> None:
    store = TraceStore(4, 2, 5.0)
    tracer = tracer_of(store)
    if is_own:
        serve(tracer, 1, seconds=seconds, error=error)
    else:  # that it was sent to by a choice of ours
        serve(tracer, 1)
        store.add([group("beside", ended(1, seconds=seconds, error=error))])
    for number in range(2, 11):
        serve(tracer, number)
    assert kept(store, range(1, 11)) == ([1, 8, 9, 10] if is_kept else [7, 8, 9, 10])
    store.add([group("decode", a_span(trace_id(1), "decode.generate"))])  # as workers do, after the request's end
    assert names(store.get(trace_id(1).hex()))[-1] == ("decode", "decode.generate")
    assert len(names(store.get(trace_id(1).hex()))) == (1 + is_kept if is_own else 1 + 2 * is_kept)


def test_the_last_failures_are_kept_and_never_all_there_is_room_for() -> None:
    store = TraceStore(4, 2, 5.0)
    for number in range(1, 11):
        serve(tracer_of(store), number, error="INTERNAL" if number <= 4 else "")
    assert kept(store, range(1, 11)) == [3, 4, 9, 10]
    full = TraceStore(2, 64, 5.0)
    for number in range(1, 6):
        serve(tracer_of(full), number, error="INTERNAL" if number <= 4 else "")
    assert kept(full, range(1, 6)) == [4, 5]


def test_what_is_told_of_a_live_request_outlasts_many_others() -> None:
    store = TraceStore(2, 1, 5.0)
    tracer = tracer_of(store)
    live = tracer.start_span("pageferry.request", start_time=0)
    context = set_span_in_context(live)
    tracer.start_span("queue", context).end()
    live_id = live.get_span_context().trace_id.to_bytes(16, "big")
    store.add([group("prefill", a_span(live_id, "prefill.chunk"))])
    for number in range(1, 9):
        tracer.start_span("pageferry.request", attributes={"pageferry.request_id": f"req-{number}"}).end()
    assert kept(store, range(9)) == [7, 8]
    live.end(6_000_000_000)
    for number in range(11, 19):
        serve(tracer, number)
    whole = ["queue", "pageferry.request", "prefill.chunk"]
    assert [name for _, name in names(store.get(live_id.hex()))] == whole
    assert len(store) == 2


def test_a_trace_of_several_requests_is_live_until_the_last_of_them_ends() -> None:
    store = TraceStore(1)
    tracer = tracer_of(store)
    first = tracer.start_span("pageferry.request")
    context = set_span_in_context(first)
    second = tracer.start_span("pageferry.request", context)
    first.end()
    serve(tracer, 1)
    serve(tracer, 2)
    assert len(names(store.get(f"{first.get_span_context().trace_id:032x}"))) == 1
    second.end()
    serve(tracer, 3)
    assert kept(store, range(1, 4)) == [3]
    assert len(store) == 1
