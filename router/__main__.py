"""`python -m pageferry.router --config FILE`: watches the workers, and serves gRPC and, with an http_port, HTTP."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server

from pageferry.core.config import Config
from pageferry.core.errors import invalid
from pageferry.core.model_files import ModelFiles, load_config_of, resolve_model, sampling_defaults
from pageferry.ext_proc.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from pageferry.oip.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from pageferry.router.fleet import Fleet
from pageferry.router.frontend import Frontend
from pageferry.router.gateway.bodies import Bodies
from pageferry.router.gateway.http import build_app
from pageferry.router.gateway.page import Page
from pageferry.router.gateway.serving import serve_http
from pageferry.router.gateway.tls import HttpTls
from pageferry.router.metrics import RouterMetrics
from pageferry.router.oip import OIP_SERVICE, OpenInferenceServicer
from pageferry.router.picker import PICKER_SERVICE, PickerServicer
from pageferry.router.running import Running
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
from pageferry.text.tokenizer import Tokenizer, load_tokenizer
from pageferry.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from pageferry.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

# A prompt above its own limit should meet that limit's error, which names the field, and not the transport's.
_MIN_MESSAGE_BYTES = 16 * 2**20


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
        await _Router(config, telemetry, certificates).serve(stop)
    finally:
        tracing.shutdown()
    return 0


class _Router:
    """One process's frontend, and the servers that offer it. Use `serve` once."""

    def __init__(self, config: Config, telemetry: Telemetry, certificates: Certificates | None) -> None:
        files = resolve_model(config.engine.model)
        tokenizer = _load_tokenizer(files, config.router.chat_template)
        self._config = config
        self._telemetry = telemetry
        self._certificates = certificates
        self._model = files.name
        self._fleet = Fleet(
            config.router.prefill,
            config.router.decode,
            lambda address, name: open_channel(address, telemetry.tracer, certificates, name=name),
            model=files.name,
            discovery_s=config.router.discovery_s,
        )
        defaults = sampling_defaults(files)
        self._frontend = Frontend(config, load_config_of(files), tokenizer, self._fleet, telemetry, defaults)
        self._bodies = Bodies(_MIN_MESSAGE_BYTES, telemetry.metrics.count_refusal)
        limits = replace(config.server, max_message_bytes=max(config.server.max_message_bytes, _MIN_MESSAGE_BYTES))
        security = ServerSecurity.of(config.security, certificates, for_clients=True)
        self._server = GrpcServer(limits, telemetry.tracer, security)
        self._running = Running(config.server, self._server, self._frontend, self._fleet)

    async def serve(self, stop: asyncio.Event) -> None:
        """Until `stop`, then drain."""
        server, metrics = self._config.server, self._telemetry.metrics
        async with self._server:
            self._add_services()
            port = await self._server.start()
            try:
                metrics.follow_open_calls(lambda: self._frontend.num_live)
                if self._config.telemetry.metrics_port:
                    metrics.serve(server.host, self._config.telemetry.metrics_port, self._certificates)
                log("listening", host=server.host, port=port, http_port=server.http_port, model=self._model)
                await self._running.until(stop, self._serve_http if server.http_port else None)
            finally:
                await self._fleet.close()

    def _add_services(self) -> None:
        frontend, traces, add = self._frontend, self._telemetry.traces, self._server.add
        add(add_InferenceServiceServicer_to_server, InferenceServicer(frontend), "pageferry.v1.InferenceService")
        add(add_GRPCInferenceServiceServicer_to_server, OpenInferenceServicer(frontend), OIP_SERVICE)
        admin = Admin(self._running.drain, lambda: frontend.num_live, self._check_admin)
        add(add_AdminServiceServicer_to_server, admin, ADMIN_SERVICE)
        if self._config.router.picker_port:
            picker = PickerServicer(frontend.picks(), self._bodies, refuse_unknown=self._refuses_unknown)
            add(add_ExternalProcessorServicer_to_server, picker, PICKER_SERVICE)
        if traces is not None:
            receiver = TraceReceiver(traces, self._check_sender)
            add(add_TraceServiceServicer_to_server, receiver, "opentelemetry.proto.collector.trace.v1.TraceService")

    def _check_admin(self, context: Any) -> None:
        """By API keys, if there are any; peers that must show certificates have been checked before."""
        if not self._config.security.ca_file:
            self._frontend.check_admin(authorization_of(context), "a drain")

    def _check_sender(self, context: Any) -> None:
        """Of spans: workers have no API key."""
        if self._config.security.tenants_file and not self._config.security.ca_file:
            check_local("spans", context)

    @property
    def _refuses_unknown(self) -> bool:
        """Fields of bodies."""
        return self._config.server.unknown_fields == "refuse"

    async def _serve_http(self, stop: asyncio.Event) -> None:
        server, telemetry = self._config.server, self._telemetry
        page = Page(
            self._frontend,
            telemetry.record,
            self._model,
            keeps_traces=telemetry.traces is not None,
            trace_url=self._config.telemetry.trace_url,
        )
        app = build_app(
            self._frontend,
            telemetry.metrics.registry,
            bodies=self._bodies,
            refuse_unknown=self._refuses_unknown,
            cors_origins=server.cors_origins,
            page=page if server.page else None,
        )
        tls = HttpTls.of(self._config.security, self._certificates)
        await serve_http(app, server.host, server.http_port, stop, tls=tls, on_stop=self._bodies.close)


def _load_tokenizer(files: ModelFiles, own_template: str) -> Tokenizer:
    with lasting_objects():
        tokenizer = load_tokenizer(files, Path(own_template) if own_template else None)
    if tokenizer.template.problem:
        log("no_chat_template", level="warning", problem=tokenizer.template.problem)
    return tokenizer


if __name__ == "__main__":
    run_service(main, name="router")
