"""Collectors of spans: one that keeps what comes, one that takes its time, and ways of being away, which give a URL."""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
from links import hold_port
from moments import until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from traces import Span, spans_of

_FULL_S = 0.3  # what no connection to this machine takes
PATIENCE_S = 60.0


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
def working(
    delay_s: float = 0.0, take: Callable[[pb.ExportTraceServiceRequest], object] | None = None
) -> Iterator[str]:
    """Takes what comes, and says so after a while."""
    server = grpc.server(ThreadPoolExecutor(8))
    add_TraceServiceServicer_to_server(_Service(delay_s, take), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def stuck() -> Iterator[str]:
    """Takes calls, and answers none as long as it is there."""
    over = threading.Event()
    with working(take=lambda _: over.wait()) as url:
        try:
            yield url
        finally:
            over.set()


class _Service(TraceServiceServicer):  # type: ignore[misc]
    def __init__(self, delay_s: float, take: Callable[[pb.ExportTraceServiceRequest], object] | None) -> None:
        self._delay_s = delay_s
        self._take = take

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        if self._take is not None:
            self._take(request)
        time.sleep(self._delay_s)
        return pb.ExportTraceServiceResponse()


class Collector:
    """Keeps what comes, spans of Envoy's and of ours alike."""

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Span] = []
        self._changed = threading.Condition()

    def take(self, request: pb.ExportTraceServiceRequest) -> None:
        come = spans_of(TracesData(resource_spans=request.resource_spans).SerializeToString())
        with self._changed:
            self._spans += come
            self._changed.notify_all()

    @property
    def address(self) -> str:
        """host:port."""
        return self.url.removeprefix("http://")

    @property
    def spans(self) -> list[Span]:
        """All that have come, earliest first."""
        with self._changed:
            return sorted(self._spans, key=lambda span: span.start_ns)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def of(self, service: str, trace_id: str) -> list[Span]:
        return [span for span in self.spans if (span.service, span.trace_id) == (service, trace_id)]

    def wait(self, ready: Callable[[list[Span]], bool]) -> list[Span]:
        """All spans, once they are as `ready` wants them."""
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self._spans), PATIENCE_S), self._told()
        return self.spans

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        try:
            await until(reached, what, PATIENCE_S)
        except AssertionError as error:
            error.add_note(self._told())
            raise

    def _told(self) -> str:
        return f"of {Counter((span.service, span.name, span.kind) for span in self._spans)}"


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with working(take=collector.take) as url:
        collector.url = url
        yield collector


AWAY: Mapping[str, Callable[[], contextlib.AbstractContextManager[str]]] = {
    "closed port": closed_port,
    "black hole": black_hole,
    "silent": silent,
}


def _url(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"
