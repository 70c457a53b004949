"""Two routers behind Envoy, and a sidecar before each worker: what a load loses when processes die under it."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from cluster import Stub, generate, greedy
from collectors import Collector, collecting
from envoys import ANY_PORT, Envoy
from loopback import free_port
from services import Deployment
from streams import prompt_of

from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

NUM_STREAMS = 200
NUM_CLIENTS = 32
NUM_PROMPTS = 6
REQUEST_ID = "pageferry.request_id"
REQUEST, EDGE = "pageferry.request", "pageferry-edge"


def put_sidecars(deployment: Deployment) -> list[Envoy]:
    """One before each worker, which its peers are told of instead of the worker's own port. To be begun first."""
    sidecars = []
    addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
    for worker in deployment.workers:
        inbound = f"127.0.0.1:{free_port()}"
        sidecars.append(Envoy("sidecar", {"0.0.0.0:15006": inbound, "127.0.0.1:50051": worker.address}))
        worker.settings["server.advertised_port"] = inbound.rpartition(":")[2]
        addresses[worker.role].append(inbound)
    for router in deployment.routers:
        router.settings.update({f"router.{role}": ",".join(places) for role, places in addresses.items()})
    return sidecars


@dataclass
class Mesh:
    deployment: Deployment
    edge: Envoy
    sidecars: list[Envoy]


@contextmanager
def meshed(model: Path, collector: str) -> Iterator[Mesh]:
    # Room for all on one worker, even where one that has ended is still counted: no worker refuses anything.
    settings = {"telemetry.otlp_endpoint": collector, "scheduler.max_num_seqs": str(2 * NUM_CLIENTS)}
    graces = {"router": {"server.drain_grace_s": "120"}}
    deployment = Deployment(prefill=2, decode=2, routers=2, settings=settings, of_role=graces, model=model)
    with ExitStack() as stack:
        sidecars = [stack.enter_context(sidecar) for sidecar in put_sidecars(deployment)]
        stack.enter_context(deployment)
        places = {
            "0.0.0.0:8080": ANY_PORT,
            "pageferry-routers:50051": [router.address for router in deployment.routers],
            "pageferry-routers:8080": [router.http.removeprefix("http://") for router in deployment.routers],
            "pageferry-collector:4317": collector,
        }
        edge = stack.enter_context(Envoy("edge", places))
        for cluster in ("routers-grpc", "routers-http"):
            edge.wait_healthy(cluster, 2)
        yield Mesh(deployment, edge, sidecars)


@dataclass
class Load:
    """Every fourth request is one over HTTP; each is compared with what its prompt gave before."""

    stub: Stub
    http: httpx.AsyncClient
    expected: list[tuple[list[int], str]] = field(default_factory=list)
    num_begun: int = 0
    num_done: int = 0
    failures: list[str] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def learn(self) -> None:
        for number in range(NUM_PROMPTS):
            answer = await generate(self.stub, self.request(number))
            self.expected.append((answer.token_ids, answer.text))

    def request(self, number: int):
        request = greedy(prompt_of(1000 + number % NUM_PROMPTS, 60), 60 + number % NUM_PROMPTS * 20)
        request.request_id = f"request-{number}"
        return request

    async def client(self) -> None:
        while (number := self.num_begun) < NUM_STREAMS:
            self.num_begun += 1
            try:
                await (self.over_http(number) if number % 4 == 3 else self.over_grpc(number))
            except (grpc.aio.AioRpcError, httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"request-{number}: {error!r}")
            self.num_done += 1
            self.done.set()

    async def over_grpc(self, number: int) -> None:
        answer = await generate(self.stub, self.request(number), timeout_s=120)
        assert (answer.token_ids, answer.text) == self.expected[number % NUM_PROMPTS]

    async def over_http(self, number: int) -> None:
        request = self.request(number)
        body = {
            "model": "tiny",
            "prompt": list(request.token_ids.ids),
            "max_tokens": request.stop.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"x-request-id": request.request_id}
        text, last = "", ""
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                last = line.removeprefix("data: ") or last
                if line.startswith("data: {"):
                    text += json.loads(last)["choices"][0]["text"]
        assert (last, text) == ("[DONE]", self.expected[number % NUM_PROMPTS][1])

    async def until(self, num_done: int) -> None:
        while self.num_done < num_done:
            self.done.clear()
            await self.done.wait()


def assert_each_began_once(collector: Collector) -> None:
    """By the routers' own spans, each of which has a span of Envoy's as its parent, in the same trace.

    A router that drains refuses before it begins, which leaves a span, too, and Envoy asks the other one.
    """
    requests = [span for span in collector.named(REQUEST) if span.attributes[REQUEST_ID].startswith("request-")]
    begun = [span for span in requests if span.attributes.get("pageferry.reason") != "DRAINING"]
    ids = Counter(span.attributes[REQUEST_ID] for span in begun)
    before_the_load = Counter(f"request-{number}" for number in range(NUM_PROMPTS))
    assert ids - before_the_load == Counter(f"request-{number}" for number in range(NUM_STREAMS))
    for span in requests:
        (outer,) = collector.of(EDGE, span.trace_id)
        assert (span.parent_id, outer.parent_id) == (outer.span_id, b"")


def assert_workers_began_once(collector: Collector) -> None:
    """Streams of the killed worker went on, and what came after its death was sent to workers once."""
    requests = collector.named(REQUEST)
    assert [span for span in requests if "pageferry.resumed_at" in span.attributes]
    later = {f"request-{number}" for number in range(NUM_STREAMS // 2 + NUM_CLIENTS, NUM_STREAMS)}
    traces = {span.trace_id for span in requests if span.attributes[REQUEST_ID] in later}
    tries = Counter(span.trace_id for span in collector.named("route") if span.trace_id in traces)
    assert tries == dict.fromkeys(traces, 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_worker_killed_and_a_router_ended_under_load_cost_no_stream(tiny_model: Path) -> None:
    with collecting() as collector, meshed(tiny_model, collector.address) as mesh:
        address = mesh.edge.address("edge")
        async with (
            grpc.aio.insecure_channel(address) as channel,
            httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as http,
        ):
            load = Load(InferenceServiceStub(channel), http)
            await load.learn()
            async with asyncio.timeout(300), asyncio.TaskGroup() as clients:
                for _ in range(NUM_CLIENTS):
                    clients.create_task(load.client())
                await load.until(NUM_STREAMS // 5)
                mesh.deployment.decode[0].kill()
                await load.until(NUM_STREAMS // 2)
                ending = mesh.deployment.routers[0]
                ending.signal(signal.SIGTERM)
        assert load.failures == []
        assert await asyncio.to_thread(ending.wait_ended) == 0
        await collector.until(
            lambda: len({span.trace_id for span in collector.named(REQUEST)}) == NUM_STREAMS + NUM_PROMPTS,
            "spans of all requests",
        )
        traces = {span.trace_id for span in collector.named(REQUEST)}
        await collector.until(
            lambda: traces <= {span.trace_id for span in collector.spans if span.service == EDGE}, "Envoy's spans"
        )
        assert_each_began_once(collector)
        assert_workers_began_once(collector)
