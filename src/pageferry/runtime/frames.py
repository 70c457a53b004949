"""Pages as the frames that carry them, with checksums, and what a `kv.push` span says of them at both ends."""

from crc32c import crc32c
from opentelemetry.trace import Span

from pageferry.core.errors import DataLossError, invalid
from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageLayout, PageSource
from pageferry.core.pool import PageId
from pageferry.core.sender import HandoffStats
from pageferry.v1.page_pb2 import PageFrame


def read_frames(source: PageSource, page_index: int, page: PageId) -> list[PageFrame]:
    """Copy a page, on the transfer thread. The caller holds a reference to it until then."""
    frames = []
    for first_layer, num_layers in source.layout.frames():
        payload = source.read(page, first_layer, num_layers)
        part = PageFrame(page_index=page_index, first_layer=first_layer, num_layers=num_layers)
        part.payload, part.crc32c = payload, crc32c(payload)
        frames.append(part)
    return frames


def check_payload(frame: PageFrame, payload: bytes, layout: PageLayout) -> None:
    """InvalidArgumentError for a length that isn't the layers'; DataLossError where the checksum doesn't match."""
    expected = sum(length for _, length in layout.ranges(frame.first_layer, frame.num_layers))
    if len(payload) != expected:
        limit = f"must be {expected} bytes for {frame.num_layers} layers"
        raise invalid("frame.payload", f"{len(payload)} bytes", limit)
    checksum = crc32c(payload)
    if checksum != frame.crc32c:
        raise DataLossError(
            f"page {frame.page_index}, layers from {frame.first_layer}: crc32c of the bytes received is "
            f"{checksum:08x}, of those sent {frame.crc32c:08x}",
            reason="CHECKSUM_MISMATCH",
        )


def describe_pages(span: Span, page_format: PageFormat, num_pages: int, num_bytes: int) -> None:
    span.set_attribute("pageferry.handoff.format", str(page_format))
    span.set_attribute("pageferry.handoff.pages", num_pages)
    span.set_attribute("pageferry.handoff.bytes", num_bytes)


def describe_timing(span: Span, stats: HandoffStats, stalled_s: float) -> None:
    """`stalled_s`: seconds that the sender waited for acknowledgements."""
    span.set_attribute("pageferry.handoff.hidden", stats.hidden)
    span.set_attribute("pageferry.handoff.tail_ms", stats.tail_s * 1000)
    span.set_attribute("pageferry.handoff.in_flight_ms", stats.in_flight_s * 1000)
    span.set_attribute("pageferry.handoff.stalled_ms", stalled_s * 1000)
