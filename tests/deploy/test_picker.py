"""The shipped deploy/envoy/picker.yaml in the real Envoy: a picker, two decode workers, and a router beside each."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cluster import POLL_S, generate, greedy
from envoys import ANY_PORT, Envoy
from service import Service
from services import QUICK
from traces import parent, spans_of

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HOSTS = ("127.0.0.2", "127.0.0.3")
LIMIT_S = 60.0


@dataclass
class Pod:
    """A decode worker and the router beside it."""

    decode: Service
    router: Service

    @property
    def services(self) -> tuple[Service, Service]:
        return self.decode, self.router


@dataclass
class Pool:
    """Pods, a picker over their workers, and a gateway."""

    pods: list[Pod]
    picker: Service
    gateway: Envoy
    fails_open: bool = True

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=f"http://{self.gateway.address('gateway')}", timeout=LIMIT_S) as client:
            yield client

    async def served(self) -> list[int]:
        """Requests that each pod's router has ended so far."""
        return [int(sum((await metrics(pod.router, "pageferry_requests_total")).values())) for pod in self.pods]

    async def picks(self, name: str = "pageferry_picks_total") -> dict[str, float]:
        return await metrics(self.picker, name)

    async def until_ready(self, number: int, min_cached: int = 0) -> int:
        """Until the picker can use so many decode workers, and knows that nothing runs; the pages that they cache."""
        async with grpc.aio.insecure_channel(self.picker.address) as channel:
            stub = InferenceServiceStub(channel)
            async with asyncio.timeout(LIMIT_S):
                while True:
                    workers = (await stub.GetStatus(pb.GetStatusRequest())).workers
                    ready = [worker for worker in workers if worker.state == "ready"]
                    num_cached = sum(worker.load.pages_cached for worker in ready)
                    is_idle = not any(worker.load.running for worker in ready)
                    if len(ready) == number and is_idle and num_cached >= min_cached:
                        return num_cached
                    await asyncio.sleep(POLL_S)


async def metrics(router: Service, name: str) -> dict[str, float]:
    """Values of a counter by its only label."""
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        text = (await client.get(f"{router.http}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


@contextmanager
def pool(model: Path, change: Any = None, *, over_grpc: bool = False) -> Iterator[Pool]:
    """`over_grpc`: endpoints are the routers' ports of gRPC."""
    settings = QUICK | {
        "engine.model": str(model),
        "router.salt_key": "the same everywhere",
        "server.drain_grace_s": "60",
    }
    picker = Service("router", name="picker", settings=settings)
    settings = settings | {"telemetry.otlp_endpoint": picker.address}
    with ExitStack() as stack:
        pods, port, http_port = [], 0, 0
        for number, host in enumerate(HOSTS):
            decode = Service("decode", name=f"decode-{number}", settings=settings, host=host)
            beside = settings | {"router.decode": decode.address}
            router = Service("router", port, beside, name=f"router-{number}", host=host, http_port=http_port)
            port, http_port = router.port, int(router.http.rpartition(":")[2])
            pods.append(Pod(decode, router))
        workers = ",".join(pod.decode.address for pod in pods)
        picker.settings |= {"router.decode": workers, "router.picker_port": str(port if over_grpc else http_port)}
        services = [*(service for pod in pods for service in pod.services), picker]
        for service in services:
            stack.callback(_end, service)
            service.start()
        for service in services:
            service.wait_ready()
        places = {
            "0.0.0.0:8080": ANY_PORT,
            "pageferry-decode:8080": [
                pod.router.address if over_grpc else pod.router.http.removeprefix("http://") for pod in pods
            ],
            "pageferry-pickers:50051": picker.address,
        }
        gateway = stack.enter_context(Envoy("picker", places, change=change))
        gateway.wait_healthy("decode-routers", len(pods))
        gateway.wait_healthy("picker", 1)
        yield Pool(pods, picker, gateway)
        for service in services:
            assert "Traceback" not in service.output, service.output[-4000:]


def _end(service: Service) -> None:
    if service.is_alive:
        service.kill()
    service.close()


def in_duplex(document: dict[str, Any]) -> None:
    """As gateways of the Gateway API set up the filter; and without a picker, requests fail."""
    (listener,) = document["static_resources"]["listeners"]
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    filters[1]["typed_config"]["failure_mode_allow"] = False
    modes = filters[1]["typed_config"]["processing_mode"]
    modes |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}


def to_grpc(document: dict[str, Any]) -> None:
    """As for a pool whose `appProtocol` is kubernetes.io/h2c."""
    routers, picker = document["static_resources"]["clusters"]
    routers["health_checks"] = [picker["health_checks"][0] | {"grpc_health_check": {}}]
    (options,) = routers["typed_extension_protocol_options"].values()
    options["explicit_http_config"] = {"http2_protocol_options": {}}


@pytest.fixture(scope="module", params=["BUFFERED", "FULL_DUPLEX_STREAMED"])
def running(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Pool]:
    with pool(tiny_model, in_duplex if request.param == "FULL_DUPLEX_STREAMED" else None) as one:
        one.fails_open = request.param == "BUFFERED"
        yield one


def body(prompt: str, max_tokens: int = 4, **fields: Any) -> dict[str, Any]:
    wanted = {"ignore_eos": True, "temperature": 0}
    return {"prompt": prompt, "max_tokens": max_tokens, **wanted, **fields}


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int = 4, **headers: str) -> httpx.Response:
    response = await client.post("/v1/completions", json=body(prompt, max_tokens), headers=headers)
    assert response.status_code == 200, response.text
    return response


