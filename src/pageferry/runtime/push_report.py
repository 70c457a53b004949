"""What the sending end of a push tells of it: the span `kv.push`, and its figures once it is over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from opentelemetry.trace import SpanKind, Tracer

from pageferry.core.errors import PageferryError
from pageferry.core.handoff_tables import SenderState
from pageferry.core.layout import CacheLayout
from pageferry.core.page_io import DeviceClock
from pageferry.core.sender import Sender
from pageferry.runtime.device_spans import CopyTimes
from pageferry.runtime.frames import TRANSPORT, describe_pages, describe_timing
from pageferry.runtime.metrics import exemplar_of
from pageferry.runtime.push_figures import SENT, PushFigures
from pageferry.runtime.rpc_spans import PUSH_METHOD, PUSH_SPAN, end_span, rpc_attributes


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
