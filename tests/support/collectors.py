"""Collectors of spans: one that works or takes its time, and ways of being away. Each is a context that gives a URL."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
from links import hold_port
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

_FULL_S = 0.3  # what no connection to this machine takes


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """Whoever calls is refused."""
    with hold_port() as holder:
        yield _url(holder)


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Connections are accepted, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield _url(server)


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """No packet is answered: the queue of connections is full, and the kernel drops those that come."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            try:
                stack.enter_context(socket.create_connection(server.getsockname(), timeout=_FULL_S))
            except TimeoutError:
                break
        else:
            raise AssertionError("the queue of connections is never full")
        yield _url(server)


@contextlib.contextmanager
def working(delay_s: float = 0.0, take: Callable[[pb.ExportTraceServiceRequest], None] | None = None) -> Iterator[str]:
    """Takes what comes, and says so after a while."""
    server = grpc.server(ThreadPoolExecutor(8))
    add_TraceServiceServicer_to_server(_Collector(delay_s, take), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


class _Collector(TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, delay_s: float, take: Callable[[pb.ExportTraceServiceRequest], None] | None) -> None:
        self._delay_s = delay_s
        self._take = take

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        if self._take is not None:
            self._take(request)
        time.sleep(self._delay_s)
        return pb.ExportTraceServiceResponse()


AWAY: Mapping[str, Callable[[], contextlib.AbstractContextManager[str]]] = {
    "closed port": closed_port,
    "black hole": black_hole,
    "silent": silent,
}


def _url(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"
