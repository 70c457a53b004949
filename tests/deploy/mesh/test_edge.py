"""What the edge lets through, in which form, in whose trace, and how it ends."""

import asyncio
import itertools
import json
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import fake_frontend as fake
import grpc
import httpx
import programs
import pytest
from cluster import Cluster, generate
from collectors import Collector, collecting
from envoys import ROOT, SHIPPED, Envoy, edge_places
from fake_router import FakeRouter
from manifests import workloads

from pageferry.client import Client
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.slow
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def recipes() -> Iterator[tuple[str, list[str]]]:
    """The commands of docs/mesh.md that call the edge, and the lines that they are said to print."""
    text = (ROOT / "docs" / "mesh.md").read_text(encoding="utf-8")
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for recipe in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command = re.match(r"(?:.*[\\|]\n)*.*\n", recipe)  # with the lines that it goes on in
            assert command is not None
            if "localhost:8080" in command[0]:
                yield command[0], recipe[command.end() :].splitlines()


@pytest.fixture(scope="module")
def before_a_cluster(colocated: Cluster) -> Iterator[str]:
    with Envoy("edge", edge_places([colocated.address], [colocated.http.removeprefix("http://")])) as edge:
        edge.wait_healthy("routers-grpc", 1)
        edge.wait_healthy("routers-http", 1)
        yield edge.address("edge")


@pytest.mark.parametrize(("command", "printed"), [*recipes()], ids=itertools.count())
def test_recipes_give_what_is_written_of_them(before_a_cluster: str, command: str, printed: list[str]) -> None:
    command = command.replace("localhost:8080", before_a_cluster).replace("grpcurl ", f"{programs.find('grpcurl')} ")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert shapes(done.stdout.splitlines()) == shapes(printed)


def shapes(lines: list[str]) -> list[str]:
    """Of lines of JSON the fields, of others the text; several alike in a row are one."""
    kinds = [str(sorted(json.loads(line))) if line.startswith("{") else line for line in lines if line]
    return [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]


async def test_each_method_of_the_service_and_none_else_is_to_be_had_by_json(edge: Envoy) -> None:
    async with httpx.AsyncClient(base_url=f"http://{edge.address('edge')}", timeout=60) as http:
        methods = [method.name for method in pb.DESCRIPTOR.services_by_name["InferenceService"].methods]
        statuses = {
            name: (await http.post(f"/pageferry.v1.InferenceService/{name}", json={})).status_code
            for name in (*methods, "Guess")
        }
    assert statuses == {**dict.fromkeys(methods, 200), "Guess": 404}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with FakeRouter() as made:
        yield made


@pytest.fixture
async def edge(router: FakeRouter, collector: Collector) -> AsyncIterator[Envoy]:
    async with Envoy("edge", edge_places([router.address], [router.http], collector.address)) as made:
        for cluster in ("routers-grpc", "routers-http"):
            await asyncio.to_thread(made.wait_healthy, cluster, 1)
        yield made


async def test_what_is_for_peers_and_operators_is_not_to_be_had(edge: Envoy) -> None:
    async with grpc.aio.insecure_channel(edge.address("edge")) as channel:
        for method in (
            "pageferry.v1.AdminService/Drain",
            "pageferry.v1.DecodeService/Decode",
            "pageferry.v1.PageService/Push",
            "opentelemetry.proto.collector.trace.v1.TraceService/Export",
        ):
            call: Any = channel.unary_unary(f"/{method}")(b"", timeout=60)
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    async with httpx.AsyncClient(base_url=f"http://{edge.address('edge')}", timeout=60) as http:
        for path in ("/metrics", "/%6detrics", "/x/%2e%2e/metrics"):
            assert (await http.get(httpx.URL(str(http.base_url), raw_path=path.encode()))).status_code == 404
        assert (await http.get("/health")).status_code == 200


async def test_a_caller_s_trace_and_id_go_on_unchanged(edge: Envoy, router: FakeRouter, collector: Collector) -> None:
    address = edge.address("edge")
    request_ids = ("mine", "8ee4d5a2-6f0c-4a3b-9d8e-2f6c1b7a9e10")
    told: dict[str, tuple[str, str]] = {}
    async with (
        grpc.aio.insecure_channel(address) as channel,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http,
    ):
        for number, (sampled, request_id) in enumerate(itertools.product(("01", "00"), request_ids)):
            trace = f"{TRACE[:-1]}{number}"
            traceparent = f"00-{trace}-{CALLER}-{sampled}"
            await generate(InferenceServiceStub(channel), pb.GenerateRequest(prompt="a"), traceparent=traceparent)
            _, same, parent, flags = str(router.service.metadata["traceparent"]).split("-")
            assert (same, flags) == (trace, sampled)
            told[trace] = (sampled, parent)
            headers = {"x-request-id": request_id, "traceparent": traceparent}
            await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert router.frontend.requests[-1].request_id == request_id
    async with Client(address) as client:  # begins a trace of its own, which comes last
        await client.generate("a").result()
    own = str(router.service.metadata["traceparent"]).split("-")[1]
    await collector.until(lambda: bool(collector.of("pageferry-edge", own)), "the last span")
    for trace, (sampled, parent) in told.items():
        spans = collector.of("pageferry-edge", trace)
        assert [span.parent_id.hex() for span in spans] == ([CALLER] * 2 if sampled == "01" else [])
        assert parent in [span.span_id.hex() for span in spans] or sampled == "00"


async def test_the_edge_ends_when_its_streams_have_ended(edge: Envoy, router: FakeRouter) -> None:
    go_on = asyncio.Event()
    router.frontend.script = (fake.started(), go_on, *fake.HELLO[1:])
    address = edge.address("edge")
    async with grpc.aio.insecure_channel(address) as channel:
        answer = asyncio.create_task(generate(InferenceServiceStub(channel), pb.GenerateRequest(prompt="a")))
        await router.frontend.waiting.wait()
        drain = await asyncio.create_subprocess_exec(SHIPPED / "drain.sh", edge.admin, "60", "0")
        async with asyncio.timeout(60):
            while await is_open(address):  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.05)
        assert drain.returncode is None
        go_on.set()
        assert (await answer).text == "Hello"
        assert await asyncio.wait_for(drain.wait(), 60) == 0


async def test_an_idle_edge_stays_until_all_have_heard_that_it_goes(edge: Envoy) -> None:
    began = time.monotonic()
    drain = await asyncio.create_subprocess_exec(SHIPPED / "drain.sh", edge.admin, "60", "2")
    assert await asyncio.wait_for(drain.wait(), 60) == 0
    assert time.monotonic() - began >= 1  # bash counts from the last whole second


async def test_each_probe_of_the_manifests_passes_also_without_a_router(edge: Envoy, router: FakeRouter) -> None:
    (workload,) = [found for found in workloads("cpu+edge") if found.role == "edge"]
    await router.server.set_serving(False)
    await asyncio.to_thread(edge.wait_healthy, "routers-grpc", 0)
    async with httpx.AsyncClient(base_url=f"http://{edge.address('edge')}", timeout=60) as http:
        for name, probe in workload.probes:
            assert probe["httpGet"]["port"] in workload.ports, name
            answer = await http.get(probe["httpGet"]["path"])
            assert (answer.status_code, answer.text) == (200, ""), name


async def is_open(address: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*address.split(":"))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True
