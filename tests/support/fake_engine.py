"""A model without weights: it writes true page bytes, and draws tokens from the bytes that it reads back.

So a page that was lost, torn or reused changes the tokens, and `golden` says what they should be.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence as ListLike
from dataclasses import dataclass, field, replace
from typing import Any

from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup, full_group
from pageferry.core.layout import CacheLayout, PageKey, PageLayout, Place
from pageferry.core.page_io import Buffer, PageRun, Written
from pageferry.core.plan import Plan, SampledToken, SampleFailure, StepResult
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem
from pageferry.engine.copies import read_by_page, write_by_page

VOCAB_SIZE = 1000
COPY_S = 0.25  # that a page takes to be copied from or to a device, where one is made up
LAYOUT = CacheLayout(
    "f" * 32, PageFormat.parse("int8"), page_size=4, num_kv_heads=1, head_dim=8, groups=(full_group(3),)
)
# A window that is no multiple of a page, with sinks, below a full layer; pages open as tails.
GROUPED = replace(
    LAYOUT, format=PageFormat.parse("int8:channel"), groups=(CacheGroup((0, 1), window=10, sinks=2), CacheGroup((2,)))
)
LAYOUTS = {"one group": LAYOUT, "groups and tails": GROUPED}


class FakeClock:
    """Time that moves only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakePages:
    """The bytes of a worker's pools: a PageSource and a PageSink, and a DeviceClock where a test makes them one."""

    device_name = ""
    copied_s: float | None = None

    def __init__(self, layout: CacheLayout, num_pages: int, num_tails: int = 0) -> None:
        """`num_pages` of each group."""
        self.layout = layout
        self._pools = {
            is_tail: [[bytearray(blank_page(pages)) for _ in range(number)] for pages in layouts]
            for is_tail, layouts, number in ((False, layout.pages, num_pages), (True, layout.tails, num_tails))
        }

    def at(self, place: Place) -> bytearray:
        return self._pools[place.is_tail][place.group][place.page]

    def read(self, key: PageKey, place: Place, first_layer: int, num_layers: int) -> bytes:
        assert (key.group, key.is_tail) == (place.group, place.is_tail)
        ranges = self.layout.of(place).ranges(first_layer, num_layers)
        return b"".join(bytes(self.at(place)[start : start + length]) for start, length in ranges)

    def write(self, place: Place, first_layer: int, num_layers: int, payload: bytes) -> None:
        offset = 0
        for start, length in self.layout.of(place).ranges(first_layer, num_layers):
            self.at(place)[start : start + length] = payload[offset : offset + length]
            offset += length

    def read_into(self, run: PageRun, buffer: memoryview) -> ListLike[int]:
        self._count_copies(len(run.pages))
        return read_by_page(self.read, run, buffer)

    def write_from(self, run: PageRun, buffer: Buffer) -> Written:
        layout = self.layout.of(Place(run.group, PageId(0), run.is_tail))
        self._count_copies(len(run.pages))
        return write_by_page(self.write, layout, run, buffer)

    def _count_copies(self, num_pages: int) -> None:
        if self.copied_s is not None:
            self.copied_s += COPY_S * num_pages

    def converted(self, layout: CacheLayout) -> "FakePages":
        assert layout == self.layout, "the fake model writes one format"
        return self

    def blank(self, places: Iterable[Place]) -> None:
        for place in places:
            self.at(place)[:] = blank_page(self.layout.of(place))

    def copy(self, source: Place, target: Place) -> None:
        self.at(target)[:] = self.at(source)

    def put(self, place: Place, slot: int, rows: ListLike[bytes]) -> None:
        """Write one token's rows, in the order layer, K|V, head, as far as the page's format has room for them."""
        layout, page = self.layout.of(place), self.at(place)
        assert layout.format.k == layout.format.v, "the fake model has one kind of vector"
        width = layout.format.k.row_bytes(layout.head_dim)
        for index, row in enumerate(rows):
            number = index * layout.page_size + slot
            page[number * width : number * width + width] = row[:width]
            if layout.format.k.element.is_scaled and not layout.format.k.is_per_channel:
                start = layout.scale_offset + 2 * number
                page[start : start + 2] = row[:1] + b"\x3c"  # from 1 to 2

    def rows(self, place: Place, slot: int) -> list[bytes]:
        layout = self.layout.of(place)
        width = layout.format.k.row_bytes(layout.head_dim)
        starts = [(i * layout.page_size + slot) * width for i in range(2 * layout.num_layers * layout.num_kv_heads)]
        return [bytes(self.at(place)[start : start + width]) for start in starts]

    def fill(self, key: PageKey, place: Place, token_ids: ListLike[int]) -> None:
        """Write a page of a sequence as the model does."""
        self.blank([place])
        first = key.index * self.layout.page_size
        for position in range(first, min(len(token_ids), first + self.layout.page_size)):
            self.put(place, position - first, vectors(self.layout, key.group, token_ids[position], position))

    def content(self, key: PageKey, token_ids: ListLike[int]) -> bytes:
        """What `fill` writes."""
        alone = FakePages(self.layout, 1, 1)
        place = Place(key.group, PageId(0), key.is_tail)
        alone.fill(key, place, token_ids)
        return bytes(alone.at(place))


