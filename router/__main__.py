"""`python -m pageferry.router --config FILE`: watches the workers, and serves gRPC and, with an http_port, HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server

from pageferry.core.config import Config
from pageferry.core.errors import invalid
from pageferry.core.model_files import load_config_of, resolve_model, sampling_defaults
from pageferry.ext_proc.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from pageferry.oip.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from pageferry.router.fleet import Fleet
from pageferry.router.frontend import Frontend
from pageferry.router.gateway.http import build_app
from pageferry.router.gateway.page import Page
from pageferry.router.gateway.serving import serve_http
from pageferry.router.gateway.tls import HttpTls
from pageferry.router.metrics import RouterMetrics
from pageferry.router.oip import OIP_SERVICE, OpenInferenceServicer
from pageferry.router.picker import PICKER_SERVICE, PickerServicer
from pageferry.router.service import InferenceServicer, authorization_of
from pageferry.router.telemetry import Telemetry
from pageferry.runtime.access import check_local
from pageferry.runtime.admin import ADMIN_SERVICE, Admin
from pageferry.runtime.channels import open_channel
from pageferry.runtime.logs import log
from pageferry.runtime.process import lasting_objects, run_service
from pageferry.runtime.server import GrpcServer, ServerSecurity
from pageferry.runtime.telemetry import configure_tracing
from pageferry.runtime.tls import Certificates
from pageferry.runtime.trace_store import TraceReceiver, TraceStore
from pageferry.text.tokenizer import load_tokenizer
from pageferry.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from pageferry.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

# A prompt above its own limit should meet that limit's error, which names the field, and not the transport's.
_MIN_MESSAGE_BYTES = 16 * 2**20
_SERVER_DRAIN_S = 1.0  # for calls whose generation has ended already


async def main(config: Config, stop: asyncio.Event) -> int:
    """Serve until `stop`, then drain."""
    log("starting", config=config.describe())
    if not config.router.decode:
        raise invalid("router.decode", config.router.decode, "must name at least one decode worker")
    metrics = RouterMetrics()
    traces = TraceStore.of(config.telemetry)
    certificates = Certificates.of(config.security)
    tracing = configure_tracing(
        "pageferry-router",
        config.telemetry,
        certificates=certificates,
        local=traces,
        sample_ratio=config.telemetry.sample_ratio,
    )
    tracing.count_losses(metrics)
    telemetry = Telemetry(tracing.tracer, metrics, None if tracing.is_exported else traces)
    try:
        await _serve(config, stop, telemetry, certificates)
    finally:
        tracing.shutdown()
    return 0


async def _serve(config: Config, stop: asyncio.Event, telemetry: Telemetry, certificates: Certificates | None) -> None:
    files = resolve_model(config.engine.model)
    with lasting_objects():
        own_template = config.router.chat_template
        tokenizer = load_tokenizer(files, Path(own_template) if own_template else None)
    if tokenizer.template.problem:
        log("no_chat_template", level="warning", problem=tokenizer.template.problem)
    fleet = Fleet(
        config.router.prefill,
        config.router.decode,
        lambda address, name: open_channel(address, telemetry.tracer, certificates, name=name),
        model=files.name,
        discovery_s=config.router.discovery_s,
    )
    frontend = Frontend(config, load_config_of(files), tokenizer, fleet, telemetry, sampling_defaults(files))
    server_config = replace(config.server, max_message_bytes=max(config.server.max_message_bytes, _MIN_MESSAGE_BYTES))
    async with AsyncExitStack() as stack:
        security = ServerSecurity.of(config.security, certificates, for_clients=True)
        server = await stack.enter_async_context(GrpcServer(server_config, telemetry.tracer, security))

        async def drain(grace_s: float | None) -> int:
            return await _drain(server, frontend, config.server.drain_grace_s if grace_s is None else grace_s)

        _add_services(config, server, frontend, telemetry, drain)
        port = await server.start()
        stack.push_async_callback(fleet.close)
        telemetry.metrics.follow_open_calls(lambda: frontend.num_live)
        if config.telemetry.metrics_port:
            telemetry.metrics.serve(config.server.host, config.telemetry.metrics_port, certificates)
        log("listening", host=config.server.host, port=port, http_port=config.server.http_port, model=files.name)
        app = build_app(
            frontend,
            telemetry.metrics.registry,
            max_body_bytes=_MIN_MESSAGE_BYTES,
            refuse_unknown=config.server.unknown_fields == "refuse",
            cors_origins=config.server.cors_origins,
            page=_page(config, frontend, telemetry, files.name) if config.server.page else None,
        )
        tls = HttpTls.of(config.security, certificates)
        await _run(config, stop, server, frontend, fleet, partial(serve_http, app, tls=tls))


def _page(config: Config, frontend: Frontend, telemetry: Telemetry, model: str) -> Page:
    trace_url = config.telemetry.trace_url
    return Page(frontend, telemetry.record, model, keeps_traces=telemetry.traces is not None, trace_url=trace_url)


def _add_services(
    config: Config,
    server: GrpcServer,
    frontend: Frontend,
    telemetry: Telemetry,
    drain: Callable[[float | None], Awaitable[int]],
) -> None:
    """Where peers must show certificates, these have been checked before; else it is for API keys, if there are any."""
    security = config.security

    def check_admin(context: Any) -> None:
        if not security.ca_file:
            frontend.check_admin(authorization_of(context), "a drain")

    def check_sender(context: Any) -> None:
        if security.tenants_file and not security.ca_file:  # workers have no key
            check_local("spans", context)

    server.add(add_InferenceServiceServicer_to_server, InferenceServicer(frontend), "pageferry.v1.InferenceService")
    server.add(add_GRPCInferenceServiceServicer_to_server, OpenInferenceServicer(frontend), OIP_SERVICE)
    server.add(add_AdminServiceServicer_to_server, Admin(drain, lambda: frontend.num_live, check_admin), ADMIN_SERVICE)
    if config.router.picker_port:
        picker = PickerServicer(
            frontend.picks(),
            max_body_bytes=_MIN_MESSAGE_BYTES,
            refuse_unknown=config.server.unknown_fields == "refuse",
        )
        server.add(add_ExternalProcessorServicer_to_server, picker, PICKER_SERVICE)
    if telemetry.traces is not None:
        receiver = TraceReceiver(telemetry.traces, check_sender)
        server.add(add_TraceServiceServicer_to_server, receiver, "opentelemetry.proto.collector.trace.v1.TraceService")


async def _run(
    config: Config,
    stop: asyncio.Event,
    server: GrpcServer,
    frontend: Frontend,
    fleet: Fleet,
    http: Callable[[str, int, asyncio.Event], Coroutine[Any, Any, None]],
) -> None:
    """Until `stop`, then drain; a part that fails ends all."""
    http_stop = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as parts:
            readiness = parts.create_task(_follow_readiness(server, frontend, fleet))
            if config.server.http_port:
                parts.create_task(http(config.server.host, config.server.http_port, http_stop))
            recording = parts.create_task(frontend.keep_record())
            fleet.start()
            await stop.wait()
            readiness.cancel()
            await _drain(server, frontend, config.server.drain_grace_s)
            recording.cancel()
            http_stop.set()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _drain(server: GrpcServer, frontend: Frontend, grace_s: float) -> int:
    """Take nothing more and let live requests end, those over HTTP too; how many had to be ended."""
    await server.begin_drain(grace_s, frontend.num_live)
    # First what both servers share: afterwards neither has a generation to wait for.
    num_ended = await frontend.drain(grace_s)
    await server.drain(_SERVER_DRAIN_S)
    return num_ended


async def _follow_readiness(server: GrpcServer, frontend: Frontend, fleet: Fleet) -> None:
    """Keep the health service's answer true, and log its changes with the reasons."""
    changed = asyncio.Event()
    fleet.listeners.append(changed.set)
    was_ready = False
    while True:
        await changed.wait()
        changed.clear()
        if frontend.ready != was_ready:
            was_ready = frontend.ready
            await server.set_serving(was_ready)
            problems = {one.address: f"{one.state}: {one.reason}" for one in fleet.status() if one.reason}
            log("ready" if was_ready else "not_ready", level="info" if was_ready else "warning", unready=problems)


if __name__ == "__main__":
    run_service(main, name="router")