async def test_equal_prefixes_go_to_the_same_pod_and_others_spread(running: Pool) -> None:
    await running.until_ready(2)
    async with running.client() as client:
        for text in ("One of many stories. ", "Another beginning. "):
            prompt = text * 30
            before, num_cached = await running.served(), await running.until_ready(2)
            for number in range(4):
                await ask(client, f"{prompt}{number}")
                await running.until_ready(2, num_cached + 20)
            counts = [after - one for after, one in zip(await running.served(), before, strict=True)]
            assert sorted(counts) == [0, 4], "equal prefixes were spread"
        before = await running.served()
        # Long enough that the last one is picked for before the first one is over.
        await asyncio.gather(*(ask(client, f"{number} is my number", 400) for number in range(16)))
        counts = [after - one for after, one in zip(await running.served(), before, strict=True)]
        assert min(counts) >= 4, f"load did not spread: {counts}"
        served = await running.picks("pageferry_picks_served_total")
        assert (served["first"] >= 24, served["fallback"], served["other"]) == (True, 0, 0)


async def test_a_stream_and_its_choice_are_one_trace(running: Pool) -> None:
    await running.until_ready(2)
    async with running.client() as client, grpc.aio.insecure_channel(running.picker.address) as channel:
        wanted = body("A story", 24, stream=True)
        async with client.stream("POST", "/v1/completions", json=wanted) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            trace_id = response.headers["traceparent"].split("-")[1]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 3
        stub = InferenceServiceStub(channel)
        async with asyncio.timeout(LIMIT_S):
            while True:
                data = (await stub.GetTrace(pb.GetTraceRequest(id=trace_id))).traces_data
                spans = {span.name: span for span in spans_of(data)}
                if {"pageferry.pick", "pageferry.request", "decode.generate"} <= spans.keys():
                    break
                await asyncio.sleep(POLL_S)
        assert parent(list(spans.values()), spans["pageferry.request"]).name == "pageferry.pick"
        assert spans["pageferry.pick"].attributes["pageferry.pick.endpoint"]


async def test_a_client_can_not_say_where_its_request_goes(running: Pool) -> None:
    await running.until_ready(2)
    async with running.client() as client:
        prompt = "Kept in one place. " * 30
        before, num_cached = await running.served(), await running.until_ready(2)
        for pod in running.pods * 2:
            endpoint = pod.router.http.removeprefix("http://")
            await ask(client, prompt, **{"x-gateway-destination-endpoint": endpoint})
            await running.until_ready(2, num_cached + 20)
        counts = [after - one for after, one in zip(await running.served(), before, strict=True)]
        assert sorted(counts) == [0, 4]


