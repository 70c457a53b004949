"""Calls of one channel spread over all replicas behind a name, and over one that is added."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import fake_frontend as fake
import grpc
import pytest
import yaml
from cluster import generate
from envoys import ROOT, Envoy, edge_places, shipped
from fake_router import FakeRouter
from manifests import KUBERNETES, of_kind
from name_server import NameServer

from pageferry.client import Client
from pageferry.runtime.targets import parse_target
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

HOSTS = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
NUM_CALLS, WAVE = 100, 10
NOTICED_S = 60.0  # on a machine with much else to do
CONNECTION_AGE_S = 1.0  # of those whose clients shall look up names again
CARES = "envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig"
FIELD = pytest.mark.field("dapr/dapr#1444", "knative/serving#14011", "kedacore/keda#5224")
Ask = Callable[[], Awaitable[object]]


class Replicas:
    """Routers that hold ten calls at a time, so that each has what it was given while the others come."""

    def __init__(self, routers: Sequence[FakeRouter], names: NameServer) -> None:
        self.routers = routers
        self.names = names
        self._full = asyncio.Event()
        self._num_held = 0
        for router in routers:
            router.frontend.script = self._held

    @property
    def target(self) -> str:
        """As gRPC clients find them, asking the test's name server."""
        return f"dns://127.0.0.1:{self.names.port}/{self.name}"

    @property
    def name(self) -> str:
        return f"routers.test:{self.routers[0].port}"

    def shares(self) -> list[int]:
        return [router.num_asked for router in self.routers]

    async def wave(self, ask: Ask) -> None:
        self._full, self._num_held = asyncio.Event(), 0
        await asyncio.gather(*(ask() for _ in range(WAVE)))

    def _held(self, request: pb.GenerateRequest) -> Sequence[fake.Step]:
        self._num_held += 1
        if self._num_held == WAVE:
            self._full.set()
        return (self._full, *fake.HELLO)


@asynccontextmanager
async def replicas(connection_age_s: float = 0.0) -> AsyncIterator[Replicas]:
    """Three, of which the name server tells two."""
    async with AsyncExitStack() as stack:
        routers = [FakeRouter(host, connection_age_s=connection_age_s) for host in HOSTS]
        for router in routers:
            router.port = routers[0].port
            await stack.enter_async_context(router)
        yield Replicas(routers, await stack.enter_async_context(NameServer(*HOSTS[:2])))


