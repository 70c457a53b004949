"""Channels to other services: their options, the tracing of their calls, and the end of calls that nobody holds.

A channel of our own rather than gRPC's interceptors: these add a task and a generator to each call, and keep a stream
that was dropped unread, and so its span and the server's work, alive until the server ends it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer

from pageferry.runtime.engine_thread import call_on_loop
from pageferry.runtime.rpc_spans import client_span_name, end_span, inject_context, rpc_attributes
from pageferry.runtime.secure_channel import SecureChannel
from pageferry.runtime.targets import parse_target
from pageferry.runtime.tls import Certificates, check_name

# Both ends ping a silent connection this often, and servers tolerate pings three times as often: one that tolerated
# fewer would close connections with too_many_pings. A peer that is gone is noticed within a hand-off's lease, 30 s.
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = KEEPALIVE_MS // 3

KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *KEEPALIVE_OPTIONS,
    # A worker that comes back on its address is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # For all its name, how long an attempt to connect may take: a busy machine needs more than a second at times.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
    # Two clients in one process don't share a connection, nor its back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(
    address: str, tracer: Tracer, certificates: Certificates | None = None, *, name: str = ""
) -> grpc.aio.Channel:
    """A channel to host:port, or to several as `parse_target` reads them. The caller closes it.

    Without certificates nothing is encrypted. With them, the server must show one that is signed by whom they trust,
    for the name that they say, else for `name`, else for the host of the address.

    A call's span has the one current at the call as its parent, and ends with the call. A streaming call is cancelled
    once nothing refers to it, as when a loop over it is left.
    """
    target = parse_target(address)
    options = (*CHANNEL_OPTIONS, *target.options)
    if certificates is None:
        return _TracedChannel(grpc.aio.insecure_channel(target.uri, options=options), tracer, address)
    check_name(target, certificates.files)
    return _TracedChannel(SecureChannel(target, options, certificates, name), tracer, address)


class _TracedChannel(grpc.aio.Channel):
    def __init__(self, inner: grpc.aio.Channel, tracer: Tracer, address: str) -> None:
        self._inner = inner
        self._tracer = tracer
        self._address = address

    def unary_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._traced(method, self._inner.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return _held(self._traced(method, self._inner.unary_stream(method, *args, **kwargs)))

    def stream_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._traced(method, self._inner.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return _held(self._traced(method, self._inner.stream_stream(method, *args, **kwargs)))

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
        attributes = rpc_attributes(path, self._address)

        def begin(*args: Any, metadata: Any = None, **options: Any) -> Any:
            span = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
            carried = inject_context(trace.set_span_in_context(span))
            kept = ((key, value) for key, value in metadata or () if key not in carried)
            call = inner(*args, metadata=grpc.aio.Metadata(*kept, *carried.items()), **options)
            call.add_done_callback(lambda done: end_span(span, *_outcome(done)))
            return call

        return begin


def _held(begin: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: _HeldStream(begin(*args, **options))


class _HeldStream:
    """A streaming call that ends when it is dropped; a call in all else."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages: AsyncIterator[Any] | None = None
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:
            self._messages = aiter(self._call)
        return await anext(self._messages)

    async def read(self) -> Any:
        return await anext(self, grpc.aio.EOF)

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
