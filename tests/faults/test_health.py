"""What health says of services that are frozen, paused, killed, busy, or not ready yet."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cluster import generate, greedy
from frozen import frozen, thread_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services import Deployment, Service

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.worker_pb2 import WatchRequest
from pageferry.v1.worker_pb2_grpc import WorkerServiceStub

LIMIT_S = 60.0
PROBE_S = 2.0  # what a prober waits; no answer is no SERVING either


@asynccontextmanager
async def channel_to(service: Service) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield channel


async def health(channel: grpc.aio.Channel, service: str = "") -> str:
    """The status, or how the probe failed."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def wait_health(service: Service, wanted: str) -> None:
    """Until probes say so."""
    end = time.monotonic() + LIMIT_S
    async with channel_to(service) as channel:
        while (said := await health(channel)) != wanted:
            assert time.monotonic() < end, f"{service.name} still says {said}\n{service.output[-3000:]}"
            await asyncio.sleep(0.05)


async def http_status(router: Service, path: str) -> int:
    async with httpx.AsyncClient(base_url=router.http, timeout=LIMIT_S) as client:
        return (await client.get(path)).status_code


async def stalled(service: Service) -> bool:
    """What a router would be told with the next load."""
    async with channel_to(service) as channel:
        stub: Any = WorkerServiceStub(channel)
        watch = stub.Watch(WatchRequest())
        return bool((await watch.read()).snapshot.load.stalled)


async def wait_state(deployment: Deployment, worker: Service, wanted: str) -> None:
    """Until the router says so of the worker."""
    async with deployment.stub() as stub, asyncio.timeout(LIMIT_S):
        while True:
            status = await stub.GetStatus(pb.GetStatusRequest())
            if {known.address: known.state for known in status.workers}[worker.address] == wanted:
                return
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def deployment(tiny_model: Path) -> Iterator[Deployment]:
    settings = {"server.stall_s": "2", "router.resumes": "0"}
    with Deployment(prefill=1, decode=1, model=tiny_model, settings=settings) as deployment:
        yield deployment


@pytest.mark.field("kserve/kserve#6259", "vllm-project/vllm#36451")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_with_a_frozen_engine_is_not_serving_and_says_so_to_routers(
    deployment: Deployment, role: str
) -> None:
    (worker,) = deployment.prefill if role == "prefill" else deployment.decode
    async with channel_to(worker) as channel:
        for _ in range(20):
            with frozen(thread_of(worker.pid, "engine")):
                if (
                    await health(channel) == "DEADLINE_EXCEEDED"
                ):  # it holds Python's lock: all stands still, not only it
                    continue
                await wait_health(worker, "NOT_SERVING")
                assert await stalled(worker)
                await wait_state(deployment, worker, "stale")
            break
        else:
            pytest.fail("it always held the lock")
    await wait_health(worker, "SERVING")
    await wait_state(deployment, worker, "ready")
    assert not await stalled(worker)
    async with deployment.stub() as stub:
        await generate(stub, greedy([7] * 40, 8))


@pytest.mark.field("kserve/kserve#6259", "vllm-project/vllm#36451")
@pytest.mark.parametrize("signal_sent", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_router_without_its_decode_worker_is_not_serving_until_it_is_back(
    deployment: Deployment, signal_sent: signal.Signals
) -> None:
    (worker,), (router,) = deployment.decode, deployment.routers
    await wait_health(router, "SERVING")
    assert [await http_status(router, path) for path in ("/health", "/ready")] == [200, 200]
    os.kill(worker.pid, signal_sent)
    await wait_health(router, "NOT_SERVING")
    assert [await http_status(router, path) for path in ("/health", "/ready")] == [503, 503]
    if signal_sent is signal.SIGSTOP:
        os.kill(worker.pid, signal.SIGCONT)
    else:
        worker.wait_ended()
        worker.start()
    await wait_health(router, "SERVING")
    async with deployment.stub() as stub:
        await generate(stub, greedy([8] * 40, 8))


@pytest.mark.field("kserve/kserve#6259")
async def test_a_worker_that_is_serving_has_loaded_its_model(tiny_model: Path) -> None:
    """What it says while it loads is in runtime/test_worker_process.py."""
    service = Service("decode", settings={"engine.model": str(tiny_model), "engine.num_pages": "64"})
    service.start()
    try:
        async with channel_to(service) as channel:
            while await health(channel) != "SERVING":
                assert service.is_alive, service.output
            stub: Any = WorkerServiceStub(channel)
            assert (await stub.Watch(WatchRequest()).read()).snapshot.load.pages_total == 64
            assert await health(channel, "pageferry.v1.DecodeService") == "SERVING"
            assert await health(channel, "no.such.Service") == "NOT_FOUND"
    finally:
        service.kill()
        service.close()
