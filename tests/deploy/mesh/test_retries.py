"""What Envoy asks another router for, and what it never does: no generation starts twice."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import fake_frontend as fake
import httpx
import pytest
from envoys import Envoy, edge_places
from fake_router import FakeRouter
from links import TcpLink

from pageferry.client import Client
from pageferry.core.errors import InternalError, PageferryError, ResourceExhaustedError, UnavailableError
from pageferry.v1 import inference_pb2 as pb

REFUSAL = UnavailableError("the server is draining", reason="DRAINING", nothing_begun=True)
NUM_CALLS, NUM_CLIENTS = 300, 12


@dataclass
class Edge:
    """Two routers behind an edge, each over a link that a test may cut."""

    routers: Sequence[FakeRouter]
    links: Sequence[TcpLink]
    envoy: Envoy
    client: Client
    http: httpx.AsyncClient

    @property
    def num_asked(self) -> int:
        return sum(router.num_asked for router in self.routers)


@asynccontextmanager
async def edge_of_two() -> AsyncIterator[Edge]:
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(FakeRouter()) for _ in range(2)]
        links = [stack.enter_context(TcpLink(router.address)) for router in routers]
        places = edge_places([link.address for link in links], [router.http for router in routers])
        envoy = await stack.enter_async_context(Envoy("edge", places))
        for cluster in ("routers-grpc", "routers-http"):
            await asyncio.to_thread(envoy.wait_healthy, cluster, 2)
        address = envoy.address("edge")
        client = await stack.enter_async_context(Client(address))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{address}", timeout=60))
        yield Edge(routers, links, envoy, client, http)


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with edge_of_two() as edge:
        yield edge


@pytest.mark.slow
async def test_what_a_router_refused_before_it_began_is_asked_of_another(edge: Edge) -> None:
    """Though it refuses faster than the other answers, and so has the fewest requests."""
    refusing, serving = edge.routers
    await refusing.server.set_serving(True, refusal=lambda: REFUSAL)
    refusing.frontend.script = (REFUSAL,)  # over HTTP
    answers = await asyncio.gather(*(edge.client.generate("a").result() for _ in range(40)))
    assert [answer.text for answer in answers] == ["Hello"] * 40
    assert (refusing.num_asked, serving.num_asked) == (0, 40)
    body = {"prompt": "a", "max_tokens": 2}
    replies = await asyncio.gather(*(edge.http.post("/v1/completions", json=body) for _ in range(40)))
    assert [reply.status_code for reply in replies] == [200] * 40
    assert edge.envoy.stat("cluster.routers-grpc.upstream_rq_retry") > 0
    assert edge.envoy.stat("cluster.routers-http.upstream_rq_retry") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("decode worker 127.0.0.1:7000 failed after 3 tokens"),
        ResourceExhaustedError("the queue is full", retry_after_ms=100),
        InternalError("a bug"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_what_may_have_begun_is_not(edge: Edge, error: PageferryError, begun: bool) -> None:
    for router in edge.routers:
        router.frontend.script = (fake.started(), error) if begun else (error,)
    with pytest.raises(type(error)) as caught:
        await edge.client.generate("a").result()
    assert caught.value.message == error.message
    assert edge.num_asked == 1
    reply = await edge.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert (reply.status_code, edge.num_asked) == (error.http_status, 2)


@pytest.mark.slow
async def test_a_router_that_can_not_be_reached_costs_no_call(edge: Edge) -> None:
    await asyncio.to_thread(edge.links[0].cut)
    answers = await asyncio.gather(*(edge.client.generate("a").result() for _ in range(20)))
    assert [answer.text for answer in answers] == ["Hello"] * 20
    assert edge.routers[1].num_asked == 20


@pytest.mark.slow
async def test_connections_reset_at_any_moment_start_no_generation_twice(edge: Edge) -> None:
    draw = random.Random(5)
    begun: Counter[str] = Counter()
    ended: dict[str, str] = {}
    some_ended = asyncio.Event()

    def script(request: pb.GenerateRequest) -> Sequence[fake.Step]:
        begun[request.request_id] += 1
        pause = asyncio.Event()
        asyncio.get_running_loop().call_later(draw.random() * 0.01, pause.set)
        moments = ((pause, *fake.HELLO), (fake.started(), pause, *fake.HELLO[1:]), fake.HELLO)
        return draw.choice(moments)

    def num_ok() -> int:
        return Counter(ended.values())["OK"]

    async def ask(numbers: "asyncio.Queue[int]") -> None:
        while not numbers.empty():
            request_id = f"call-{numbers.get_nowait()}"
            try:
                await edge.client.generate("a", request_id=request_id).result()
                ended[request_id] = "OK"
            except UnavailableError:
                ended[request_id] = "UNAVAILABLE"
            finally:
                some_ended.set()

    async def reset(clients: Sequence["asyncio.Task[None]"]) -> None:
        """Each time after some more have ended well, however long that takes."""

        def are_over() -> bool:
            return all(client.done() for client in clients)

        while not are_over():
            link = draw.choice(edge.links)
            link.delay_s = draw.choice((0.0, 0.002))
            wanted = num_ok() + draw.randrange(1, NUM_CLIENTS)
            while num_ok() < wanted and not are_over():
                some_ended.clear()
                await some_ended.wait()
            await asyncio.sleep(draw.random() * 0.01)
            await asyncio.to_thread(link.cut)
            await asyncio.to_thread(link.heal)

    for router in edge.routers:
        router.frontend.script = script
    numbers: asyncio.Queue[int] = asyncio.Queue()
    for number in range(NUM_CALLS):
        numbers.put_nowait(number)
    clients = [asyncio.create_task(ask(numbers)) for _ in range(NUM_CLIENTS)]
    await reset(clients)
    await asyncio.gather(*clients)
    outcomes = Counter(ended.values())
    assert len(ended) == NUM_CALLS and outcomes["OK"] > NUM_CALLS / 4 and outcomes["UNAVAILABLE"], outcomes
    assert set(begun.values()) == {1}
    assert {request_id for request_id, how in ended.items() if how == "OK"} <= begun.keys()
    assert edge.envoy.stat("cluster.routers-grpc.upstream_rq_retry") > 0
