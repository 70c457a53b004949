"""Spans of calls: one tree whatever the outcome, ended once, with the call's status; and the caller's context."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from loopback import ASK_METHOD, ask_stub, loopback
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from spans import SpanLog, assert_one_tree

from pageferry.core.errors import ResourceExhaustedError
from pageferry.v1 import decode_pb2, decode_pb2_grpc

DECODE = "pageferry.v1.DecodeService/Decode"
REQUEST = decode_pb2.DecodeRequest()


def decode_stub(channel: grpc.aio.Channel) -> Any:
    return decode_pb2_grpc.DecodeServiceStub(channel)


def by_kind(spans: list[ReadableSpan], kind: SpanKind) -> ReadableSpan:
    (span,) = [span for span in spans if span.kind is kind]
    return span


def assert_call(spans: list[ReadableSpan], name: str, client: str, server: str) -> None:
    """A client's span with the server's below it, each with its status."""
    root = assert_one_tree(spans)
    assert (root.name, root.kind) == (name, SpanKind.CLIENT)
    for kind, status in ((SpanKind.CLIENT, client), (SpanKind.SERVER, server)):
        span = by_kind(spans, kind)
        attributes = dict(span.attributes or {})
        assert span.name == attributes["rpc.method"] == name
        assert attributes["rpc.system.name"] == "grpc"
        assert attributes["rpc.response.status_code"] == status
        assert attributes.get("error.type") == (None if status == "OK" else status)
        assert span.status.status_code is (StatusCode.UNSET if status == "OK" else StatusCode.ERROR)


async def three_messages(request: Any, context: Any) -> Any:
    for _ in range(3):
        yield decode_pb2.DecodeResponse()


async def test_a_stream_read_to_its_end() -> None:
    log = SpanLog()
    async with loopback(log.tracer(), decode=three_messages) as (_, channel):
        assert len([message async for message in decode_stub(channel).Decode(REQUEST)]) == 3
        assert_call(await log.wait(2), DECODE, "OK", "OK")


async def test_a_unary_call_and_spans_inside_its_handler() -> None:
    log = SpanLog()
    tracer = log.tracer()

    async def ask(request: StringValue, context: Any) -> StringValue:
        with tracer.start_as_current_span("inside"):
            await asyncio.sleep(0)
        return StringValue(value=request.value * 2)

    async with loopback(tracer, ask=ask) as (_, channel):
        assert (await ask_stub(channel)(StringValue(value="ab"))).value == "abab"
        spans = await log.wait(3)
    inside, *call = sorted(spans, key=lambda span: span.name != "inside")
    assert_one_tree(spans)
    assert inside.parent.span_id == by_kind(call, SpanKind.SERVER).context.span_id
    assert_call(call, ASK_METHOD, "OK", "OK")


@pytest.mark.parametrize("num_read", [0, 1])
async def test_an_error_ends_both_spans_with_its_code(num_read: int) -> None:
    log = SpanLog()

    async def fail(request: Any, context: Any) -> Any:
        for _ in range(num_read):
            yield decode_pb2.DecodeResponse()
        raise ResourceExhaustedError("no pages")

    async with loopback(log.tracer(), decode=fail) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in decode_stub(channel).Decode(REQUEST):
                pass
        assert_call(await log.wait(2), DECODE, "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize("message", [b"\x0a\xff", b"\x0a\x04\x0a\x02\xff\xfe"], ids=["cut short", "not UTF-8"])
async def test_a_malformed_message_is_the_callers_fault(message: bytes) -> None:
    log = SpanLog()
    async with loopback(log.tracer(), decode=three_messages) as (_, channel):
        raw: Any = channel.unary_stream(f"/{DECODE}")
        with pytest.raises(grpc.aio.AioRpcError, match="the message is malformed") as caught:
            await raw(message).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert_call(await log.wait(2), DECODE, "INVALID_ARGUMENT", "INVALID_ARGUMENT")


async def test_a_handlers_own_abort_has_its_code() -> None:
    log = SpanLog()

    async def fail(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.NOT_FOUND, "gone")
        yield

    async with loopback(log.tracer(), decode=fail) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError):
            await decode_stub(channel).Decode(REQUEST).read()
        assert_call(await log.wait(2), DECODE, "NOT_FOUND", "NOT_FOUND")


class Endless:
    """Sends messages for ever; knows when its `finally` has run."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.closed = asyncio.Event()

    async def __call__(self, request: Any, context: Any) -> Any:
        try:
            self.begun.set()
            while True:
                yield decode_pb2.DecodeResponse()
                await asyncio.sleep(0)
        finally:
            self.closed.set()


async def test_a_cancelled_stream_is_cancelled_at_both_ends() -> None:
    log, handler = SpanLog(), Endless()
    async with loopback(log.tracer(), decode=handler) as (_, channel):
        call = decode_stub(channel).Decode(REQUEST)
        for _ in range(3):
            await call.read()
        call.cancel()
        assert_call(await log.wait(2), DECODE, "CANCELLED", "CANCELLED")
        assert handler.closed.is_set(), "the handler has cleaned up before its span ended"


async def test_leaving_the_loop_over_a_stream_and_dropping_it_ends_its_spans() -> None:
    log, handler = SpanLog(), Endless()
    async with loopback(log.tracer(), decode=handler) as (_, channel):

        async def read_one() -> None:
            async for _ in decode_stub(channel).Decode(REQUEST):
                break

        await read_one()
        assert_call(await log.wait(2), DECODE, "CANCELLED", "CANCELLED")


