"""A free port, a server and a channel to it in one event loop, and services whose handlers are a test's own."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue
from links import hold_port
from opentelemetry.trace import Tracer

from pageferry.core.config import ServerConfig
from pageferry.runtime.admin import ADMIN_SERVICE, Admin
from pageferry.runtime.channels import open_channel
from pageferry.runtime.server import GrpcServer
from pageferry.v1 import decode_pb2_grpc
from pageferry.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server

Handler = Callable[[Any, Any], Any]


_held: list[socket.socket] = []


def free_port() -> int:
    """A port that is given to nobody else, but by its number, as long as this process lives."""
    _held.append(hold_port())
    return int(_held[-1].getsockname()[1])


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Decode is an async generator given by the test."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(self._handler(request, context)) as messages:
            async for message in messages:
                yield message


ASK_SERVICE, ASK_METHOD = "pageferry.test.AskService", "pageferry.test.AskService/Ask"


def ask_stub(channel: grpc.aio.Channel) -> Any:
    """Calls the unary method of a server that has an `ask` handler."""
    return channel.unary_unary(
        f"/{ASK_METHOD}",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )


def _add_ask(ask: Handler, server: grpc.aio.Server) -> None:
    handler = grpc.unary_unary_rpc_method_handler(ask, StringValue.FromString, StringValue.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ASK_SERVICE, {"Ask": handler}),))


@asynccontextmanager
async def loopback(
    tracer: Tracer,
    *,
    decode: Handler | None = None,
    ask: Callable[[Any, Any], Awaitable[Any]] | None = None,
    config: ServerConfig | None = None,
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    """`ask` is a coroutine that takes and returns a StringValue. The server can be drained by RPC, too."""
    config = config or ServerConfig()
    async with GrpcServer(config, tracer) as server:

        async def drain(grace_s: float | None) -> int:
            return await server.drain(config.drain_grace_s if grace_s is None else grace_s)

        server.add(add_AdminServiceServicer_to_server, Admin(drain, lambda: server.num_open), ADMIN_SERVICE)
        if decode:
            register = decode_pb2_grpc.add_DecodeServiceServicer_to_server
            server.add(register, FakeDecode(decode), "pageferry.v1.DecodeService")
        if ask:
            server.add(_add_ask, ask, ASK_SERVICE)
        port = await server.start()
        async with open_channel(f"127.0.0.1:{port}", tracer) as channel:
            yield server, channel
