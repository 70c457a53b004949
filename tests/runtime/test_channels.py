"""Channels as calls over them see them."""

import asyncio
from contextlib import suppress

from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import NoOpTracer

from pageferry.core.config import ServerConfig
from pageferry.runtime.channels import open_channel
from pageferry.runtime.server import GrpcServer

BUSY_S = 1.2


async def test_a_server_that_is_slow_to_answer_a_connection_is_waited_for() -> None:
    async with GrpcServer(ServerConfig(), NoOpTracer()) as server:
        port = await server.start()

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await reader.read(65536):
                    writer.write(data)
            writer.close()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(BUSY_S)
            there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

        async with await asyncio.start_server(connect, "127.0.0.1", 0) as busy:
            address = f"127.0.0.1:{busy.sockets[0].getsockname()[1]}"
            async with open_channel(address, NoOpTracer()) as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
