"""SIGTERM and drains by RPC amid streams: what is open goes on, nothing new is taken, and no stream is cut."""

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from answer import Answer
from cluster import Stub, generate, greedy, wait_idle
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pushes import hold
from services import Deployment, Service

from pageferry.core.errors import UnavailableError
from pageferry.runtime.errors import from_rpc_error
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.admin_pb2 import DrainRequest
from pageferry.v1.admin_pb2_grpc import AdminServiceStub

NUM_STREAMS = 4
NUM_TOKENS = 600
ENDLESS = 3500  # tokens, which take far longer than the grace that such a stream is given
ROLES = ("router", "prefill", "decode")


@pytest.fixture(scope="module")
def deployment(tiny_model: Path) -> Iterator[Deployment]:
    settings = {"server.drain_grace_s": "60"}
    with Deployment(prefill=1, decode=1, model=tiny_model, settings=settings, linked={"decode-0"}) as deployment:
        yield deployment


@asynccontextmanager
async def one_restarted(deployment: Deployment, role: str) -> AsyncIterator[Service]:
    """The service of that role; at the end it has to be over, and is started again."""
    (service,) = {"router": deployment.routers, "prefill": deployment.prefill, "decode": deployment.decode}[role]
    try:
        yield service
    finally:
        status = await asyncio.to_thread(service.terminate)
        service.start()
        await asyncio.to_thread(deployment.wait_ready)
    assert status == 0
    async with deployment.stub() as stub:
        await wait_idle(stub)


def prompt_of(number: int, num_tokens: int = 300) -> list[int]:
    return [4 + (number * 37 + index * 11) % 290 for index in range(num_tokens)]


class Stream:
    """A stream of which the test reads as much as it likes."""

    def __init__(self, stub: Stub, request: pb.GenerateRequest) -> None:
        self.answer = Answer()
        self._call = stub.Generate(request, timeout=90)

    async def until(self, num_tokens: int) -> None:
        while len(self.answer.token_ids) < num_tokens:
            await self._take()

    async def rest(self) -> Answer:
        while self.answer.finished is None:
            await self._take()
        assert await self._call.read() is grpc.aio.EOF
        return self.answer

    async def _take(self) -> None:
        response = await self._call.read()
        assert response is not grpc.aio.EOF, "the stream ended without a terminal event"
        self.answer.take(response)  # type: ignore[arg-type]


async def health(service: Service) -> str:
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def not_serving(service: Service) -> None:
    async with asyncio.timeout(60):
        while await health(service) == "SERVING":
            pass


@pytest.mark.field("ai-dynamo/dynamo#791", "smg-project/smg#1172")
@pytest.mark.parametrize("role", ROLES)
async def test_streams_finish_on_a_service_that_is_told_to_end(deployment: Deployment, role: str) -> None:
    async with deployment.stub() as stub:
        requests = [greedy(prompt_of(number), NUM_TOKENS) for number in range(NUM_STREAMS)]
        golden = [(await generate(stub, request)).token_ids for request in requests]
        async with one_restarted(deployment, role) as service:
            streams = [Stream(stub, request) for request in requests]
            for stream in streams:
                await stream.until(10)
            service.signal(signal.SIGTERM)
            await not_serving(service)
            if role != "prefill":  # without one the decode worker computes prompts itself
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await generate(stub, greedy([5] * 20, 4))
                assert isinstance(from_rpc_error(caught.value), UnavailableError)
            assert [(await stream.rest()).token_ids for stream in streams] == golden
        assert 'ended_calls": 0' in service.output


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_pages_on_their_way_arrive_before_a_worker_ends(deployment: Deployment, role: str) -> None:
    async with deployment.stub() as stub:
        async with one_restarted(deployment, role) as service:
            gate = threading.Event()
            deployment.faults.append(hold(3, gate))
            stream = Stream(stub, greedy(prompt_of(90 + ROLES.index(role)), 40))
            await stream.until(1)
            service.signal(signal.SIGTERM)
            await not_serving(service)
            gate.set()
            answer = await stream.rest()
        assert answer.finished is not None
        assert answer.finished.pages.shipped
    (router,) = deployment.routers
    assert "prefill_failed" not in router.output


