"""Spans of calls: which are traced, under which names, with which attributes, and how their context travels."""

from collections.abc import Iterable

import grpc
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PUSH_METHOD = "pageferry.v1.PageService/Push"
PUSH_SPAN = "kv.push"
_INFERENCE = "pageferry.v1.InferenceService/"
_OPEN_INFERENCE = "inference.GRPCInferenceService/"
_UNTRACED = {
    "pageferry.v1.AdminService/Drain",
    "pageferry.v1.WorkerService/Watch",
    "pageferry.v1.DecodeService/Subscribe",
    "opentelemetry.proto.collector.trace.v1.TraceService/Export",
    *(_INFERENCE + name for name in ("Tokenize", "ListModels", "GetStatus", "GetTrace")),
    *(
        _OPEN_INFERENCE + name
        for name in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata")
    ),
}
_UNTRACED_SERVICES = ("grpc.health.", "grpc.reflection.")
# These spans hold more than the call's status, so the router and PushClient make them.
_MADE_BY_SERVER = {
    _INFERENCE + "Generate",
    _OPEN_INFERENCE + "ModelInfer",
    _OPEN_INFERENCE + "ModelStreamInfer",
    "envoy.service.ext_proc.v3.ExternalProcessor/Process",
}
_MADE_BY_CLIENT = {PUSH_METHOD}
_PROPAGATOR = TraceContextTextMapPropagator()


def server_span_name(method: str) -> str | None:
    """The name of the span that the interceptor makes for a served call, if it makes one."""
    return None if method in _MADE_BY_SERVER else _span_name(method)


def client_span_name(method: str) -> str | None:
    """The same for a call made."""
    return None if method in _MADE_BY_CLIENT else _span_name(method)


def _span_name(method: str) -> str | None:
    if method in _UNTRACED or method.startswith(_UNTRACED_SERVICES):
        return None
    return PUSH_SPAN if method == PUSH_METHOD else method


def extract_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's W3C context; keys in any spelling, since gateways pass on what HTTP clients wrote."""
    carrier = {key.lower(): value for key, value in metadata or () if isinstance(value, str)}
    return _PROPAGATOR.extract(carrier, Context())


def inject_context(context: Context | None = None) -> dict[str, str]:
    """Metadata that carries a context, by default the current one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier


def rpc_attributes(method: str, address: str = "") -> dict[str, str | int]:
    """What is known before the call: its method, and on the caller's side whom it is for."""
    attributes: dict[str, str | int] = {"rpc.system.name": "grpc", "rpc.method": method}
    host, _, port = address.rpartition(":")
    if "," not in address and port.isdecimal():
        attributes |= {"server.address": host, "server.port": int(port)}
    elif address:
        attributes["server.address"] = address
    return attributes


def end_span(span: Span, code: grpc.StatusCode, description: str = "") -> None:
    """Put the call's status onto its span, and end it."""
    span.set_attribute("rpc.response.status_code", code.name)
    if code is not grpc.StatusCode.OK:
        span.set_attribute("error.type", code.name)
        span.set_status(Status(StatusCode.ERROR, description or code.name))
    span.end()
