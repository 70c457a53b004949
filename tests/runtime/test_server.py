"""Servers: health, reflection, limits, a port in use, and draining."""

import asyncio
import socket
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from links import TcpLink
from loopback import ask_stub, free_port, loopback
from opentelemetry.trace import NoOpTracer
from spans import SpanLog

import pageferry.runtime.server as server_module
from pageferry.core.config import HandoffConfig, ServerConfig
from pageferry.core.errors import NOTHING_BEGUN, ResourceExhaustedError, UnavailableError
from pageferry.runtime.channels import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, MIN_PING_INTERVAL_MS, open_channel
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.server import GrpcServer
from pageferry.v1 import decode_pb2, decode_pb2_grpc, types_pb2

DECODE_SERVICE = "pageferry.v1.DecodeService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def one_message(request: Any, context: Any) -> Any:
    yield decode_pb2.DecodeResponse()


async def echo(request: StringValue, context: Any) -> StringValue:
    return request


def health_of(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


async def test_health_follows_the_service_and_leaves_no_span() -> None:
    log = SpanLog()
    async with loopback(log.tracer(), decode=one_message) as (server, channel):
        health = health_of(channel)

        async def statuses() -> list[int]:
            names = ("", DECODE_SERVICE)
            return [(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names]

        assert await statuses() == [NOT_SERVING] * 2
        await server.set_serving(True)
        assert await statuses() == [SERVING] * 2
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await server.set_serving(False)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not log.spans


async def test_reflection_lists_the_services() -> None:
    async with loopback(NoOpTracer(), decode=one_message) as (_, channel):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask() -> Any:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        async for answer in stub.ServerReflectionInfo(ask()):
            names = {service.name for service in answer.list_services_response.service}
    assert {DECODE_SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_message_over_the_limit_is_refused_with_our_limit() -> None:
    async with loopback(NoOpTracer(), decode=one_message) as (_, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        work = types_pb2.WorkItem(cache_salt="x" * 5_000_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Decode(decode_pb2.DecodeRequest(work=work)).read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, ResourceExhaustedError)
        assert "4194304" in error.message
        assert await stub.Decode(decode_pb2.DecodeRequest()).read() == decode_pb2.DecodeResponse()


async def test_metadata_over_the_limit_is_refused() -> None:
    async with loopback(NoOpTracer(), decode=one_message) as (_, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)

        async def ask(num_bytes: int) -> Any:
            return await stub.Decode(decode_pb2.DecodeRequest(), metadata=(("x-much", "x" * num_bytes),)).read()

        for num_bytes in (17_000, 1_000_000):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(num_bytes)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(15_000) == decode_pb2.DecodeResponse()


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0"])
async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_MS", 200)
    async with loopback(NoOpTracer(), decode=one_message) as (server, channel):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        async with asyncio.timeout(60):
            while await reader.read(4096):  # the server's own settings come first
                pass
        writer.close()
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Decode(decode_pb2.DecodeRequest(), wait_for_ready=True)  # where this one is too slow, too
        assert await call.read() == decode_pb2.DecodeResponse()


async def test_the_port_of_health_alone_is_an_error_where_it_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(health_port=taken.getsockname()[1])
        async with GrpcServer(config, NoOpTracer()) as server:
            with pytest.raises(UnavailableError, match=r"server\.health_port: can't listen on .*: the port is in use"):
                await server.start()


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with GrpcServer(ServerConfig(port=port), NoOpTracer()) as server:
            with pytest.raises(UnavailableError, match=rf"can't listen on 127\.0\.0\.1:{port}: the port is in use"):
                await server.start()


async def test_two_servers_never_share_a_port() -> None:
    async with (
        loopback(NoOpTracer(), decode=one_message) as (first, _),
        GrpcServer(ServerConfig(port=first.port), NoOpTracer()) as second,
    ):
        with pytest.raises(UnavailableError, match="the port is in use"):
            await second.start()


async def test_a_host_that_is_not_ours() -> None:
    async with GrpcServer(ServerConfig(host="192.0.2.1"), NoOpTracer()) as server:
        with pytest.raises(UnavailableError, match=r"192\.0\.2\.1:0: cannot assign"):
            await server.start()


def test_a_server_tolerates_its_clients_pings() -> None:
    assert MIN_PING_INTERVAL_MS < KEEPALIVE_MS


def test_a_peer_that_is_gone_is_noticed_within_a_lease() -> None:
    assert HandoffConfig().lease_ms >= KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS


class Steps:
    """A handler that goes on when it is told to."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, request: Any, context: Any) -> Any:
        yield decode_pb2.DecodeResponse()
        self.begun.set()
        await self.go_on.wait()
        yield decode_pb2.DecodeResponse()


async def test_draining_refuses_new_work_and_lets_live_work_end() -> None:
    handler = Steps()
    async with loopback(NoOpTracer(), decode=handler) as (server, channel):
        await server.set_serving(True)
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        live = stub.Decode(decode_pb2.DecodeRequest())
        await live.read()
        await handler.begun.wait()
        draining = asyncio.create_task(server.drain(30))
        health = health_of(channel)
        while (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING:
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Decode(decode_pb2.DecodeRequest()).read()
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (UnavailableError, "DRAINING")
        assert NOTHING_BEGUN in dict(caught.value.trailing_metadata())
        handler.go_on.set()
        assert len([message async for message in live]) == 1
        assert await draining == 0


async def test_work_that_outlasts_the_grace_ends_with_unavailable() -> None:
    log, handler = SpanLog(), Steps()
    async with loopback(log.tracer(), decode=handler) as (server, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        live = stub.Decode(decode_pb2.DecodeRequest())
        await handler.begun.wait()
        assert await server.drain(0) == 1
        assert await server.drain(0) == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in live:
                pass
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (UnavailableError, "DRAINING")
        assert NOTHING_BEGUN not in dict(caught.value.trailing_metadata())
        statuses = [(span.attributes or {})["rpc.response.status_code"] for span in await log.wait(2)]
        assert statuses == ["UNAVAILABLE", "UNAVAILABLE"]


async def endless(request: Any, context: Any) -> Any:
    tokens = decode_pb2.Tokens(tokens=[types_pb2.GeneratedToken(position=2**31, token_id=2**31)] * 1000)
    while True:
        yield decode_pb2.DecodeResponse(tokens=tokens)


async def test_a_reader_that_stands_still_does_not_keep_a_server_from_ending() -> None:
    async with loopback(NoOpTracer(), decode=endless) as (server, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Decode(decode_pb2.DecodeRequest())
        await call.read()
        async with asyncio.timeout(60):
            assert await server.drain(0) == 1
            await server.__aexit__(None, None, None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert from_rpc_error(caught.value).reason == "DRAINING"


async def test_a_connection_of_age_takes_no_new_calls_and_ends_none() -> None:
    handler = Steps()
    async with loopback(NoOpTracer(), decode=handler, config=ServerConfig(connection_age_s=0.2)) as (server, _):
        with TcpLink(f"127.0.0.1:{server.port}") as link:
            async with open_channel(link.address, NoOpTracer()) as channel, asyncio.timeout(60):
                live = decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_pb2.DecodeRequest())
                await handler.begun.wait()
                while link.num_connections < 3:
                    await health_of(channel).Check(health_pb2.HealthCheckRequest())
                handler.go_on.set()
                assert len([message async for message in live]) == 2


async def test_streams_that_only_tell_end_with_a_status_that_says_why() -> None:
    async with loopback(NoOpTracer()) as (server, channel):
        watch = health_of(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await server.drain(0)
        await server.__aexit__(None, None, None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (UnavailableError, "DRAINING")


async def test_a_server_stays_for_a_while_after_it_has_refused_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that callers that have not heard of its end are told to go elsewhere, and none is cut off."""
    monkeypatch.setattr(server_module, "_QUIET_S", 2.0)
    monkeypatch.setattr(server_module, "_LONGEST_QUIET_S", 60.0)
    async with loopback(NoOpTracer(), decode=one_message) as (server, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        loop = asyncio.get_running_loop()
        draining = asyncio.create_task(server.drain(30))
        await asyncio.sleep(0.3)
        came = loop.time()
        with pytest.raises(grpc.aio.AioRpcError, match="draining"):
            await stub.Decode(decode_pb2.DecodeRequest()).read()
        assert await draining == 0
        assert loop.time() - came >= 2.0


async def test_draining_goes_on_serving_other_calls() -> None:
    async with loopback(NoOpTracer(), decode=one_message, ask=echo) as (server, channel):
        await server.drain(0)
        assert (await ask_stub(channel)(StringValue(value="a"))).value == "a"


async def test_a_call_after_an_idle_channel_lost_its_server_succeeds_once_it_is_back() -> None:
    config = ServerConfig(port=free_port())
    async with loopback(NoOpTracer(), decode=one_message, config=config) as (first, channel):
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        await stub.Decode(decode_pb2.DecodeRequest()).read()
        await first.__aexit__(None, None, None)
        async with loopback(NoOpTracer(), decode=one_message, config=config):
            message = await stub.Decode(decode_pb2.DecodeRequest(), wait_for_ready=True, timeout=60).read()
            assert message == decode_pb2.DecodeResponse()


async def test_thousands_of_calls_at_once_all_reach_their_handler() -> None:
    async with loopback(NoOpTracer(), ask=echo) as (_, channel):
        calls = [ask_stub(channel)(StringValue()) for _ in range(3000)]
        codes = {await call.code() for call in calls}
    assert codes == {grpc.StatusCode.OK}