@pytest.mark.field("ai-dynamo/dynamo#791", "smg-project/smg#1172")
@pytest.mark.parametrize("role", ["router", "decode"])
async def test_a_stream_longer_than_the_grace_ends_with_unavailable(deployment: Deployment, role: str) -> None:
    async with deployment.stub() as stub, one_restarted(deployment, role) as service:
        stream = Stream(stub, greedy(prompt_of(50), ENDLESS))
        await stream.until(10)
        async with grpc.aio.insecure_channel(service.address) as channel:
            admin: Any = AdminServiceStub(channel)
            told = [message async for message in admin.Drain(DrainRequest(grace_ms=100))]
        assert told[0].open_calls == 1
        assert (told[-1].open_calls, told[-1].drained.ended_calls) == (0, 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.rest()
        error = from_rpc_error(caught.value)
        assert isinstance(error, UnavailableError)
        assert error.reason in ("DRAINING", "DRAINED", "NO_WORKER")
        assert service.is_alive, "a drain by RPC leaves the process's end to whoever runs it"
        assert await health(service) == "NOT_SERVING"


@pytest.mark.slow
async def test_a_stream_longer_than_a_decode_workers_grace_goes_on_on_another(tiny_model: Path) -> None:
    settings = {"engine.compute_dtype": "fp32"}
    with Deployment(prefill=1, decode=2, model=tiny_model, settings=settings) as deployment:
        async with deployment.stub() as stub:
            request = greedy(prompt_of(51), 1500)
            golden = (await generate(stub, request)).token_ids
            await wait_idle(stub)
            stream = Stream(stub, request)
            await stream.until(10)
            address = await decodes_on(stub)
            async with grpc.aio.insecure_channel(address) as channel:
                admin: Any = AdminServiceStub(channel)
                told = [message async for message in admin.Drain(DrainRequest(grace_ms=0))]
            assert told[-1].drained.ended_calls == 1
            assert (await stream.rest()).token_ids == golden


@pytest.mark.slow
@pytest.mark.field("ai-dynamo/dynamo#791", "smg-project/smg#1172")
async def test_every_overlong_stream_gets_its_status_though_the_process_ends_right_after(tiny_model: Path) -> None:
    settings = {"server.drain_grace_s": "0.2"}
    with Deployment(prefill=0, decode=1, model=tiny_model, settings=settings) as deployment:
        for service, reasons in (
            (deployment.routers[0], {"DRAINED"}),
            (deployment.decode[0], {"DRAINING", "NO_WORKER"}),
        ):
            async with deployment.stub() as stub:
                streams = [Stream(stub, greedy(prompt_of(number, 20), ENDLESS)) for number in range(16)]
                for stream in streams:
                    await stream.until(3)
                assert await asyncio.to_thread(service.terminate) == 0
                for stream in streams:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stream.rest()
                    error = from_rpc_error(caught.value)
                    assert (type(error), error.reason in reasons) == (UnavailableError, True), error
            service.start()
            await asyncio.to_thread(deployment.wait_ready)


async def decodes_on(stub: Stub) -> str:
    """Where the one stream is that runs."""
    async with asyncio.timeout(60):
        while True:
            status = await stub.GetStatus(pb.GetStatusRequest())
            for worker in status.workers:
                if worker.role == "decode" and worker.load.running:
                    return worker.address


@pytest.mark.field("ai-dynamo/dynamo#791", "smg-project/smg#1172")
async def test_http_streams_finish_too_and_one_longer_than_the_grace_ends_with_an_error_event(
    deployment: Deployment,
) -> None:
    body, gate = {"prompt": "drain", "stream": True, "temperature": 0, "ignore_eos": True}, threading.Event()
    deployment.faults.append(hold(0, gate))  # so that the first stream is open until then
    async with (
        one_restarted(deployment, "router") as router,
        httpx.AsyncClient(base_url=router.http, timeout=60) as client,
    ):
        short, long = (events(client, body | {"max_tokens": number}) for number in (NUM_TOKENS, ENDLESS))
        await anext(short)
        await anext(long)
        async with grpc.aio.insecure_channel(router.address) as channel:
            admin: Any = AdminServiceStub(channel)
            drain = admin.Drain(DrainRequest())
            assert (await drain.read()).open_calls == 2
            refused = await client.post("/v1/completions", json=body | {"stream": False})
            assert refused.status_code == 503
            gate.set()
            assert [event async for event in short][-1] == "[DONE]"
            ended = [message async for message in admin.Drain(DrainRequest(grace_ms=0))][-1]
            assert ended.drained.ended_calls == 1
        rest: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):  # so that nobody takes it for whole
            async for event in long:
                rest.append(event)  # noqa: PERF401 - those before the error count
        assert json.loads(rest[-1])["error"]["code"] == "drained"


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", "/v1/completions", json=body, timeout=90) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                yield line.removeprefix("data: ")
