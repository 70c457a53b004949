"""The server's half of simulated gRPC: the services' own interceptor over it."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from sim.network import Connection, Frame, Kind
from sim.process import Process

_CANCEL_S = 0.002  # from the end of a stream that is read to the cancel of its handler


class _Details:
    def __init__(self, method: str, metadata: Any) -> None:
        self.method = "/" + method
        self.invocation_metadata = metadata


class SimServer:
    """What `grpc.aio.server` makes, as far as services use it."""

    def __init__(self, process: Process, interceptors: Sequence[Any]) -> None:
        self.process = process
        self.live: dict[ServerCall, None] = {}
        self.is_stopping = False
        self.ended = asyncio.Event()  # a call has
        self._interceptors = interceptors
        self._handlers: list[Any] = []
        self._address = ""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """They are found by name."""

    def add_insecure_port(self, address: str) -> int:
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        self.process.network.servers[self._address] = _Door(self)

    async def stop(self, grace: float | None) -> None:
        """Take nothing more, and end what is live after the grace."""
        self.is_stopping = True
        self.process.network.servers.pop(self._address, None)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace or 0.0):
                await self._until_idle()
        for call in list(self.live):
            call.cancel()
        await self._until_idle()

    async def _until_idle(self) -> None:
        while self.live:
            self.ended.clear()
            await self.ended.wait()

    async def handler(self, method: str, metadata: Any) -> Any:
        async def find(details: Any) -> Any:
            found = (handler.service(details) for handler in self._handlers)
            return next((handler for handler in found if handler is not None), None)

        assert len(self._interceptors) == 1, "services have one"
        return await self._interceptors[0].intercept_service(find, _Details(method, metadata))


class _Door:
    """The port: each connection gets its own end of it."""

    def __init__(self, server: SimServer) -> None:
        self.server = server
        self.process = server.process

    def accept(self, connection: Connection) -> "ServerEnd":
        return ServerEnd(self.server, connection)


class ServerEnd:
    """A server's end of one connection."""

    def __init__(self, server: SimServer, connection: Connection) -> None:
        self.server = server
        self.process = server.process
        self.connection = connection
        self._calls: dict[int, ServerCall] = {}

    def take(self, frame: Frame) -> None:
        if frame.kind is Kind.CALL and self.server.is_stopping:
            refusal = (grpc.StatusCode.UNAVAILABLE, "GOAWAY", ())
            self.connection.send(Frame(Kind.STATUS, frame.stream, frame.method, refusal), to_server=False)
        elif frame.kind is Kind.CALL:
            call = self._calls[frame.stream] = ServerCall(self, frame)
            call.start()
        elif frame.stream in self._calls:
            self._calls[frame.stream].take(frame)

    def lost(self, why: str) -> None:
        for call in list(self._calls.values()):
            call.cancel()

    def over(self, call: "ServerCall") -> None:
        self._calls.pop(call.stream, None)


class ServerCall:
    """One call, and the context that its handler gets."""

    def __init__(self, end: ServerEnd, frame: Frame) -> None:
        self.stream = frame.stream
        self.method = frame.method
        self._end = end
        self._request, self._metadata, timeout = frame.payload
        loop = end.process.loop
        self._ends_at = None if timeout is None else loop.time() + timeout
        self._timer = None if timeout is None else end.process.later(timeout, self.cancel)
        self._inbox: deque[bytes] = deque()
        self._is_all = False
        self._is_over = False  # the caller can't be told any more
        self._changed = asyncio.Event()
        self._status: tuple[grpc.StatusCode, str, Any] | None = None
        self._deserialize: Callable[[bytes], Any] = bytes
        self._serialize: Callable[[Any], bytes] = bytes
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._end.server.live[self] = None
        self._task = self._end.process.spawn(self._serve(), f"serving {self.method}")

    def take(self, frame: Frame) -> None:
        if frame.kind is Kind.RESET:
            self.cancel()
        elif frame.kind is Kind.HALF_CLOSE:
            self._is_all = True
        else:
            self._inbox.append(frame.payload)
        self._changed.set()

    def cancel(self) -> None:
        """Its caller has left, or its time is up: what reads ends at once, the handler is cancelled a moment later."""
        if not self._is_over:
            self._is_over = True
            self._changed.set()
            self._end.connection.forget(self.stream, to_server=True)
            self._end.process.later(_CANCEL_S, self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        code, details, trailing = grpc.StatusCode.OK, "", ()
        try:
            handler = await self._end.server.handler(self.method, self._metadata)
            if handler is None:
                code, details = grpc.StatusCode.UNIMPLEMENTED, "Method not found!"
            else:
                self._deserialize, self._serialize = handler.request_deserializer, handler.response_serializer
                if handler.request_streaming:
                    await handler.stream_stream(None, self)
                else:
                    await handler.unary_stream(self._deserialize(self._request), self)
        except grpc.aio.AbortError:
            assert self._status is not None
            code, details, trailing = self._status
        except asyncio.CancelledError:
            code, details = grpc.StatusCode.CANCELLED, "cancelled"
        finally:
            self._finish(code, details, trailing)

    def _finish(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        self._send(Kind.STATUS, (code, details, trailing))
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._end.server.live.pop(self, None)
        self._end.server.ended.set()
        self._end.over(self)

    def _send(self, kind: Kind, payload: Any) -> None:
        if not self._is_over:
            self._end.connection.send(Frame(kind, self.stream, self.method, payload), to_server=False)

    # What handlers call.

    async def read(self) -> Any:
        while not self._inbox:
            if self._is_all or self._is_over:
                return grpc.aio.EOF
            self._changed.clear()
            await self._changed.wait()
        message = self._inbox.popleft()
        self._end.connection.count(self.stream, -len(message), to_server=True)
        return self._deserialize(message)

    async def write(self, message: Any) -> None:
        if self._is_over:
            raise grpc.aio.InternalError("Failed to send: the call is over")
        data = self._serialize(message)
        await self._end.connection.room(self.stream, to_server=False)
        self._end.connection.count(self.stream, len(data), to_server=False)
        self._send(Kind.MESSAGE, data)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        if self._is_over:
            raise grpc.aio.InternalError("Failed to abort: the call is over")
        self._status = (code, details, trailing_metadata)
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - self._end.process.loop.time())

    def code(self) -> grpc.StatusCode | int:
        return self._status[0] if self._status is not None else 0

    def details(self) -> str:
        return self._status[1] if self._status is not None else ""
