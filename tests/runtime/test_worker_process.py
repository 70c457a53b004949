"""The process of a worker: what it answers while it loads, when it is told to stop, and when its engine fails."""

import asyncio
import threading
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pageferry.core.config import Config, ServerConfig
from pageferry.core.errors import InternalError, InvalidArgumentError, UnavailableError
from pageferry.prefill_svc.__main__ import PrefillMain
from pageferry.runtime import worker_main
from pageferry.runtime.background import in_background
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer
from pageferry.runtime.work_calls import loading
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.runtime.worker_main import WorkerParts, advertised_host
from pageferry.runtime.worker_metrics import WorkerMetrics
from pageferry.runtime.worker_process import serve_worker
from pageferry.v1.admin_pb2 import Drained, DrainRequest, DrainResponse
from pageferry.v1.admin_pb2_grpc import AdminServiceStub
from pageferry.v1.inference_pb2 import WorkerLoad
from pageferry.v1.worker_pb2 import Snapshot, WatchRequest, WatchResponse
from pageferry.v1.worker_pb2_grpc import WorkerServiceStub


class IdleStep:
    """Steps that do nothing until they fail."""

    failing = False

    def step(self, now: float) -> list[None]:
        if self.failing:
            raise MemoryError("no memory left")
        return []

    def next_wakeup(self, now: float) -> float | None:
        return None


class FakeMain:
    """A worker that is loaded when the test says so."""

    name = "fake"

    def __init__(self) -> None:
        self.listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.may_load = asyncio.Event()
        self.step = IdleStep()
        self.engine: EngineThread[Any] | None = None
        self.closed = self.drained_once = False

    def register(self, server: GrpcServer) -> None: ...

    async def load(self, parts: WorkerParts) -> EngineThread[Any]:
        self.listening.set_result(f"127.0.0.1:{parts.port}")
        await self.may_load.wait()
        self.engine = EngineThread(self.step, lambda events: None, name="fake-engine")
        self.engine.start()
        return self.engine

    def snapshot(self) -> Snapshot:
        if self.engine is None:
            raise loading()
        return Snapshot(model="fake")

    async def drained(self) -> None:
        assert not self.closed
        self.drained_once = True

    async def close(self) -> None:
        self.closed = True
        if self.engine is not None:
            await self.engine.stop()


class Process:
    def __init__(self) -> None:
        self.main = FakeMain()
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(serve_worker(Config(), self.stop, self.main))

    async def health(self, channel: grpc.aio.Channel) -> int:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest())
        return response.status

    async def until_serving(self, channel: grpc.aio.Channel) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest())
        while (await call.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        call.cancel()

    async def first_message(self, channel: grpc.aio.Channel) -> WatchResponse:
        stub: Any = WorkerServiceStub(channel)
        call = stub.Watch(WatchRequest())
        try:
            message: WatchResponse = await anext(aiter(call))
            return message
        finally:
            call.cancel()


async def test_it_listens_while_it_loads_then_serves_then_drains() -> None:
    process = Process()
    async with grpc.aio.insecure_channel(await process.main.listening) as channel:
        assert await process.health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await process.first_message(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        process.main.may_load.set()
        await process.until_serving(channel)
        message = await process.first_message(channel)
        assert message.snapshot.model == "fake"
        assert len(message.incarnation) == 16
        stub: Any = AdminServiceStub(channel)
        told = [message async for message in stub.Drain(DrainRequest(grace_ms=0))]
        assert told[-1] == DrainResponse(drained=Drained())
        assert await process.health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await process.first_message(channel)).snapshot.draining
        process.stop.set()
        assert await process.task == 0
    assert process.main.closed
    assert process.main.drained_once


async def test_a_watcher_is_told_nothing_before_the_engine_has_told_its_load() -> None:
    main = PrefillMain()
    main._publisher = Publisher(WorkerHub(b"i" * 16, main.snapshot), WorkerMetrics())
    with pytest.raises(UnavailableError, match="is loading"):
        await anext(main._publisher.hub.Watch(WatchRequest(), None))
    main._publisher.publish(WorkerLoad(running=1))
    assert (await anext(main._publisher.hub.Watch(WatchRequest(), None))).snapshot.load.running == 1


async def test_told_to_stop_while_loading_it_stops_at_once() -> None:
    process = Process()
    await process.main.listening
    process.stop.set()
    assert await process.task == 0
    assert process.main.closed


async def test_an_engine_that_fails_ends_the_process_with_the_reason() -> None:
    process = Process()
    async with grpc.aio.insecure_channel(await process.main.listening) as channel:
        process.main.may_load.set()
        await process.until_serving(channel)
        process.main.step.failing = True
        assert process.main.engine is not None
        process.main.engine.post(lambda: None)
        with pytest.raises(InternalError, match=r"^the engine failed: MemoryError$"):
            await process.task


async def test_a_frozen_engine_does_not_keep_the_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_main, "_STOP_S", 0.1)
    main = PrefillMain()
    release = threading.Event()
    main._loaded = worker = FrozenWorker()  # type: ignore[assignment]
    worker.engine.start()
    worker.engine.post(release.wait)
    await main.close()
    release.set()
    await worker.stop()


class FrozenWorker:
    def __init__(self) -> None:
        self.engine: EngineThread[Any] = EngineThread(IdleStep(), lambda events: None, name="frozen-engine")

    async def stop(self) -> None:
        await self.engine.stop()


async def test_what_runs_in_the_background_gives_its_result_or_its_error() -> None:
    def fail() -> None:
        raise UnavailableError("no model")

    assert await in_background(lambda: threading.current_thread().name) == "loading"
    with pytest.raises(UnavailableError, match="no model"):
        await in_background(fail)


def test_the_advertised_host_is_one_that_peers_can_reach() -> None:
    assert advertised_host(ServerConfig(host="10.0.0.7")) == "10.0.0.7"
    assert advertised_host(ServerConfig(host="0.0.0.0", advertised_host="decode-0.decode")) == "decode-0.decode"
    assert advertised_host(ServerConfig(host="::", advertised_host="fd00::7")) == "[fd00::7]"  # a pod's, say
    with pytest.raises(InvalidArgumentError, match=r"advertised_host.*0\.0\.0\.0"):
        advertised_host(ServerConfig(host="0.0.0.0"))
