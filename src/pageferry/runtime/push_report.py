"""What a push of pages came to, as both of its ends tell it, and the span `kv.push` of the sending end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.trace import SpanKind, Tracer

from pageferry.core.errors import PageferryError
from pageferry.core.handoff_tables import SenderState
from pageferry.core.layout import CacheLayout
from pageferry.core.page_io import DeviceClock
from pageferry.core.sender import HandoffStats, Sender
from pageferry.runtime.device_spans import CopyTimes
from pageferry.runtime.frames import TRANSPORT, describe_pages, describe_timing
from pageferry.runtime.metrics import exemplar_of
from pageferry.runtime.rpc_spans import PUSH_METHOD, PUSH_SPAN, end_span, rpc_attributes

SENT, RECEIVED = "sent", "received"


@dataclass(frozen=True, slots=True)
class PushFigures:
    """Of a push that is over."""

    direction: str  # SENT or RECEIVED
    transport: str
    pages: int
    num_bytes: int
    stalled_s: float = 0.0  # that the sender waited for the receiver
    stats: HandoffStats | None = None  # of a sender whose push is committed
    failure: str | None = None  # the reason of what broke it off
    exemplar: dict[str, str] | None = None  # its trace


class PushReport:
    """Begins with the push; the span is a child of the context current then. The caller owes `end`."""

    def __init__(self, tracer: Tracer, endpoint: str, device: DeviceClock | None, clock: Callable[[], float]) -> None:
        attributes = rpc_attributes(PUSH_METHOD, endpoint)
        self.span = tracer.start_span(PUSH_SPAN, kind=SpanKind.CLIENT, attributes=attributes)
        self.copies = CopyTimes(device)
        self._clock = clock
        self._stalled_s = 0.0

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Inside, the sender waits for the receiver to take pages."""
        began = self._clock()
        try:
            yield
        finally:
            self._stalled_s += self._clock() - began

    def end(self, sender: Sender, transport: str, layout: CacheLayout, failure: PageferryError | None) -> PushFigures:
        """End the span; `failure` is what ended a push that was not committed, None of one that was."""
        stats = sender.stats if failure is None else None
        if sender.state is not SenderState.IDLE:
            self.span.set_attribute(TRANSPORT, transport)
        if stats is not None:
            describe_pages(self.span, layout, stats.pages, stats.bytes)
            describe_timing(self.span, stats, self._stalled_s)
            self.span.set_attributes(self.copies.attributes)
        code, message, reason = ("OK", "", None) if failure is None else (failure.code, failure.message, failure.reason)
        end_span(self.span, grpc.StatusCode[code], message)
        num_pages, num_bytes = sender.shipped
        exemplar = exemplar_of(self.span)
        return PushFigures(SENT, transport, num_pages, num_bytes, self._stalled_s, stats, reason, exemplar)
