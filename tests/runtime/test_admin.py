"""A drain by RPC, as its caller sees it."""

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import loopback
from opentelemetry.trace import NoOpTracer

from pageferry.core.config import ServerConfig
from pageferry.v1 import decode_pb2, decode_pb2_grpc
from pageferry.v1.admin_pb2 import Drained, DrainRequest, DrainResponse
from pageferry.v1.admin_pb2_grpc import AdminServiceStub


class Holding:
    """A handler whose calls end one by one, as the test lets them."""

    def __init__(self) -> None:
        self.may_end = asyncio.Semaphore(0)

    async def __call__(self, request: Any, context: Any) -> Any:
        yield decode_pb2.DecodeResponse()
        await self.may_end.acquire()


async def begin(channel: Any, number: int) -> list[Any]:
    stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
    calls = [stub.Decode(decode_pb2.DecodeRequest()) for _ in range(number)]
    for call in calls:
        await call.read()
    return calls


async def test_a_drain_tells_how_many_calls_are_open_until_there_is_none() -> None:
    handler = Holding()
    async with loopback(NoOpTracer(), decode=handler) as (server, channel):
        calls = await begin(channel, 2)
        assert server.num_open == 2
        admin: Any = AdminServiceStub(channel)
        drain = admin.Drain(DrainRequest())
        assert await drain.read() == DrainResponse(open_calls=2)
        handler.may_end.release()
        assert await drain.read() == DrainResponse(open_calls=1)
        handler.may_end.release()
        left = [message async for message in drain]
        assert left[-1] == DrainResponse(drained=Drained())
        assert [(await call.code()).name for call in calls] == ["OK", "OK"]
        assert [message async for message in admin.Drain(DrainRequest())][-1] == DrainResponse(drained=Drained())


async def test_a_drain_goes_on_when_its_caller_leaves() -> None:
    handler = Holding()
    async with loopback(NoOpTracer(), decode=handler) as (server, channel):
        await server.set_serving(True)
        (call,) = await begin(channel, 1)
        admin: Any = AdminServiceStub(channel)
        drain = admin.Drain(DrainRequest(grace_ms=100))
        await drain.read()
        drain.cancel()
        assert (await call.code()).name == "UNAVAILABLE", "its grace went on, too"
        health: Any = health_pb2_grpc.HealthStub(channel)
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_second_drain_may_cut_the_time_of_the_first_short() -> None:
    handler = Holding()
    async with loopback(NoOpTracer(), decode=handler, config=ServerConfig(drain_grace_s=3600)) as (_, channel):
        (call,) = await begin(channel, 1)
        admin: Any = AdminServiceStub(channel)
        first = admin.Drain(DrainRequest())
        await first.read()
        second = [message async for message in admin.Drain(DrainRequest(grace_ms=0))]
        assert second[-1] == DrainResponse(drained=Drained(ended_calls=1))
        assert [message async for message in first][-1] == DrainResponse(drained=Drained())
        assert (await call.code()).name == "UNAVAILABLE"


async def test_whoever_waits_for_a_drain_is_told_its_end_though_the_server_ends_at_once() -> None:
    handler = Holding()
    async with loopback(NoOpTracer(), decode=handler) as (server, channel):
        await begin(channel, 1)
        admin: Any = AdminServiceStub(channel)
        drain = admin.Drain(DrainRequest())
        await drain.read()
        ending = asyncio.create_task(server.drain(30))
        handler.may_end.release()
        await ending
        stopping = asyncio.create_task(server.__aexit__(None, None, None))
        assert [message async for message in drain][-1] == DrainResponse(drained=Drained())
        await stopping
