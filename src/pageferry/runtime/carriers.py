"""How a sender's pages reach the receiver: in messages of the stream, or through memory that both share."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from pageferry.core.layout import MAX_FRAME_BYTES, CacheLayout, PageKey, Place
from pageferry.core.page_io import PageRun, PageSource
from pageferry.runtime.page_wire import write_frames
from pageferry.runtime.shared_regions import SharedRegion
from pageferry.runtime.staging import STAGED_BYTES
from pageferry.v1.page_pb2 import PAGE_KIND_PAGE, PAGE_KIND_TAIL, PageFrame, PageKind, PushRequest, StagedPages

Pages = Sequence[tuple[PageKey, Place]]
INLINE = "inline"
SHM = "shm"
_NUM_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """The same layers of pages of one pool, which travel in one message."""

    pages: Pages
    first_layer: int
    num_layers: int
    bytes_each: int
    is_last: bool  # whether nothing of these pages is left to be sent

    @property
    def num_bytes(self) -> int:
        return len(self.pages) * self.bytes_each

    def run(self, offsets: Sequence[int]) -> PageRun:
        key, place = self.pages[0]
        pages = [place.page for _, place in self.pages]
        return PageRun(key.group, place.is_tail, key.is_tail, self.first_layer, self.num_layers, pages, offsets)


class Carrier(Protocol):
    """One way, for one push. All but `read` is called on the event loop."""

    name: str
    max_bytes: int  # of a batch
    max_pages: int
    num_together: int  # batches that are worth one trip to the transfer thread

    def take_room(self, batch: Batch) -> int | None:
        """Room for the batch, which its acknowledgement gives back; None where there is none now."""
        ...

    def read(self, source: PageSource, batch: Batch, room: int) -> bytes:
        """Copy the batch and return the message that says so; on the transfer thread."""
        ...

    def acked(self, num_frames: int) -> None:
        """Of all that were given room."""
        ...

    def close(self) -> None:
        """The push is over."""
        ...


class InlineCarrier:
    """Frames with their payloads: at most `window` that are not acknowledged, and `several` in a message or one."""

    name = INLINE
    max_bytes = MAX_FRAME_BYTES

    def __init__(self, window: int, *, several: bool) -> None:
        self.max_pages = max(1, window // 8) if several else 1
        # All that goes together finds room while half the window is in flight.
        self.num_together = max(1, min(_NUM_TOGETHER, window // (2 * self.max_pages)))
        self._window = window
        self._several = several
        self._num_taken = 0
        self._num_acked = 0

    def take_room(self, batch: Batch) -> int | None:
        if self._num_taken - self._num_acked + len(batch.pages) > self._window:
            return None
        self._num_taken += len(batch.pages)
        return 0

    def read(self, source: PageSource, batch: Batch, room: int) -> bytes:
        headers = [
            PageFrame(
                group=key.group,
                page_index=key.index,
                kind=_kind(key),
                first_layer=batch.first_layer,
                num_layers=batch.num_layers,
            )
            for key, _ in batch.pages
        ]
        return write_frames(
            headers,
            batch.bytes_each,
            several=self._several and len(headers) > 1,
            fill=lambda view, offsets: source.read_into(batch.run(offsets), view),
        )

    def acked(self, num_frames: int) -> None:
        self._num_acked = num_frames

    def close(self) -> None:
        """Nothing is held."""


class StagedCarrier:
    """Whole pages in a region that the receiver reads."""

    name = SHM
    max_bytes = STAGED_BYTES
    max_pages = STAGED_BYTES
    num_together = 1

    def __init__(self, region: SharedRegion, has_room: asyncio.Event) -> None:
        """`has_room` is set whenever there is more room, until `close`."""
        self._region = region
        self._has_room = has_room
        region.waiting.add(has_room)
        # Where bytes were taken, how many, and the number of frames whose acknowledgement frees them.
        self._held: deque[tuple[int, int, int]] = deque()
        self._num_taken = 0

    @staticmethod
    def carries(layout: CacheLayout) -> bool:
        """Whether each page fits into a message."""
        return all(pages.page_bytes <= STAGED_BYTES for pages in (*layout.pages, *layout.tails))

    def take_room(self, batch: Batch) -> int | None:
        start = self._region.take(batch.num_bytes)
        if start is not None:
            self._num_taken += len(batch.pages)
            self._held.append((start, batch.num_bytes, self._num_taken))
        return start

    def read(self, source: PageSource, batch: Batch, room: int) -> bytes:
        offsets = range(room, room + batch.num_bytes, batch.bytes_each)
        checksums = source.read_into(batch.run(offsets), self._region.memory)
        key, _ = batch.pages[0]
        indexes = [key.index for key, _ in batch.pages]
        staged = StagedPages(group=key.group, kind=_kind(key), page_indexes=indexes, offset=room, crc32c=checksums)
        return PushRequest(staged=staged).SerializeToString()

    def acked(self, num_frames: int) -> None:
        while self._held and self._held[0][-1] <= num_frames:
            start, num_bytes, _ = self._held.popleft()
            self._region.give_back(start, num_bytes)

    def close(self) -> None:
        """What is held may go to another push at once: its copies come after ours, on the same thread.

        What the receiver still copies of ours is not to be committed any more.
        """
        self._region.waiting.discard(self._has_room)
        self.acked(self._num_taken)


def cut(pages: Pages, layout: CacheLayout, carrier: Carrier) -> Iterator[Batch]:
    """In order. Pages too large for a batch are cut into frames."""
    for _, same in groupby(pages, key=lambda page: (page[0].group, page[0].is_tail, page[1].is_tail)):
        alike = list(same)
        shape = layout.of(alike[0][0])
        whole = shape.num_layers * shape.layer_bytes
        if whole > carrier.max_bytes:
            for page in alike:
                for first, count in shape.frames():
                    yield Batch([page], first, count, count * shape.layer_bytes, first + count == shape.num_layers)
            continue
        step = min(carrier.max_pages, carrier.max_bytes // whole)
        for start in range(0, len(alike), step):
            yield Batch(alike[start : start + step], 0, shape.num_layers, whole, is_last=True)


def _kind(key: PageKey) -> PageKind:
    return PAGE_KIND_TAIL if key.is_tail else PAGE_KIND_PAGE
