"""A free port, a server and a channel to it in one event loop, and a decode service whose handler is a test's own."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from opentelemetry.trace import Tracer

from pageferry.core.config import ServerConfig
from pageferry.runtime.channels import open_channel
from pageferry.runtime.server import GrpcServer
from pageferry.v1 import decode_pb2_grpc, worker_pb2, worker_pb2_grpc

Handler = Callable[[Any, Any], Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Decode is an async generator given by the test."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(self._handler(request, context)) as messages:
            async for message in messages:
                yield message


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Drain is a coroutine given by the test."""

    def __init__(self, drain: Callable[[Any, Any], Awaitable[Any]]) -> None:
        self._drain = drain

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        return await self._drain(request, context)


@asynccontextmanager
async def loopback(
    tracer: Tracer,
    *,
    decode: Handler | None = None,
    drain: Callable[[Any, Any], Awaitable[Any]] | None = None,
    config: ServerConfig | None = None,
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    async with GrpcServer(config or ServerConfig(), tracer) as server:
        if decode:
            register = decode_pb2_grpc.add_DecodeServiceServicer_to_server
            server.add(register, FakeDecode(decode), "pageferry.v1.DecodeService")
        if drain:
            register = worker_pb2_grpc.add_WorkerServiceServicer_to_server
            server.add(register, FakeWorker(drain), "pageferry.v1.WorkerService")
        port = await server.start()
        async with open_channel(f"127.0.0.1:{port}", tracer) as channel:
            yield server, channel
