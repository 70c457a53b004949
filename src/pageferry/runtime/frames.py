"""Pages as the frames that carry them, with checksums. Runs on the transfer thread."""

from crc32c import crc32c

from pageferry.core.errors import DataLossError, invalid
from pageferry.core.layout import PageLayout, PageSource
from pageferry.core.pool import PageId
from pageferry.v1.page_pb2 import PageFrame


def read_frames(source: PageSource, page_index: int, page: PageId) -> list[PageFrame]:
    """Copy a page. The caller holds a reference to it until then."""
    frames = []
    for first_layer, num_layers in source.layout.frames():
        payload = source.read(page, first_layer, num_layers)
        frames.append(
            PageFrame(
                page_index=page_index,
                first_layer=first_layer,
                num_layers=num_layers,
                crc32c=crc32c(payload),
                payload=payload,
            )
        )
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