async def assert_spread(replicas: Replicas, ask: Ask) -> None:
    async with asyncio.timeout(NOTICED_S):
        while not all(replicas.shares()[:2]):  # until all connections are there
            await replicas.wave(ask)
    before = replicas.shares()
    for _ in range(NUM_CALLS // WAVE):
        await replicas.wave(ask)
    shares = [after - earlier for earlier, after in zip(before, replicas.shares(), strict=True)]
    assert min(shares[:2]) >= 40 and shares[2] == 0, shares


async def assert_added_is_found(replicas: Replicas, ask: Ask) -> None:
    await replicas.wave(ask)
    assert replicas.shares()[2] == 0
    replicas.names.addresses.append(HOSTS[2])
    async with asyncio.timeout(NOTICED_S):
        while not replicas.routers[2].num_asked:
            await replicas.wave(ask)


@FIELD
@pytest.mark.slow
async def test_through_envoy_one_channel_reaches_all_routers_and_one_that_is_added() -> None:
    async with replicas() as found:

        def ask_the_test_for_names(document: Any) -> None:
            servers = [{"socket_address": {"address": "127.0.0.1", "port_value": found.names.port}}]
            resolver = {"@type": f"type.googleapis.com/{CARES}", "resolvers": servers}
            document["typed_dns_resolver_config"] = {"name": "cares", "typed_config": resolver}

        places = edge_places([found.name], [found.routers[0].http])
        async with Envoy("edge", places, change=ask_the_test_for_names) as edge:
            await asyncio.to_thread(edge.wait_healthy, "routers-grpc", 2)
            async with grpc.aio.insecure_channel(edge.address("edge")) as channel:
                stub = InferenceServiceStub(channel)
                ask = partial(generate, stub, pb.GenerateRequest(prompt="a"))
                await assert_spread(found, ask)
                await assert_added_is_found(found, ask)
                await assert_spared_at_once(found, edge, ask)


@FIELD
def test_what_is_shipped_lets_a_router_that_is_added_be_found_within_half_a_minute() -> None:
    """Once a connection has its age, and its client may look up the name again."""
    objects = yaml.safe_load_all((KUBERNETES / "base" / "router.yaml").read_text(encoding="utf-8"))
    (container,) = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"]
    (age_s,) = (float(one["value"]) for one in container["env"] if one["name"] == "PAGEFERRY_SERVER_CONNECTION_AGE_S")
    options = dict(parse_target("dns:///routers:50051").options)
    pause_s = int(options["grpc.dns_min_time_between_resolutions_ms"]) / 1000
    assert 1.1 * age_s + pause_s < 30  # of ages, gRPC's differ by a tenth


async def assert_spared_at_once(replicas: Replicas, edge: Envoy, ask: Ask) -> None:
    """The first check that finds one not serving takes it out, and it is asked nothing more, until it serves again."""
    draining, cluster = replicas.routers[0], "routers-grpc"
    clusters = {found["name"]: found for found in shipped("edge")["static_resources"]["clusters"]}
    (check,) = clusters[cluster]["health_checks"]
    assert (check["interval"], check["no_traffic_interval"], check["timeout"]) == ("1s", "1s", "2s")
    before = await asyncio.to_thread(edge.num_told, cluster)
    await draining.server.set_serving(False)
    await asyncio.to_thread(edge.wait_told, cluster, before + 1)
    assert await asyncio.to_thread(edge.is_flagged, cluster, draining.address)
    await replicas.wave(ask)  # Envoy's threads have heard by then
    num_asked = draining.num_asked
    for _ in range(NUM_CALLS // WAVE):
        await replicas.wave(ask)
    assert draining.num_asked == num_asked
    await draining.server.set_serving(True)
    await asyncio.to_thread(edge.wait_healthy, cluster, len(HOSTS))
    async with asyncio.timeout(NOTICED_S):
        while draining.num_asked == num_asked:
            await replicas.wave(ask)


def documented_options() -> list[tuple[str, Any]]:
    """What docs/mesh.md tells any gRPC client to set."""
    text = (ROOT / "docs" / "mesh.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"```json\n(\{\n  \"loadBalancingConfig\".*?)```", text, re.DOTALL)
    json.loads(config)
    return [("grpc.service_config", config), ("grpc.dns_min_time_between_resolutions_ms", 5000)]


@FIELD
@pytest.mark.slow
async def test_a_plain_channel_reaches_all_behind_a_name_and_one_that_is_added() -> None:
    options = documented_options()
    async with replicas() as found, grpc.aio.insecure_channel(found.target, options=options) as channel:
        ask = partial(generate, InferenceServiceStub(channel), pb.GenerateRequest(prompt="a"))
        await assert_spread(found, ask)
        await found.routers[0].server.set_serving(False)  # and which says so
        async with asyncio.timeout(NOTICED_S):
            spared = 0
            while spared < 3:
                before = found.routers[0].num_asked
                await found.wave(ask)
                spared = spared + 1 if found.routers[0].num_asked == before else 0
    async with replicas(CONNECTION_AGE_S) as found, grpc.aio.insecure_channel(found.target, options=options) as channel:
        ask = partial(generate, InferenceServiceStub(channel), pb.GenerateRequest(prompt="a"))
        await assert_added_is_found(found, ask)


@FIELD
@pytest.mark.slow
async def test_our_client_reaches_all_behind_a_name_and_one_that_is_added() -> None:
    async with replicas() as found, Client(found.target) as client:
        await assert_spread(found, lambda: client.generate("a").result())
    async with replicas(CONNECTION_AGE_S) as found, Client(found.target) as client:
        await assert_added_is_found(found, lambda: client.generate("a").result())