@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [
        ({"prompt": "x", "temperature": -1}, 400, "invalid_field"),
        ({"prompt": "x", "model": "other"}, 404, "model_not_found"),
        ({"prompt": "x" * 4000, "max_tokens": 100_000}, 400, "too_long"),
    ],
)
async def test_what_can_not_be_picked_for_is_answered_at_once(
    running: Pool, wrong: dict[str, Any], status: int, code: str
) -> None:
    before = await running.served()
    async with running.client() as client:
        response = await client.post("/v1/completions", json=wrong)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert response.headers["content-type"] == "application/json"
    assert await running.served() == before


async def test_other_requests_go_to_any_pod(running: Pool) -> None:
    async with running.client() as client:
        assert (await client.get("/v1/models")).json()["object"] == "list"
        assert (await client.post("/v1/nothing", content=b"x" * 100_000)).status_code == 404


async def test_a_pod_that_dies_is_picked_no_more_and_comes_back(running: Pool) -> None:
    await running.until_ready(2)
    async with running.client() as client:
        prompt = "What one pod has cached. " * 30
        before = await running.served()
        await ask(client, prompt)
        counts = [after - one for after, one in zip(await running.served(), before, strict=True)]
        first = running.pods[counts.index(1)]
        other = running.pods[counts.index(0)]
        # Its router first: the picker still takes the worker for good, and the gateway goes on to the fallback.
        first.router.kill()
        assert (await ask(client, prompt)).status_code == 200
        first.decode.kill()
        await running.until_ready(1)
        picked = (await running.picks())["picked"]
        for _ in range(4):
            await ask(client, prompt)
        assert (await running.picks())["picked"] == picked + 4
        other.decode.kill()
        await running.until_ready(0)
        response = await client.post("/v1/completions", json=body(prompt))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert response.headers["retry-after"] == "1"
        for service in (*first.services, other.decode):
            service.start()
        for service in (*first.services, *other.services):
            service.wait_ready()
        running.gateway.wait_healthy("decode-routers", 2)
        await running.until_ready(2)
        await ask(client, prompt)


async def test_a_picker_that_drains_breaks_no_stream_and_without_one_requests_go_on_or_fail(running: Pool) -> None:
    await running.until_ready(2)
    async with running.client() as client:
        picked = (await running.picks()).get("picked", 0)
        waiting = [asyncio.create_task(ask(client, f"{number} waits", 200)) for number in range(4)]
        async with asyncio.timeout(LIMIT_S):
            while (await running.picks()).get("picked", 0) < picked + 4:  # noqa: ASYNC110 - counted elsewhere
                await asyncio.sleep(POLL_S)
        running.picker.signal(signal.SIGTERM)
        statuses = Counter(one.status_code for one in await asyncio.gather(*waiting))
        assert statuses == {200: 4}
        assert await asyncio.to_thread(running.picker.wait_ended) == 0
        status = (await client.post("/v1/completions", json=body("without a picker"))).status_code
        assert status == 200 if running.fails_open else status >= 500
    running.picker.start()
    running.picker.wait_ready()
    running.gateway.wait_healthy("picker", 1)


async def test_calls_of_grpc_go_where_their_pages_are_too(tiny_model: Path) -> None:
    with pool(tiny_model, to_grpc, over_grpc=True) as one:
        await one.until_ready(2)
        async with grpc.aio.insecure_channel(one.gateway.address("gateway")) as channel:
            stub = InferenceServiceStub(channel)
            prompt, before = "By gRPC as well. " * 30, await one.served()
            for number in range(4):
                answer = await generate(stub, greedy(f"{prompt}{number}", 4))
                assert len(answer.token_ids) == 4
                await one.until_ready(2, 20)
            counts = [after - first for after, first in zip(await one.served(), before, strict=True)]
            assert sorted(counts) == [0, 4]
            assert (await one.picks())["picked"] == 4
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, greedy("", 4))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "prompt" in (caught.value.details() or "")
