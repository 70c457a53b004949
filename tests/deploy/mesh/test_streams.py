"""Streams that last, that say nothing for long, and that are stuck, through the shipped edge."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import fake_frontend as fake
import grpc
import httpx
import pytest
from cluster import generate
from envoys import Envoy, edge_places
from fake_router import FakeRouter
from links import TcpLink
from moments import until

from pageferry.client import Client
from pageferry.core.errors import UnavailableError
from pageferry.runtime import channels, server
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

SCALE = 200
BODY = {"prompt": "a", "stream": True}
LONG_S, LONG_STEPS, LATE_S = 90.0, 30, 40.0
FIELD = pytest.mark.field("envoyproxy/envoy#35812", "envoyproxy/gateway#5446", "istio/old_issues_repo#322")


def after(seconds: float) -> asyncio.Event:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, event.set)
    return event


def long_script() -> list[fake.Step]:
    steps: list[fake.Step] = [fake.started()]
    for number in range(LONG_STEPS):
        steps += [after((number + 1) * LONG_S / LONG_STEPS), fake.delta("a", fake.token(number, 10))]
    end = fake.finished()
    end.finished.usage.completion_tokens = LONG_STEPS
    return [*steps, end]


def late_script() -> list[fake.Step]:
    """Not a byte comes before the first token."""
    return [after(LATE_S), *fake.HELLO]


@asynccontextmanager
async def edge_of(router: FakeRouter, address: str = "", **options: Any) -> AsyncIterator[Envoy]:
    async with Envoy("edge", edge_places([address or router.address], [router.http]), **options) as edge:
        await asyncio.to_thread(edge.wait_healthy, "routers-grpc", 1)
        await asyncio.to_thread(edge.wait_healthy, "routers-http", 1)
        yield edge


async def over_http(address: str) -> str:
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=None) as http:
        return (await http.post("/v1/completions", json=BODY)).text


@FIELD
@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_stream_of_90_s_and_one_that_says_nothing_for_40_s_are_not_cut() -> None:
    async with FakeRouter() as router, edge_of(router) as edge:
        address = edge.address("edge")
        began = time.monotonic()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = InferenceServiceStub(channel)
            router.frontend.script = lambda _: long_script() if router.num_asked <= 2 else late_script()
            long = asyncio.create_task(generate(stub, pb.GenerateRequest(prompt="a"), timeout_s=200))
            long_http = asyncio.create_task(over_http(address))
            await until(lambda: router.num_asked == 2, "the long ones have begun")
            late = asyncio.create_task(generate(stub, pb.GenerateRequest(prompt="a"), timeout_s=200))
            late_http = asyncio.create_task(over_http(address))
            assert (await late).text == "Hello"
            assert (await late_http).endswith("data: [DONE]\n\n")
            assert time.monotonic() - began > LATE_S
            assert (await long).text == "a" * LONG_STEPS
            assert (await long_http).count('"text":"a"') == LONG_STEPS
            assert time.monotonic() - began > LONG_S


def scale(value: Any) -> None:
    """Make minutes pass in seconds for all that waits for silence, but for what waits for the answer to a ping."""
    if isinstance(value, list):
        for item in value:
            scale(item)
    if isinstance(value, dict):
        for key, inner in value.items():
            is_ping = key == "interval" and set(value) == {"interval", "timeout"}  # and no health check
            if key in ("idle_timeout", "stream_idle_timeout") or is_ping:
                value[key] = f"{float(inner.removesuffix('s')) / SCALE}s"
            else:
                scale(inner)


def scale_connections(document: dict[str, Any]) -> None:
    """Minutes pass in seconds for connections, while streams may say nothing for as long as is shipped."""
    scale(document)
    (listener,) = document["static_resources"]["listeners"]
    listener["filter_chains"][0]["filters"][0]["typed_config"]["stream_idle_timeout"] = "300s"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and routers ping two hundred times as often, as Envoy does with `scale`."""
    key = "grpc.keepalive_time_ms"
    options = tuple((name, value // SCALE if name == key else value) for name, value in channels.CHANNEL_OPTIONS)
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", options)
    monkeypatch.setattr(server, "KEEPALIVE_OPTIONS", options)
    monkeypatch.setattr(server, "MIN_PING_INTERVAL_MS", channels.MIN_PING_INTERVAL_MS // SCALE)


@FIELD
@pytest.mark.slow
async def test_a_channel_that_idles_for_20_minutes_is_good_to_use(hurried: None) -> None:
    async with (
        FakeRouter() as router,
        edge_of(router, change=scale_connections) as edge,
        Client(edge.address("edge")) as client,
    ):
        assert (await client.generate("a").result()).text == "Hello"
        await asyncio.sleep(20 * 60 / SCALE)
        assert (await client.generate("a").result()).text == "Hello"
        assert edge.stat("http.edge.downstream_cx_http2_total") == 1
        assert edge.stat("cluster.routers-grpc.upstream_cx_destroy") == 0


@FIELD
@pytest.mark.slow
async def test_a_router_that_says_nothing_more_is_cut_off_by_the_idle_limit(hurried: None) -> None:
    async with FakeRouter() as router, edge_of(router, change=scale) as edge:
        address, began = edge.address("edge"), time.monotonic()
        for script in ((fake.started(), asyncio.Event()), (asyncio.Event(),)):
            router.frontend.script = script
            router.frontend.closed.clear()
            async with Client(address) as client:
                with pytest.raises(UnavailableError):
                    await client.generate("a").result()
            await asyncio.wait_for(router.frontend.closed.wait(), 60)  # it is told that nobody waits any more
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http:
            answer = await http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.text) == (504, "stream timeout")
        assert time.monotonic() - began > 3 * 300 / SCALE


@pytest.mark.slow
async def test_a_router_that_answers_no_ping_is_cut_off_long_before(hurried: None) -> None:
    async with FakeRouter() as router:
        router.frontend.script = (fake.started(), fake.delta("a"), asyncio.Event())
        with TcpLink(router.address) as link:
            async with (
                edge_of(router, link.address, change=scale_connections) as edge,
                Client(edge.address("edge")) as client,
            ):
                deltas = aiter(client.generate("a"))
                await anext(deltas)
                link.black_hole()
                with pytest.raises(UnavailableError) as caught:
                    await anext(deltas)
                assert caught.value.reason == "STREAM_BROKEN"
