"""Pages as the frames that carry them, their checks, and what a `kv.push` span says of them at both ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from crc32c import crc32c
from opentelemetry.trace import Span

from pageferry.core.errors import DataLossError, invalid
from pageferry.core.groups import groups_text
from pageferry.core.layout import CacheLayout, PageKey, PageSource, Place
from pageferry.core.sender import HandoffStats
from pageferry.v1.page_pb2 import PAGE_KIND_PAGE, PAGE_KIND_TAIL, PAGE_KIND_UNSPECIFIED, PageFrame

_KINDS = {PAGE_KIND_UNSPECIFIED: False, PAGE_KIND_PAGE: False, PAGE_KIND_TAIL: True}  # whether it is a tail

_INFINITY = 0x7C00  # fp16, as bits: from here on, without the sign, it isn't finite


def read_frames(source: PageSource, key: PageKey, place: Place) -> list[PageFrame]:
    """Copy a page, on the transfer thread. The caller holds a reference to it until then."""
    frames = []
    kind = PAGE_KIND_TAIL if key.is_tail else PAGE_KIND_PAGE
    for first_layer, num_layers in source.layout.of(key).frames():
        payload = source.read(key, place, first_layer, num_layers)
        part = PageFrame(group=key.group, page_index=key.index, kind=kind)
        part.first_layer, part.num_layers = first_layer, num_layers
        part.payload, part.crc32c = payload, crc32c(payload)
        frames.append(part)
    return frames


def page_key(frame: PageFrame) -> PageKey:
    """Which page a frame carries. InvalidArgumentError for a kind that this version doesn't know."""
    if frame.kind not in _KINDS:
        raise invalid("frame.kind", frame.kind, "is none that this version knows")
    return PageKey(frame.group, frame.page_index, _KINDS[frame.kind])


def check_payload(frame: PageFrame, payload: bytes, layout: CacheLayout) -> None:
    """InvalidArgumentError for a length that isn't the layers'.

    DataLossError where the checksum doesn't match, a scale isn't finite and positive, or a zero point isn't finite: no
    number of such a vector means anything.
    """
    key = page_key(frame)
    lengths = [length for _, length in layout.of(key).ranges(frame.first_layer, frame.num_layers)]
    if len(payload) != (expected := sum(lengths)):
        limit = f"must be {expected} bytes for {frame.num_layers} layers"
        raise invalid("frame.payload", f"{len(payload)} bytes", limit)
    checksum = crc32c(payload)
    if checksum != frame.crc32c:
        raise DataLossError(
            f"{key}, layers from {frame.first_layer}: crc32c of the bytes received is {checksum:08x}, of those sent "
            f"{frame.crc32c:08x}",
            reason="CHECKSUM_MISMATCH",
        )
    _check_factors(frame, payload, lengths, key)


def _check_factors(frame: PageFrame, payload: bytes, lengths: Sequence[int], key: PageKey) -> None:
    start, *factors = lengths
    for name, length in zip(("scale", "zero point"), factors, strict=False):
        bits: np.ndarray[Any, np.dtype[np.uint16]] = np.frombuffer(payload, "<u2", length // 2, start)
        # Less one, a scale of 0 wraps: then it is too large, as negative ones are.
        sizes, limit = (bits - 1, _INFINITY - 1) if name == "scale" else (bits & 0x7FFF, _INFINITY)
        if sizes.max() >= limit:
            index = int(np.argmax(sizes >= limit))
            layer = frame.first_layer + index * frame.num_layers // len(bits)
            kind = "finite and positive" if name == "scale" else "finite"
            raise DataLossError(
                f"{key}, layer {layer}: a {name} is {bits.view('<f2')[index]}, must be {kind}",
                reason="BAD_SCALE",
            )
        start += length


def describe_pages(span: Span, layout: CacheLayout, num_pages: int, num_bytes: int) -> None:
    """`num_pages` are those of all groups, tails among them."""
    span.set_attribute("pageferry.handoff.format", str(layout.format))
    if len(layout.groups) > 1:
        span.set_attribute("pageferry.handoff.groups", groups_text(layout.groups))
    span.set_attribute("pageferry.handoff.pages", num_pages)
    span.set_attribute("pageferry.handoff.bytes", num_bytes)


def describe_timing(span: Span, stats: HandoffStats, stalled_s: float) -> None:
    """`stalled_s`: seconds that the sender waited for acknowledgements."""
    span.set_attribute("pageferry.handoff.hidden", stats.hidden)
    span.set_attribute("pageferry.handoff.tail_ms", stats.tail_s * 1000)
    span.set_attribute("pageferry.handoff.in_flight_ms", stats.in_flight_s * 1000)
    span.set_attribute("pageferry.handoff.stalled_ms", stalled_s * 1000)
