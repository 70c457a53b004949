"""The client's half of simulated gRPC: a channel with the shapes of grpc.aio's that the services use."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from sim.network import CONNECT_TIMEOUT_S, FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Connection, Frame, Kind, Network
from sim.process import Process

_POLL_S = 0.01


class SimChannel(grpc.aio.Channel):
    """To one address; it connects when it is used, and again after a pause where that failed."""

    def __init__(self, process: Process, address: str) -> None:
        self.process = process
        self.network: Network = process.network
        self.calls: dict[int, SimCall] = {}
        self._address = address
        self._connection: Connection | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = 0.0
        self._connecting: asyncio.Task[Connection | ConnectionError] | None = None

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        return _unsupported

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        def begin(request: Any, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> SimCall:
            call = SimCall(self, method, response_deserializer, timeout, metadata)
            call.start(request_serializer(request), None)
            return call

        return begin

    def stream_unary(self, *_: Any, **__: Any) -> Any:
        return _unsupported

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        def begin(
            requests: AsyncIterator[Any], *, timeout: float | None = None, metadata: Any = None, **_: Any
        ) -> SimCall:
            call = SimCall(self, method, response_deserializer, timeout, metadata)
            call.start(None, (request_serializer(request) async for request in requests))
            return call

        return begin

    async def close(self, grace: float | None = None) -> None:
        if self._connection is not None:
            self._connection.close(0, "Channel closed")

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        is_open = self._connection is not None and self._connection.is_open
        return grpc.ChannelConnectivity.READY if is_open else grpc.ChannelConnectivity.IDLE

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        raise NotImplementedError

    async def channel_ready(self) -> None:
        await self.connection()

    async def __aenter__(self) -> "SimChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def take(self, frame: Frame) -> None:
        call = self.calls.get(frame.stream)
        if call is not None:
            call.take(frame)

    def lost(self, why: str) -> None:
        self._connection = None
        for call in list(self.calls.values()):
            call.finish(grpc.StatusCode.UNAVAILABLE, why)

    async def connection(self) -> Connection:
        """ConnectionError where there is none to be had."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._connecting is None or self._connecting.done():
            self._connecting = self.process.spawn(self._connect(), "connecting")
        connection = await asyncio.shield(self._connecting)
        if isinstance(connection, ConnectionError):
            raise connection
        return connection

    async def _connect(self) -> Connection | ConnectionError:
        loop = self.process.loop
        if loop.time() < self._retry_at:
            return ConnectionError("connections to it failed, and the next try is not due")
        gives_up_at = loop.time() + CONNECT_TIMEOUT_S
        try:
            await asyncio.sleep(self.network.rng.uniform(0.0002, 0.001))
            while (server := self.network.can_reach(self.process.name, self._address)) is None:
                if loop.time() >= gives_up_at:
                    raise ConnectionError("failed to connect: timed out")
                await asyncio.sleep(_POLL_S)
        except ConnectionError as error:
            self._retry_at = loop.time() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
            return error
        self._backoff_s, self._retry_at = FIRST_BACKOFF_S, 0.0
        self._connection = self.network.connect(self.process.name, self._address, self, server)
        return self._connection


class SimCall:
    """One call, of the kinds whose answer is a stream."""

    def __init__(
        self,
        channel: SimChannel,
        method: str,
        deserialize: Callable[[bytes], Any],
        timeout: float | None,
        metadata: Any,
    ) -> None:
        self._channel = channel
        self._method = method.lstrip("/")
        self._deserialize = deserialize
        self._metadata = tuple(metadata or ())
        self._stream = next(channel.network.streams)
        self._connection: Connection | None = None
        self._inbox: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended = channel.process.loop.create_future()
        self._is_cancelled = False
        self._callbacks: list[Callable[[Any], None]] = []
        self._loop = channel.process.loop
        self._ends_at = None if timeout is None else self._loop.time() + timeout
        self._timer = None if timeout is None else channel.process.later(timeout, self._late)
        self._writer: asyncio.Task[None] | None = None
        self._messages = self._read_all()

    def start(self, request: bytes | None, requests: AsyncIterator[bytes] | None) -> None:
        self._writer = self._channel.process.spawn(self._begin(request, requests), f"call {self._method}")

    async def _begin(self, request: bytes | None, requests: AsyncIterator[bytes] | None) -> None:
        try:
            self._connection = await self._channel.connection()
        except ConnectionError as error:
            self.finish(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses: {error}")
            return
        if self.done():
            return
        self._channel.calls[self._stream] = self
        left_s = None if self._ends_at is None else self._ends_at - self._loop.time()
        self._send(Kind.CALL, (request, self._metadata, left_s))
        if requests is None:
            return
        try:
            async for message in requests:
                await self._connection.room(self._stream, to_server=True)
                self._connection.count(self._stream, len(message), to_server=True)
                self._send(Kind.MESSAGE, message)
            self._send(Kind.HALF_CLOSE)
        except Exception:
            self.cancel()
            raise

    def _send(self, kind: Kind, payload: Any = None) -> None:
        assert self._connection is not None
        if not self.done():
            self._connection.send(Frame(kind, self._stream, self._method, payload), to_server=True)

    def take(self, frame: Frame) -> None:
        if self.done():
            return
        if frame.kind is Kind.STATUS:
            self._end(*frame.payload)
        else:
            self._inbox.append(frame.payload)
            self._changed.set()

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        if not self.done():
            self._end(code, details, ())

    def _end(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        self._ended.set_result((code, details, trailing))
        self._channel.calls.pop(self._stream, None)
        if self._connection is not None and code is not grpc.StatusCode.OK:
            for to_server in (True, False):
                self._connection.forget(self._stream, to_server=to_server)
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is not None and self._writer is not asyncio.current_task(self._loop):
            self._writer.cancel()
        self._changed.set()
        for callback in self._callbacks:
            self._channel.process.soon(callback, self)

    def _late(self) -> None:
        self._reset(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _reset(self, code: grpc.StatusCode, details: str) -> None:
        if self._connection is not None:
            self._send(Kind.RESET)
        self.finish(code, details)

    def cancel(self, msg: str | None = None) -> bool:
        if self.done():
            return False
        self._is_cancelled = True
        self._inbox.clear()
        self._reset(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def done(self) -> bool:
        return bool(self._ended.done())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done():
            self._channel.process.soon(callback, self)
        else:
            self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        return (await self._status())[0]

    async def details(self) -> str:
        return (await self._status())[1]

    async def trailing_metadata(self) -> Any:
        return (await self._status())[2]

    async def initial_metadata(self) -> Any:
        return ()

    async def _status(self) -> Any:
        return self._ended.result() if self.done() else await asyncio.shield(self._ended)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages

    async def _read_all(self) -> AsyncIterator[Any]:
        while (message := await self._read()) is not grpc.aio.EOF:
            yield message
        if self._is_cancelled:
            raise asyncio.CancelledError
        code, details, trailing = await self._status()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)

    async def _read(self) -> Any:
        while not self._inbox:
            if self.done():
                return grpc.aio.EOF
            self._changed.clear()
            await self._changed.wait()
        message = self._inbox.popleft()
        assert self._connection is not None
        self._connection.count(self._stream, -len(message), to_server=False)
        return self._deserialize(message)


def _unsupported(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("no simulated service makes such a call")
