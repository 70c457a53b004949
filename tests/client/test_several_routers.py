"""A client of two routers: who gets the calls when one of them drains, refuses, fails half-way, or is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import fake_frontend as fake
import pytest
from fake_frontend import FakeFrontend
from fake_inference import FakeInference
from loopback import free_port
from opentelemetry.trace import NoOpTracer

from pageferry.client import Client, SyncClient
from pageferry.core.config import ServerConfig
from pageferry.core.errors import UnavailableError
from pageferry.runtime.server import GrpcServer
from pageferry.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

DRAINING = UnavailableError("the server is draining", reason="DRAINING")
PATIENCE_S = 60  # for what takes some tens of milliseconds


class Router:
    """A health service and an InferenceService that plays a script."""

    def __init__(self) -> None:
        self.frontend = FakeFrontend()
        self.config = ServerConfig(port=free_port())
        self.server: GrpcServer
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        self.server = await self._stack.enter_async_context(GrpcServer(self.config, NoOpTracer()))
        service = FakeInference(self.frontend)
        self.server.add(add_InferenceServiceServicer_to_server, service, "pageferry.v1.InferenceService")
        await self.server.start()
        await self.server.set_serving(True)

    async def stop(self) -> None:
        await self._stack.aclose()

    @property
    def num_asked(self) -> int:
        return len(self.frontend.requests)


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[Client, Router, Router]]:
    routers = Router(), Router()
    async with AsyncExitStack() as stack:
        for router in routers:
            stack.push_async_callback(router.stop)
            await router.start()
        address = ",".join(f"127.0.0.1:{router.config.port}" for router in routers)
        client = await stack.enter_async_context(Client(address))
        await ask_until_asked(client, *routers)
        yield client, *routers


async def ask(client: Client) -> None:
    assert (await client.generate("a").result()).text == "Hello"


async def ask_until_asked(client: Client, *routers: Router) -> None:
    """No call may fail; each router gets one before long."""
    before = [router.num_asked for router in routers]
    async with asyncio.timeout(PATIENCE_S):
        while not all(router.num_asked > count for router, count in zip(routers, before, strict=True)):
            await ask(client)


async def ask_until_spared(client: Client, router: Router) -> None:
    """No call may fail; the router gets none any more before long: ten calls in turn pass it by."""
    spared = 0
    async with asyncio.timeout(PATIENCE_S):
        while spared < 10:
            before = router.num_asked
            await ask(client)
            spared = spared + 1 if router.num_asked == before else 0


async def test_a_router_that_stops_serving_gets_no_more_calls_and_comes_back() -> None:
    async with two_routers() as (client, first, _):
        await first.server.set_serving(False)
        await ask_until_spared(client, first)
        await first.server.set_serving(True)
        await ask_until_asked(client, first)


async def test_a_call_that_was_refused_before_its_first_message_is_made_again() -> None:
    async with two_routers() as (client, first, _):
        first.frontend.script = (DRAINING,)
        await ask_until_asked(client, first)


async def test_a_call_that_failed_after_its_first_message_is_not() -> None:
    async with two_routers() as (client, first, second):
        for router in (first, second):
            router.frontend.script = (fake.started(), DRAINING)
        before = first.num_asked + second.num_asked
        with pytest.raises(UnavailableError, match="draining"):
            await client.generate("a").result()
        assert first.num_asked + second.num_asked == before + 1


async def test_a_router_that_ends_and_starts_again_loses_no_call() -> None:
    async with two_routers() as (client, first, second):
        await first.stop()
        await ask_until_asked(client, second)
        await first.start()
        await ask_until_asked(client, first)


async def test_the_blocking_client_does_the_same() -> None:
    async with two_routers() as (client, first, _):
        first.frontend.script = (DRAINING,)

        def ask_in_turn() -> list[str]:
            with SyncClient(client.address) as blocking:
                return [blocking.generate("a").result().text for _ in range(4)]

        assert await asyncio.to_thread(ask_in_turn) == ["Hello"] * 4
