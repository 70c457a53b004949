"""Tracing of the calls that a process makes, and the end of calls that nobody holds any more.

A channel of our own rather than gRPC's interceptors: these add a task and a generator to each call, and keep a stream
that was dropped unread, and so its span and the server's work, alive until the server ends it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer

from pageferry.runtime.loop_calls import call_on_loop
from pageferry.runtime.rpc_spans import client_span_name, end_span, inject_context, rpc_attributes


class TracedChannel(grpc.aio.Channel):
    """A channel whose calls are traced: a span's parent is the one current at the call, and it ends with the call.

    A streaming call is cancelled once nothing refers to it, as when a loop over it is left.
    """

    def __init__(self, inner: grpc.aio.Channel, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    def unary_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._traced(method, self._inner.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        traced = self._traced(method, self._inner.unary_stream(method, *args, **kwargs))
        return lambda *arguments, **options: HeldStream(traced(*arguments, **options))

    def stream_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._traced(method, self._inner.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        traced = self._traced(method, self._inner.stream_stream(method, *args, **kwargs))
        return lambda *arguments, **options: HeldStream(traced(*arguments, **options))

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _traced(self, method: str | bytes, inner: Callable[..., Any]) -> Callable[..., Any]:
        path = (method.decode() if isinstance(method, bytes) else method).lstrip("/")
        name = client_span_name(path)
        if name is None:
            return inner

        def begin(*args: Any, metadata: Any = None, **options: Any) -> Any:
            span = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=rpc_attributes(path))
            carried = inject_context(trace.set_span_in_context(span))
            kept = ((key, value) for key, value in metadata or () if key not in carried)
            call = inner(*args, metadata=grpc.aio.Metadata(*kept, *carried.items()), **options)
            call.add_done_callback(lambda done: end_span(span, *_outcome(done)))
            return call

        return begin


class HeldStream:
    """A streaming call that ends when it is dropped."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages: AsyncIterator[Any] | None = None
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:
            self._messages = aiter(self._call)
        return await anext(self._messages)

    async def read(self) -> Any:
        return await anext(self, grpc.aio.EOF)

    async def write(self, request: Any) -> None:
        await self._call.write(request)

    async def done_writing(self) -> None:
        await self._call.done_writing()

    async def initial_metadata(self) -> Any:
        return await self._call.initial_metadata()

    async def trailing_metadata(self) -> Any:
        return await self._call.trailing_metadata()

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await self._call.code()
        return code

    async def details(self) -> str:
        details: str = await self._call.details()
        return details

    async def wait_for_connection(self) -> None:
        await self._call.wait_for_connection()

    def cancel(self) -> bool:
        return bool(self._call.cancel())

    def cancelled(self) -> bool:
        return bool(self._call.cancelled())

    def done(self) -> bool:
        return bool(self._call.done())

    def time_remaining(self) -> float | None:
        remaining: float | None = self._call.time_remaining()
        return remaining

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(callback)

    def __del__(self) -> None:
        # The collector may run on any thread, at any time.
        if not self._call.done():
            call_on_loop(self._loop, self._call.cancel)


def _outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and details of a call that is over. They are coroutines, which then end at once, without a loop."""
    return _result(call.code()) or grpc.StatusCode.UNKNOWN, _result(call.details()) or ""


def _result(finished: Any) -> Any:
    try:
        finished.send(None)
    except StopIteration as end:
        return end.value
    finished.close()
    return None
