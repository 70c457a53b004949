"""What a `kv.push` span says of its hand-off, the same at both ends."""

from opentelemetry.trace import Span

from pageferry.core.layout import PageFormat
from pageferry.core.sender import HandoffStats

_PREFIX = "pageferry.handoff"


def describe_pages(span: Span, page_format: PageFormat, num_pages: int, num_bytes: int) -> None:
    span.set_attribute(f"{_PREFIX}.format", page_format.value)
    span.set_attribute(f"{_PREFIX}.pages", num_pages)
    span.set_attribute(f"{_PREFIX}.bytes", num_bytes)


def describe_timing(span: Span, stats: HandoffStats, stalled_s: float) -> None:
    """`stalled_s`: seconds that the sender waited for acknowledgements."""
    span.set_attribute(f"{_PREFIX}.hidden", stats.hidden)
    span.set_attribute(f"{_PREFIX}.tail_ms", stats.tail_s * 1000)
    span.set_attribute(f"{_PREFIX}.in_flight_ms", stats.in_flight_s * 1000)
    span.set_attribute(f"{_PREFIX}.stalled_ms", stalled_s * 1000)
