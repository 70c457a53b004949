"""Tracing of the calls that a process makes."""

import asyncio
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer

from pageferry.runtime.rpc_spans import client_span_name, end_span, inject_context, rpc_attributes


def client_interceptors(tracer: Tracer) -> list[grpc.aio.ClientInterceptor]:
    """One for each kind of call. A span's parent is the one current at the call; it ends with the call, in any case."""
    return [_UnaryUnary(tracer), _UnaryStream(tracer), _StreamStream(tracer)]


class _Traced:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def _trace(self, continuation: Any, details: Any, request: Any) -> Any:
        method = (details.method.decode() if isinstance(details.method, bytes) else details.method).lstrip("/")
        name = client_span_name(method)
        if name is None:
            return await continuation(details, request)
        # The library runs this in a task that it makes at the call: so the current context is the caller's.
        span = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=rpc_attributes(method))
        try:
            call = await continuation(_with_context(details, trace.set_span_in_context(span)), request)
        except asyncio.CancelledError:
            end_span(span, grpc.StatusCode.CANCELLED)
            raise
        # The library calls this for every call that is over, a cancelled or a dropped one too.
        call.add_done_callback(lambda done: end_span(span, *_outcome(done)))
        return call


class _UnaryUnary(_Traced, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._trace(continuation, client_call_details, request)


class _UnaryStream(_Traced, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._trace(continuation, client_call_details, request)


class _StreamStream(_Traced, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self._trace(continuation, client_call_details, request_iterator)


def _with_context(details: Any, context: Context) -> grpc.aio.ClientCallDetails:
    carried = inject_context(context)
    kept = [(key, value) for key, value in details.metadata or () if key not in carried]
    metadata = grpc.aio.Metadata(*kept, *carried.items())
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


def _outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and details of a call that is over. They are coroutines that then end at once, without a loop."""
    return _result(call.code()) or grpc.StatusCode.UNKNOWN, _result(call.details()) or ""


def _result(finished: Any) -> Any:
    try:
        finished.send(None)
    except StopIteration as end:
        return end.value
    finished.close()
    return None
