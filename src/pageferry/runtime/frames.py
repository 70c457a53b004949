"""What has come of a push: which pages, whether bytes are good, and what a `kv.push` span says of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from crc32c import crc32c
from opentelemetry.trace import Span

from pageferry.core.errors import DataLossError, invalid
from pageferry.core.groups import groups_text
from pageferry.core.handoff import Arrivals
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.page_io import Buffer, PageRun, PageSink
from pageferry.core.plan import SampledToken
from pageferry.core.sender import HandoffStats
from pageferry.runtime.convert import token_from_proto
from pageferry.runtime.page_wire import InlineFrame
from pageferry.runtime.staging import HEADER_BYTES
from pageferry.v1.page_pb2 import PAGE_KIND_PAGE, PAGE_KIND_TAIL, PAGE_KIND_UNSPECIFIED, Commit, StagedPages

TRANSPORT = "pageferry.handoff.transport"
_KINDS: dict[int, bool] = {
    PAGE_KIND_UNSPECIFIED: False,
    PAGE_KIND_PAGE: False,
    PAGE_KIND_TAIL: True,
}  # whether it is a tail


class FrameKey(NamedTuple):
    """Which part of which page a frame carries."""

    page: PageKey
    first_layer: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """The same layers of pages of one pool, in a buffer, before they are copied."""

    keys: Sequence[PageKey]
    first_layer: int
    num_layers: int
    buffer: Buffer
    offsets: Sequence[int]
    checksums: Sequence[int]

    @property
    def frames(self) -> list[FrameKey]:
        return [FrameKey(key, self.first_layer, self.num_layers) for key in self.keys]


def arrivals_inline(frames: Sequence[InlineFrame], layout: CacheLayout, arrived: Arrivals) -> list[Arrival]:
    """Note frames as arrived. InvalidArgumentError for what is not to come, or whose length isn't the layers'."""
    for header, _, _, length in frames:
        key = PageKey(header.group, header.page_index, _is_tail(header.kind))
        arrived.add(key, header.first_layer, header.num_layers)
        expected = header.num_layers * layout.of(key).layer_bytes
        if length != expected:
            limit = f"must be {expected} bytes for {header.num_layers} layers"
            raise invalid("frame.payload", f"{length} bytes", limit)
    return [
        Arrival(
            [PageKey(header.group, header.page_index, _KINDS[header.kind]) for header, *_ in same],
            same[0].header.first_layer,
            same[0].header.num_layers,
            same[0].buffer,
            [frame.offset for frame in same],
            [frame.header.crc32c for frame in same],
        )
        for _, together in groupby(frames, key=_alike)
        for same in (list(together),)
    ]


def arrivals_staged(staged: StagedPages, layout: CacheLayout, arrived: Arrivals, memory: memoryview) -> Arrival:
    """Note pages as arrived. InvalidArgumentError for what is not to come, or lies outside the region."""
    is_tail = _is_tail(staged.kind)
    keys = [PageKey(staged.group, index, is_tail) for index in staged.page_indexes]
    shape = layout.of(PageKey(staged.group, 0, is_tail))
    num_bytes = shape.num_layers * shape.layer_bytes
    end = staged.offset + len(keys) * num_bytes
    if not keys:
        raise invalid("staged.page_indexes", "nothing", "must name a page")
    if staged.offset < HEADER_BYTES or end > len(memory):
        limit = f"must lie from {HEADER_BYTES} to {len(memory)} with its {len(keys)} pages"
        raise invalid("staged.offset", staged.offset, limit)
    if len(staged.crc32c) != len(keys):
        raise invalid("staged.crc32c", f"{len(staged.crc32c)} checksums", f"must be one for each of {len(keys)} pages")
    for key in keys:
        arrived.add(key, 0, shape.num_layers)
    offsets = range(staged.offset, end, num_bytes)
    return Arrival(keys, 0, shape.num_layers, memory, offsets, list(staged.crc32c))


def copy_arrival(arrival: Arrival, places: Sequence[Place], sink: PageSink) -> int:
    """Write the bytes into their pages, on the transfer thread, and check what lies there; returns how many they are.

    DataLossError where a checksum doesn't match, a scale isn't finite and positive, or a zero point isn't finite: no
    number of such a vector means anything.
    """
    keys, (group, _, is_tail) = arrival.keys, places[0]
    pages = [place.page for place in places]
    run = PageRun(group, is_tail, is_tail, arrival.first_layer, arrival.num_layers, pages, arrival.offsets)
    checksums, bad = sink.write_from(run, arrival.buffer)
    if checksums != arrival.checksums:
        triples = zip(keys, checksums, arrival.checksums, strict=True)
        key, ours, theirs = next(triple for triple in triples if triple[1] != triple[2])
        raise DataLossError(
            f"{key}, layers from {arrival.first_layer}: crc32c of the bytes received is {ours:08x}, of those sent "
            f"{theirs:08x}",
            reason="CHECKSUM_MISMATCH",
        )
    if bad is not None:
        raise DataLossError(f"{keys[bad.position]}, {bad.describe(sink.layout, run)}", reason="BAD_SCALE")
    return len(keys) * arrival.num_layers * sink.layout.of(keys[0]).layer_bytes


def sealed(commit: Commit) -> Commit:
    """The message with its checksum."""
    commit.crc32c = _checksum(commit)
    return commit


def check_sealed(commit: Commit) -> Commit:
    """The message; DataLossError where its checksum doesn't match."""
    if commit.crc32c != _checksum(commit):
        raise DataLossError("commit.crc32c does not match the message", reason="CHECKSUM_MISMATCH")
    return commit


def first_token_of(commit: Commit) -> tuple[int, SampledToken] | None:
    """Position and token of the one choice that there is for now; None where none was drawn."""
    choices = [draw.choice for draw in commit.first_tokens]
    if choices not in ([], [0]):
        raise invalid("commit.first_tokens.choice", choices[:8], "must be 0 once, or nothing")
    return token_from_proto(commit.first_tokens[0].token) if choices else None


def _checksum(commit: Commit) -> int:
    bare = Commit()
    bare.CopyFrom(commit)
    bare.ClearField("crc32c")
    return int(crc32c(bare.SerializeToString(deterministic=True)))


def _is_tail(kind: int) -> bool:
    if kind not in _KINDS:
        raise invalid("frame.kind", kind, "is none that this version knows")
    return _KINDS[kind]


def _alike(frame: InlineFrame) -> tuple[int, ...]:
    header = frame.header
    return header.group, _KINDS[header.kind], header.first_layer, header.num_layers, id(frame.buffer)


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