def blank_page(layout: PageLayout) -> bytes:
    """Zeros, with every scale 1 (fp16)."""
    num_scales = layout.num_layers * layout.scale_layer_bytes // 2
    page = bytearray(layout.page_bytes)
    page[layout.scale_offset : layout.scale_offset + 2 * num_scales] = b"\x00\x3c" * num_scales
    return bytes(page)


@dataclass(slots=True)
class FakeRunner:
    """Runs plans. `before` is called first in each step; `script` and `failures` are by (request id, position)."""

    pages: FakePages
    before: Callable[[Plan], None] = lambda plan: None
    script: dict[tuple[str, int], int] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    device_s: float | None = None  # of each step, on a device that is made up

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far."""
        return sum(plan.num_tokens for plan in self.plans)

    def run(self, plan: Plan) -> StepResult:
        self.before(plan)
        self.plans.append(plan)
        self.pages.blank(plan.fresh)
        for source, target in plan.copies:
            self.pages.copy(source, target)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                for group in range(len(self.pages.layout.groups)):
                    self._store(chunk.sequence, group, position)
        drawn = [self._sample(chunk.sequence) for chunk in plan.chunks if chunk.samples]
        samples = tuple(one if isinstance(one, SampleFailure) else (one,) for one in drawn)
        return StepResult(samples, device_s=self.device_s)

    def _store(self, sequence: Sequence, group: int, position: int) -> None:
        layout = self.pages.layout
        index, slot = divmod(position, layout.page_size)
        page = Place(group, sequence.tables[group][index])
        rows = vectors(layout, group, sequence.token_ids[position], position)
        if sequence.tail is None:
            self.pages.put(page, slot, rows)
            return
        tail = Place(group, sequence.tail, is_tail=True)
        if slot == 0:
            self.pages.blank([tail])
        self.pages.put(tail, slot, rows)
        if slot == layout.page_size - 1:
            for full in range(layout.page_size):
                self.pages.put(page, full, self.pages.rows(tail, full))

    def _sample(self, sequence: Sequence) -> SampledToken | SampleFailure:
        key = (sequence.work.request_id, sequence.num_output)
        if key in self.failures:
            return SampleFailure(self.failures[key])
        size = self.pages.layout.page_size

        def rows(group: int, position: int, is_open: bool) -> list[bytes]:
            place = Place(group, sequence.tables[group][position // size])
            if is_open and sequence.tail is not None:
                place = Place(group, sequence.tail, is_tail=True)
            return self.pages.rows(place, position % size)

        return SampledToken(self.script.get(key, draw(self.pages.layout, len(sequence.token_ids), rows)))


def vectors(layout: CacheLayout, group: int, token_id: int, position: int) -> list[bytes]:
    """What the model stores for a token at a position in a group's layers; of each row as much as a page has room."""
    width = 4 * layout.head_dim
    num_vectors = 2 * layout.pages[group].num_layers * layout.num_kv_heads
    whole = hashlib.shake_128(f"{group}/{token_id}/{position}".encode()).digest(width * num_vectors)
    return [whole[start : start + width] for start in range(0, len(whole), width)]


def draw(layout: CacheLayout, num_tokens: int, rows: Callable[[int, int, bool], list[bytes]]) -> int:
    """The token that follows so many; `rows` of (group, position, whether its page is open) are what was stored."""
    digest = hashlib.blake2b(digest_size=8)
    num_sealed = num_tokens // layout.page_size * layout.page_size
    for index, group in enumerate(layout.groups):
        first = group.first_seen(num_tokens - 1)
        for position in (*range(min(group.sinks, first)), *range(first, num_tokens)):
            digest.update(b"".join(rows(index, position, position >= num_sealed)))
    return int.from_bytes(digest.digest(), "little") % VOCAB_SIZE


def golden(prompt_ids: Iterable[int], num_tokens: int, layout: CacheLayout = LAYOUT) -> list[int]:
    """The tokens that the model generates where nothing goes wrong."""
    token_ids = list(prompt_ids)
    num_prompt = len(token_ids)
    page_width = layout.format.k.row_bytes(layout.head_dim)
    open_width = 2 * layout.head_dim if layout.format.has_tails else page_width

    @functools.cache
    def rows(group: int, position: int, is_open: bool) -> list[bytes]:
        width = open_width if is_open else page_width
        return [row[:width] for row in vectors(layout, group, token_ids[position], position)]

    for _ in range(num_tokens):
        token_ids.append(draw(layout, len(token_ids), rows))
    return token_ids[num_prompt:]


def make_work(request_id: str, prompt_ids: Iterable[int], max_tokens: int = 8, **fields: Any) -> WorkItem:
    """A greedy request; `stop_ids` and the fields of WorkItem can be given."""
    stop = StopParams(max_tokens, stop_token_ids=frozenset(fields.pop("stop_ids", ())))
    return WorkItem(request_id, tuple(prompt_ids), SamplingParams(temperature=0), stop, **fields)
