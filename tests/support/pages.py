"""Pages in plain memory, and a desk that keeps one ticket: the two ends of a hand-off without engine and pool."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence

from pageferry.core.errors import FailedPreconditionError, PageferryError
from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageLayout
from pageferry.core.plan import SampledToken
from pageferry.core.pool import PageId
from pageferry.runtime.receive import FrameKey, Grant

TICKET = bytes(range(16))


def small_layout() -> PageLayout:
    """One frame a page."""
    return PageLayout("f" * 32, PageFormat.parse("int8"), page_size=4, num_layers=3, num_kv_heads=2, head_dim=8)


def large_layout() -> PageLayout:
    """Three frames a page."""
    return PageLayout("f" * 32, PageFormat.parse("fp32"), page_size=16, num_layers=20, num_kv_heads=8, head_dim=128)


class MemoryPages:
    """A PageSource and PageSink. `before` runs at each access, on the thread that makes it."""

    def __init__(self, layout: PageLayout, num_pages: int, *, seed: int | None = None) -> None:
        self.layout = layout
        self.before: Callable[[PageId], None] = lambda page: None
        self.pages = [bytearray(layout.page_bytes) for _ in range(num_pages)]
        if seed is not None:
            for page, content in enumerate(self.pages):
                for offset, length in layout.ranges(0, layout.num_layers):  # all but the padding
                    content[offset : offset + length] = random.Random(seed + page).randbytes(length)

    def read(self, page: PageId, first_layer: int, num_layers: int) -> bytes:
        self.before(page)
        ranges = self.layout.ranges(first_layer, num_layers)
        return b"".join(self.pages[page][offset : offset + length] for offset, length in ranges)

    def converted(self, layout: PageLayout) -> "MemoryPages":
        assert layout == self.layout
        return self

    def write(self, page: PageId, first_layer: int, num_layers: int, payload: bytes) -> None:
        self.before(page)
        start = 0
        for offset, length in self.layout.ranges(first_layer, num_layers):
            self.pages[page][offset : offset + length] = payload[start : start + length]
            start += length


class FakeDesk:
    """One ticket, TICKET, for `num_pages` pages from index `first_page` of the page table on."""

    def __init__(self, layout: PageLayout, num_pages: int, *, first_page: int = 0, lease_ms: int = 30_000) -> None:
        self._layout = layout
        self._first_page = first_page
        self._pages = [PageId(page) for page in range(num_pages)]
        self._lease_ms = lease_ms
        self.grant: Grant | None = None
        self.frames: list[FrameKey] = []
        self.kept_alive = asyncio.Event()
        self.committed: tuple[int, tuple[int, SampledToken] | None] | None = None
        self.closed: list[PageferryError | None] = []
        self.has_closed = asyncio.Event()

    async def open(self, ticket: bytes, layout: PageLayout) -> Grant:
        if ticket != TICKET or self.grant:
            raise FailedPreconditionError("ticket is unknown", reason="UNKNOWN_TICKET")
        self._layout.check_equal(layout, ours="receiver", theirs="sender")
        self.grant = Grant(ticket, self._lease_ms, self._first_page, self._pages)
        return self.grant

    def receive(self, grant: Grant, frames: Sequence[FrameKey]) -> None:
        self.frames.extend(frames)
        if not frames:
            self.kept_alive.set()

    async def commit(self, grant: Grant, covered_tokens: int, first: tuple[int, SampledToken] | None) -> None:
        if len({frame.page_index for frame in self.frames}) != len(self._pages):
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

    def pass_through(self, page: PageId) -> None:
        self._loop.call_soon_threadsafe(self.arrived.set)
        assert self._open.wait(5), "the gate stayed shut"

    def open(self) -> None:
        self._open.set()
