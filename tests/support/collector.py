"""An OpenTelemetry collector that keeps what comes, spans of Envoy's and of ours alike."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Collected:
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    attributes: dict[str, Any]


class Collector(TraceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Collected] = []
        self._more = asyncio.Event()

    async def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            self.spans += [
                Collected(
                    str(service),
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    _attributes(span.attributes),
                )
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        self._more.set()
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Collected]:
        return [span for span in self.spans if span.name == name]

    def of(self, service: str, trace_id: str) -> list[Collected]:
        return [span for span in self.spans if (span.service, span.trace_id) == (service, trace_id)]

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not reached():
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            names = Counter((span.service, span.name) for span in self.spans)
            raise AssertionError(f"{what}: not within {PATIENCE_S} s, of {names}") from None


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, server = Collector(), grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
