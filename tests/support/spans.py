"""Spans as they end, and what must hold of every trace."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer


class SpanLog(SpanExporter):
    """Keeps the spans that ended; made and used on one event loop."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self._more = asyncio.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans.extend(spans)
        self._more.set()
        return SpanExportResult.SUCCESS

    def tracer(self) -> Tracer:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self))
        return provider.get_tracer("test")

    async def wait(self, num_spans: int) -> list[ReadableSpan]:
        """Until that many have ended; a test that waits for too many fails after a minute."""
        async with asyncio.timeout(60):
            while len(self.spans) < num_spans:
                self._more.clear()
                await self._more.wait()
        return self.spans


def assert_one_tree(spans: Sequence[ReadableSpan], *, remote_parent: int = 0) -> ReadableSpan:
    """All spans are one trace with one root and no orphan, each ended once and within what began it; returns the root.

    `remote_parent` is the id of a span of the caller's, outside the trace as we have it.
    """
    assert spans, "no spans"
    assert len({span.context.trace_id for span in spans}) == 1, f"several traces: {_names(spans)}"
    ids = Counter(span.context.span_id for span in spans)
    assert max(ids.values()) == 1, "a span has ended twice"
    orphans = [span.name for span in spans if span.parent and span.parent.span_id not in {*ids, remote_parent}]
    assert not orphans, f"orphans: {orphans}"
    roots = [span for span in spans if span.parent is None or span.parent.span_id == remote_parent]
    assert len(roots) == 1, f"roots: {_names(roots)}"
    late = [span.name for span in spans if span.end_time is None or span.start_time < roots[0].start_time]
    assert not late, f"not ended, or begun before the root: {late}"
    return roots[0]


def _names(spans: Sequence[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]
