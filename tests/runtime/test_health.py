"""A worker's health while its engine computes, hangs, and goes on."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import loopback
from opentelemetry.trace import NoOpTracer

from pageferry.core.errors import UnavailableError
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.health import keep_health_true
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import LIVENESS, GrpcServer
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.runtime.worker_metrics import WorkerMetrics
from pageferry.v1 import decode_pb2, decode_pb2_grpc
from pageferry.v1.inference_pb2 import WorkerLoad
from pageferry.v1.worker_pb2 import Snapshot

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class OneStep:
    """Idle, but for one step that the test gives it."""

    def __init__(self) -> None:
        self.work: Callable[[], object] | None = None

    def step(self, now: float) -> list[None]:
        work, self.work = self.work, None
        if work is not None:
            work()
        return []

    def next_wakeup(self, now: float) -> float | None:
        return 0.0 if self.work else None


class Watched:
    """A server over an engine whose health is watched; `statuses` are those that a watcher of its health was told."""

    def __init__(self, server: GrpcServer, channel: grpc.aio.Channel, stall_s: float) -> None:
        self.stepper = OneStep()
        self.engine = EngineThread(self.stepper, lambda events: None, name="engine")
        self.publisher = Publisher(WorkerHub(b"i" * 16, Snapshot), WorkerMetrics())
        self.publisher.publish(WorkerLoad(running=3))
        self.statuses: list[int] = []
        self.decode: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        self.channel = channel
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._told = asyncio.Event()
        self._parts = (self.engine, server, self.publisher, stall_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.engine.start()
        tasks = [asyncio.create_task(keep_health_true(*self._parts)), asyncio.create_task(self._listen())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self.engine.stop()

    async def _listen(self) -> None:
        async for response in self._health.Watch(health_pb2.HealthCheckRequest()):
            self.statuses.append(response.status)
            self._told.set()

    async def until(self, status: int) -> None:
        async with asyncio.timeout(60):
            while self.statuses[-1:] != [status]:
                self._told.clear()
                await self._told.wait()

    async def do(self, work: Callable[[], object]) -> None:
        await self.engine.call(lambda: setattr(self.stepper, "work", work))

    @property
    def load(self) -> WorkerLoad:
        assert self.publisher.hub.load is not None
        return self.publisher.hub.load


@asynccontextmanager
async def watched(stall_s: float) -> AsyncIterator[Watched]:
    async def one_message(request: Any, context: Any) -> Any:
        yield decode_pb2.DecodeResponse()

    async with loopback(NoOpTracer(), decode=one_message) as (server, channel):
        await server.set_serving(True)
        worker = Watched(server, channel, stall_s)
        async with worker.running():
            await worker.until(SERVING)
            yield worker


@pytest.mark.field("kserve/kserve#6259", "vllm-project/vllm#36451")
async def test_a_frozen_engine_is_not_serving_and_refuses_until_it_moves_again() -> None:
    async with watched(0.3) as worker:
        release = threading.Event()
        await worker.do(lambda: release.wait(60))
        await worker.until(NOT_SERVING)
        assert worker.load == WorkerLoad(running=3, stalled=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.decode.Decode(decode_pb2.DecodeRequest()).read()
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (UnavailableError, "ENGINE_STALLED")
        release.set()
        await worker.until(SERVING)
        assert worker.load == WorkerLoad(running=3)
        assert await worker.decode.Decode(decode_pb2.DecodeRequest()).read() == decode_pb2.DecodeResponse()
        assert worker.statuses == [SERVING, NOT_SERVING, SERVING]


def compute_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


@pytest.mark.field("kserve/kserve#6259", "gonka-ai/gonka#1421")
async def test_a_busy_engine_serves_throughout_a_step_far_longer_than_a_frozen_one_is_given() -> None:
    async with watched(1.0) as worker:
        done = threading.Event()
        await worker.do(lambda: [compute_for(3.0), done.set()])
        await asyncio.to_thread(done.wait, 60)
        await worker.engine.call(lambda: None)
        assert worker.statuses == [SERVING]


async def test_an_idle_engine_serves() -> None:
    async with watched(0.1) as worker:
        await asyncio.sleep(0.5)
        assert worker.statuses == [SERVING]


async def test_an_engine_frozen_with_a_command_only_is_found_out() -> None:
    async with watched(0.2) as worker:
        release = threading.Event()
        worker.engine.post(lambda: release.wait(60))
        await worker.until(NOT_SERVING)
        release.set()
        await worker.until(SERVING)


async def test_a_stall_that_ends_while_the_server_drains_does_not_make_it_serve_again() -> None:
    async with loopback(NoOpTracer()) as (server, channel):
        health: Any = health_pb2_grpc.HealthStub(channel)
        await server.set_serving(True)
        await server.drain(0)
        await server.set_serving(True)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING


async def liveness(channel: grpc.aio.Channel) -> int:
    health: Any = health_pb2_grpc.HealthStub(channel)
    return int((await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))).status)


async def test_only_a_stall_is_a_reason_to_restart() -> None:
    async with loopback(NoOpTracer()) as (server, channel):
        assert await liveness(channel) == SERVING  # as while a model is loading
        await server.set_serving(True)
        assert await liveness(channel) == SERVING
        await server.drain(0)
        assert await liveness(channel) == SERVING
    async with watched(0.2) as worker:
        release = threading.Event()
        await worker.do(lambda: release.wait(60))
        await worker.until(NOT_SERVING)
        assert await liveness(worker.channel) == NOT_SERVING
        release.set()
        await worker.until(SERVING)
        assert await liveness(worker.channel) == SERVING
