"""Pages in plain memory, and a desk that keeps one ticket: the two ends of a hand-off without engine and pool."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from pageferry.core.errors import FailedPreconditionError, PageferryError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup, full_group
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.page_io import Buffer, PageRun, Written
from pageferry.core.plan import SampledToken
from pageferry.core.pool import PageId
from pageferry.engine.copies import read_by_page, write_by_page
from pageferry.runtime.frames import FrameKey
from pageferry.runtime.tickets import Grant

TICKET = bytes(range(16))
REQUEST = "request"  # that it is for


def small_layout() -> CacheLayout:
    """One frame a page."""
    return CacheLayout("f" * 32, PageFormat.parse("int8"), 4, num_kv_heads=2, head_dim=8, groups=(full_group(3),))


def large_layout() -> CacheLayout:
    """Three frames a page."""
    return CacheLayout("f" * 32, PageFormat.parse("fp32"), 16, num_kv_heads=8, head_dim=128, groups=(full_group(20),))


def grouped_layout() -> CacheLayout:
    """Two groups of pages, and their tails."""
    groups = (CacheGroup((0, 2), window=8), CacheGroup((1,)))
    return replace(small_layout(), format=PageFormat.parse("k=int8:channel,v=int8"), groups=groups)


class MemoryPages:
    """A PageSource and PageSink. `before` runs at each access, on the thread that makes it."""

    def __init__(self, layout: CacheLayout, num_pages: int, *, seed: int | None = None) -> None:
        """`num_pages` of each group, and as many tails."""
        self.layout = layout
        self.before: Callable[[Place], None] = lambda place: None
        kinds = [(False, layout.pages), (True, layout.tails)]
        self.pages = {
            Place(group, PageId(page), is_tail): bytearray(pages.page_bytes)
            for is_tail, layouts in kinds
            for group, pages in enumerate(layouts)
            for page in range(num_pages)
        }
        if seed is not None:
            for number, (place, content) in enumerate(self.pages.items()):
                ranges = layout.of(place).ranges(0, layout.of(place).num_layers)  # all but the padding
                for part, (offset, length) in enumerate(ranges):
                    noise = random.Random(seed + number).randbytes(length)
                    # Scales and zero points are finite and positive.
                    content[offset : offset + length] = bytes(1 + byte % 0x7B for byte in noise) if part else noise

    def read(self, key: PageKey, place: Place, first_layer: int, num_layers: int) -> bytes:
        assert (key.group, key.is_tail) == (place.group, place.is_tail)
        self.before(place)
        ranges = self.layout.of(place).ranges(first_layer, num_layers)
        return b"".join(self.pages[place][offset : offset + length] for offset, length in ranges)

    def read_into(self, run: PageRun, buffer: memoryview) -> Sequence[int]:
        return read_by_page(self.read, run, buffer)

    def write_from(self, run: PageRun, buffer: Buffer) -> Written:
        layout = self.layout.of(Place(run.group, PageId(0), run.is_tail))
        return write_by_page(self.write, layout, run, buffer)

    def converted(self, layout: CacheLayout) -> "MemoryPages":
        assert layout == self.layout
        return self

    def write(self, place: Place, first_layer: int, num_layers: int, payload: bytes) -> None:
        self.before(place)
        start = 0
        for offset, length in self.layout.of(place).ranges(first_layer, num_layers):
            self.pages[place][offset : offset + length] = payload[start : start + length]
            start += length


def numbered(num_pages: int) -> list[tuple[PageKey, Place]]:
    """Pages of group 0, from index 0 on, each at the place of that number."""
    return [(PageKey(0, page), Place(0, PageId(page))) for page in range(num_pages)]


class FakeDesk:
    """One ticket, TICKET, for these pages."""

    def __init__(self, layout: CacheLayout, pages: Sequence[tuple[PageKey, Place]], *, lease_ms: int = 30_000) -> None:
        self._layout = layout
        self._places = dict(pages)
        self._lease_ms = lease_ms
        self.grant: Grant | None = None
        self.frames: list[FrameKey] = []
        self.kept_alive = asyncio.Event()
        self.committed: tuple[int, tuple[int, SampledToken] | None] | None = None
        self.closed: list[PageferryError | None] = []
        self.has_closed = asyncio.Event()

    async def open(self, ticket: bytes, request_id: str, layout: CacheLayout) -> Grant:
        if (ticket, request_id) != (TICKET, REQUEST) or self.grant:
            raise FailedPreconditionError("ticket is unknown", reason="UNKNOWN_TICKET")
        self._layout.check_equal(layout, ours="receiver", theirs="sender")
        self.grant = Grant(ticket, self._lease_ms, self._places)
        return self.grant

    def receive(self, grant: Grant, frames: Sequence[FrameKey]) -> None:
        self.frames.extend(frames)
        if not frames:
            self.kept_alive.set()

    async def commit(self, grant: Grant, covered_tokens: int, first: tuple[int, SampledToken] | None) -> None:
        if {frame.page for frame in self.frames} != set(self._places):
            raise FailedPreconditionError("pages are missing", reason="PAGES_MISSING")
        self.committed = (covered_tokens, first)

    def close(self, grant: Grant, error: PageferryError | None) -> None:
        assert grant is self.grant
        self.closed.append(error)
        self.has_closed.set()


class Gate:
    """Holds a thread up until it is opened; the event loop learns when one has arrived."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()

    def pass_through(self, place: Place) -> None:
        self._loop.call_soon_threadsafe(self.arrived.set)
        assert self._open.wait(60), "the gate stayed shut"

    def open(self) -> None:
        self._open.set()