async def test_a_stream_dropped_unread_ends_its_spans() -> None:
    log, handler = SpanLog(), Endless()
    async with loopback(log.tracer(), decode=handler) as (_, channel):
        call = decode_stub(channel).Decode(REQUEST)
        await handler.begun.wait()
        del call
        assert_call(await log.wait(2), DECODE, "CANCELLED", "CANCELLED")


async def test_a_unary_call_cancelled_while_awaited() -> None:
    log, begun = SpanLog(), asyncio.Event()

    async def ask(request: StringValue, context: Any) -> StringValue:
        begun.set()
        await asyncio.Event().wait()
        return request

    async with loopback(log.tracer(), ask=ask) as (_, channel):

        async def caller() -> None:
            await ask_stub(channel)(StringValue())

        task = asyncio.create_task(caller())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_call(await log.wait(2), ASK_METHOD, "CANCELLED", "CANCELLED")


async def test_a_call_cancelled_before_it_was_sent_ends_its_span() -> None:
    log = SpanLog()
    async with loopback(log.tracer(), decode=three_messages) as (_, channel):
        call = decode_stub(channel).Decode(REQUEST)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        (span,) = await log.wait(1)
        assert span.attributes and span.attributes["rpc.response.status_code"] == "CANCELLED"


async def test_a_deadline_ends_the_clients_span_with_its_code() -> None:
    log = SpanLog()

    async def wait(request: Any, context: Any) -> Any:
        await asyncio.Event().wait()
        yield

    async with loopback(log.tracer(), decode=wait) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
            await decode_stub(channel).Decode(REQUEST, timeout=0.05).read()
        while not any(span.kind is SpanKind.CLIENT for span in log.spans):  # the call may never have got to its server
            await log.wait(len(log.spans) + 1)
        client = by_kind(log.spans, SpanKind.CLIENT)
        assert client.attributes and client.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"


async def test_an_unreachable_server_ends_the_clients_span() -> None:
    log = SpanLog()
    async with loopback(log.tracer(), decode=three_messages) as (server, channel):
        await server.__aexit__(None, None, None)
        with pytest.raises(grpc.aio.AioRpcError):
            await decode_stub(channel).Decode(REQUEST).read()
        (span,) = await log.wait(1)
        assert span.attributes and span.attributes["rpc.response.status_code"] == "UNAVAILABLE"


async def test_the_callers_context_is_taken_at_the_call() -> None:
    log = SpanLog()
    tracer = log.tracer()
    async with loopback(tracer, decode=three_messages) as (_, channel):
        with tracer.start_as_current_span("caller"):
            call = decode_stub(channel).Decode(REQUEST)
        assert len([message async for message in call]) == 3
        spans = await log.wait(3)
    root = assert_one_tree(spans)
    assert root.name == "caller"
    assert by_kind(spans, SpanKind.CLIENT).parent.span_id == root.context.span_id


TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def call_with(key: str, flags: str, log: SpanLog) -> trace.SpanContext:
    """Call over a channel that isn't ours, and return the context that the handler saw."""
    seen: list[trace.SpanContext] = []

    async def look(request: Any, context: Any) -> Any:
        seen.append(trace.get_current_span().get_span_context())
        yield decode_pb2.DecodeResponse()

    metadata = ((key, f"00-{TRACE_ID}-{PARENT_ID}-{flags}"),) if key else ()
    async with (
        loopback(log.tracer(), decode=look) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as plain,
    ):
        async for _ in decode_stub(plain).Decode(REQUEST, metadata=metadata):
            pass
    return seen[0]


async def test_a_foreign_callers_trace_goes_on() -> None:
    log = SpanLog()
    seen = await call_with("traceparent", "01", log)
    assert f"{seen.trace_id:032x}" == TRACE_ID
    assert_one_tree(await log.wait(1), remote_parent=int(PARENT_ID, 16))


async def test_a_caller_that_is_not_sampled_is_not_recorded() -> None:
    log = SpanLog()
    seen = await call_with("traceparent", "00", log)
    assert f"{seen.trace_id:032x}" == TRACE_ID
    assert not seen.trace_flags.sampled
    assert not log.spans


async def test_without_a_caller_a_new_trace_begins() -> None:
    log = SpanLog()
    seen = await call_with("", "", log)
    assert seen.is_valid
    assert_one_tree(await log.wait(1))


async def test_concurrent_calls_keep_to_their_own_traces() -> None:
    log = SpanLog()
    tracer = log.tracer()

    async def with_child(request: Any, context: Any) -> Any:
        with tracer.start_as_current_span("child"):
            await asyncio.sleep(0)
            yield decode_pb2.DecodeResponse()

    async with loopback(tracer, decode=with_child) as (_, channel):

        async def request() -> None:
            with tracer.start_as_current_span("request"):
                async for _ in decode_stub(channel).Decode(REQUEST):
                    pass

        await asyncio.gather(*(request() for _ in range(10)))
        spans = await log.wait(40)
    for trace_id in {span.context.trace_id for span in spans}:
        tree = [span for span in spans if span.context.trace_id == trace_id]
        assert len(tree) == 4
        assert assert_one_tree(tree).name == "request"
