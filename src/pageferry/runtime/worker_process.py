"""The process of a worker: listens at once, loads its model, serves until it is told to stop, drains."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from pageferry.core.config import Config
from pageferry.core.errors import InternalError
from pageferry.runtime.admin import ADMIN_SERVICE, Admin
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.gpu_use import open_gpu
from pageferry.runtime.health import keep_health_true
from pageferry.runtime.logs import log
from pageferry.runtime.malloc import keep_freed_memory
from pageferry.runtime.process import ENGINE_OPTIONS, run_service
from pageferry.runtime.reports import Publisher
from pageferry.runtime.server import GrpcServer, ServerSecurity
from pageferry.runtime.telemetry import Tracing, configure_tracing
from pageferry.runtime.tls import Certificates
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.runtime.worker_main import WorkerMain, WorkerParts
from pageferry.runtime.worker_metrics import WorkerMetrics
from pageferry.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from pageferry.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

INCARNATION_BYTES = 16
_FAILED_CALLS_S = 1.0  # for calls to take the news that the engine failed


def run_worker(kind: type[WorkerMain[Any]]) -> NoReturn:
    """The process's main function."""
    run_service(lambda config, stop: serve_worker(config, stop, kind()), name=kind.name, engine_options=ENGINE_OPTIONS)


async def serve_worker(config: Config, stop: asyncio.Event, main: WorkerMain[Any]) -> int:
    """Run a worker until `stop`. Raises what keeps it from serving."""
    log("starting", config=config.describe())
    keep_freed_memory()
    certificates = Certificates.of(config.security)
    tracing = configure_tracing(f"pageferry-{main.name}", config.telemetry, certificates=certificates)
    executor = ThreadPoolExecutor(1, thread_name_prefix="transfer")
    try:
        security = ServerSecurity.of(config.security, certificates)
        async with GrpcServer(config.server, tracing.tracer, security) as server:
            await _serve(config, stop, main, server, tracing, executor, certificates)
    finally:
        await main.close()
        executor.shutdown(wait=False)
        tracing.shutdown()
    return 0


async def _serve(
    config: Config,
    stop: asyncio.Event,
    main: WorkerMain[Any],
    server: GrpcServer,
    tracing: Tracing,
    executor: ThreadPoolExecutor,
    certificates: Certificates | None,
) -> None:
    async def drain(grace_s: float | None) -> int:
        await server.set_serving(False)
        publisher.hub.publish_draining()
        num_ended = await server.drain(config.server.drain_grace_s if grace_s is None else grace_s)
        await main.drained()
        return num_ended

    incarnation = secrets.token_bytes(INCARNATION_BYTES)
    publisher = Publisher(WorkerHub(incarnation, main.snapshot), WorkerMetrics())
    tracing.count_losses(publisher.metrics)
    if (gpu := open_gpu(config.engine.device)) is not None:
        publisher.metrics.follow_gpu(gpu)
    _add_services(server, main, publisher, drain)
    port = await server.start()
    if config.telemetry.metrics_port:
        publisher.metrics.serve(config.server.host, config.telemetry.metrics_port, certificates)
    log("listening", host=config.server.host, port=port)
    parts = WorkerParts(config, incarnation, port, tracing.tracer, publisher, executor, certificates)
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(main.load(parts))
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return
    engine = await loading
    await server.set_serving(True)
    log("ready", host=config.server.host, port=port)
    watching = asyncio.create_task(keep_health_true(engine, server, publisher, config.server.stall_s))
    try:
        await _until_over(engine, stopping, watching, drain)
    finally:
        watching.cancel()


def _add_services(
    server: GrpcServer,
    main: WorkerMain[Any],
    publisher: Publisher,
    drain: Callable[[float | None], Awaitable[int]],
) -> None:
    publisher.metrics.follow_open_calls(lambda: server.num_open)
    server.add(add_WorkerServiceServicer_to_server, publisher.hub, "pageferry.v1.WorkerService")
    server.add(add_AdminServiceServicer_to_server, Admin(drain, lambda: server.num_open), ADMIN_SERVICE)
    main.register(server)


async def _until_over(
    engine: EngineThread[Any],
    stopping: asyncio.Task[bool],
    watching: asyncio.Task[None],
    drain: Callable[[float | None], Awaitable[int]],
) -> None:
    """Until it shall stop, then drain; raises what an engine failed with, or what watches it."""
    await asyncio.wait((engine.failed, stopping, watching), return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        watching.result()
    if engine.failed.done():
        failure = engine.failed.result()
        log("engine_failed", level="error", error=failure)
        await drain(_FAILED_CALLS_S)
        raise InternalError(f"the engine failed: {type(failure).__name__}", reason="ENGINE_FAILED")
    await drain(None)
