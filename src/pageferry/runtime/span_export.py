"""Spans on their way to a collector: a bounded queue, and a thread of its own that sends from it.

Written here, since the SDK's processor gives up a batch while a collector starts again, and counts nothing it drops.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult

from pageferry.runtime.logs import log

EXPORT_DELAY_S = 0.2
EXPORT_TIMEOUT_S = 10.0  # of one call
_LATE_S = 9.5  # what takes longer was ended by that timeout
RETRY_S = 1.0
REFUSED_S = 60.0  # so long one span may hold up the others, since it may be the one that a collector can't take
MAX_QUEUED_SPANS = 4096
MAX_BATCH_SPANS = 256  # encoding holds up Python's other threads
SHUTDOWN_S = 1.5  # for what is left


class Sender(Protocol):
    """As the SDK's exporters are; a call may take as long as it likes."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult: ...
    def shutdown(self) -> None: ...


class SpanQueue(SpanProcessor):
    """The end of a span appends it and waits for nothing, whatever the collector does; with the queue full, it is lost.

    Spans that were not taken wait for their collector, while one of them is sent again and again; but those that had no
    answer in time are lost, since the collector may have them. Each that is lost counts once. The sending thread logs
    an outage when it begins to show, and when it is over.
    """

    def __init__(self, sender: Sender, endpoint: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = endpoint
        self.num_lost = 0  # spans that ended and will never be sent
        self.on_lost: Callable[[int], None] = lambda num_spans: None  # on any thread
        self._sender = sender
        self._clock = clock
        self._queue: deque[ReadableSpan] = deque()
        self._batch: list[ReadableSpan] = []  # that is being sent
        self._counting = threading.Lock()
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._refused_since: float | None = None  # as long as nothing is taken
        self._in_outage = False
        self._num_lost_before = 0  # the call that was made last
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Spans that wait, those that are being sent among them."""
        return len(self._queue) + len(self._batch)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._stopping.is_set() or len(self._queue) >= MAX_QUEUED_SPANS:
            self._lose(1)
        else:
            self._queue.append(span)

    def shutdown(self) -> None:
        """Send what is left, for at most SHUTDOWN_S; the rest is lost. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(SHUTDOWN_S)
        self._over.set()
        self._sender.shutdown()
        self._lose(len(self))
        if self.num_lost:
            log("spans_lost", level="warning", endpoint=self.endpoint, spans=self.num_lost)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Not offered: what is here goes out by itself, or at the end."""
        return not len(self)

    def _lose(self, num_spans: int) -> None:
        if num_spans:
            with self._counting:
                self.num_lost += num_spans
            self.on_lost(num_spans)

    def _run(self) -> None:
        while not self._stopping.wait(EXPORT_DELAY_S if self._refused_since is None else RETRY_S):
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        is_taken = True
        while is_taken and self._queue and not self._over.is_set():
            # In an outage one is enough to see whether it is over.
            limit = MAX_BATCH_SPANS if self._refused_since is None else 1
            self._batch = [self._queue.popleft() for _ in range(min(len(self._queue), limit))]
            called = self._clock()
            is_taken = self._export(self._batch)
            if not self._over.is_set():  # else `shutdown` has counted them
                batch, self._batch = self._batch, []
                self._sent(batch, called, is_taken=is_taken)
                self._note(is_taken)

    def _sent(self, batch: Sequence[ReadableSpan], called: float, *, is_taken: bool) -> None:
        """The call, made at that time, is over: forget the batch, put it back, or lose it."""
        if is_taken:
            self._refused_since = None
            return
        now = self._clock()
        if self._refused_since is None:
            self._refused_since = called
        if now - called >= _LATE_S:
            self._lose(len(batch))
        elif now - self._refused_since >= REFUSED_S:
            self._refused_since = now
            self._lose(len(batch))
        else:
            self._queue.extendleft(reversed(batch))

    def _export(self, batch: Sequence[ReadableSpan]) -> bool:
        try:
            return self._sender.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # of certificates that can't be read, or of spans that can't be encoded
            if not self._in_outage:
                log("span_export_failed", level="error", error=error)
            return False

    def _note(self, is_sent: bool) -> None:
        """Log where an outage begins or ends."""
        num_lost = self.num_lost
        in_outage = not is_sent or num_lost > self._num_lost_before
        self._num_lost_before = num_lost
        if in_outage != self._in_outage:
            self._in_outage = in_outage
            event, level = ("span_export_failing", "warning") if in_outage else ("span_export_working", "info")
            log(event, level=level, endpoint=self.endpoint, waiting=len(self), lost=num_lost)
