"""A model without weights: it writes true page bytes, and draws tokens from the bytes that it reads back.

So a page that was lost, torn or reused changes the tokens, and `golden` says what they should be.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageLayout
from pageferry.core.plan import Plan, SampledToken, SampleFailure, StepResult
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem

VOCAB_SIZE = 1000
LAYOUT = PageLayout("f" * 32, PageFormat.parse("int8"), page_size=4, num_layers=3, num_kv_heads=1, head_dim=8)


class FakeClock:
    """Time that moves only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakePages:
    """The bytes of a pool: a PageSource and a PageSink."""

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self.layout = layout
        self.data = [bytearray(self.blank_page()) for _ in range(num_pages)]

    def blank_page(self) -> bytes:
        """Zeros, with every scale 1 (fp16)."""
        layout = self.layout
        num_scales = layout.num_layers * layout.scale_layer_bytes // 2
        page = bytearray(layout.page_bytes)
        page[layout.scale_offset : layout.scale_offset + 2 * num_scales] = b"\x00\x3c" * num_scales
        return bytes(page)

    def read(self, page: PageId, first_layer: int, num_layers: int) -> bytes:
        ranges = self.layout.ranges(first_layer, num_layers)
        return b"".join(bytes(self.data[page][start : start + length]) for start, length in ranges)

    def write(self, page: PageId, first_layer: int, num_layers: int, payload: bytes) -> None:
        offset = 0
        for start, length in self.layout.ranges(first_layer, num_layers):
            self.data[page][start : start + length] = payload[offset : offset + length]
            offset += length

    def converted(self, layout: PageLayout) -> "FakePages":
        assert layout == self.layout, "the fake model writes one format"
        return self

    def blank(self, pages: Iterable[PageId]) -> None:
        for page in pages:
            self.data[page][:] = self.blank_page()

    def copy(self, source: PageId, target: PageId) -> None:
        self.data[target][:] = self.data[source]

    def put(self, page: PageId, slot: int, vectors: ListLike[bytes]) -> None:
        """Write one token's vectors, in the order layer, K|V, head."""
        layout = self.layout
        width = layout.format.k.row_bytes(layout.head_dim)
        for index, vector in enumerate(vectors):
            start = (index * layout.page_size + slot) * width
            self.data[page][start : start + width] = vector
            if layout.format.k.scale_bytes:
                start = layout.scale_offset + (index * layout.page_size + slot) * 2
                self.data[page][start : start + 2] = vector[:2]

    def get(self, page: PageId, slot: int) -> bytes:
        layout = self.layout
        width = layout.format.k.row_bytes(layout.head_dim)
        starts = [(i * layout.page_size + slot) * width for i in range(2 * layout.num_layers * layout.num_kv_heads)]
        return b"".join(bytes(self.data[page][start : start + width]) for start in starts)


@dataclass(slots=True)
class FakeRunner:
    """Runs plans. `before` is called first in each step; `script` and `failures` are by (request id, position)."""

    pages: FakePages
    before: Callable[[Plan], None] = lambda plan: None
    script: dict[tuple[str, int], int] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)

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
        size = self.pages.layout.page_size
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                page = chunk.sequence.pages[position // size]
                token_id = chunk.sequence.token_ids[position]
                self.pages.put(page, position % size, vectors(self.pages.layout, token_id, position))
        return StepResult(tuple(self._sample(chunk.sequence) for chunk in plan.chunks if chunk.samples))

    def _sample(self, sequence: Sequence) -> SampledToken | SampleFailure:
        key = (sequence.work.request_id, sequence.num_output)
        if key in self.failures:
            return SampleFailure(self.failures[key])
        size = self.pages.layout.page_size
        context = (self.pages.get(sequence.pages[p // size], p % size) for p in range(len(sequence.token_ids)))
        return SampledToken(self.script.get(key, draw(context)))


def vectors(layout: PageLayout, token_id: int, position: int) -> list[bytes]:
    """What the model stores for a token at a position."""
    width = layout.format.k.row_bytes(layout.head_dim)
    num_vectors = 2 * layout.num_layers * layout.num_kv_heads
    whole = hashlib.shake_128(f"{token_id}/{position}".encode()).digest(width * num_vectors)
    return [whole[start : start + width] for start in range(0, len(whole), width)]


def draw(context: Iterable[bytes]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for stored in context:
        digest.update(stored)
    return int.from_bytes(digest.digest(), "little") % VOCAB_SIZE


def golden(prompt_ids: Iterable[int], num_tokens: int, layout: PageLayout = LAYOUT) -> list[int]:
    """The tokens that the model generates where nothing goes wrong."""
    token_ids = list(prompt_ids)
    num_prompt = len(token_ids)
    context = [b"".join(vectors(layout, token_id, position)) for position, token_id in enumerate(token_ids)]
    for _ in range(num_tokens):
        token_ids.append(draw(context))
        context.append(b"".join(vectors(layout, token_ids[-1], len(token_ids) - 1)))
    return token_ids[num_prompt:]


def make_work(request_id: str, prompt_ids: Iterable[int], max_tokens: int = 8, **fields: Any) -> WorkItem:
    """A greedy request; `stop_ids` and the fields of WorkItem can be given."""
    stop = StopParams(max_tokens, stop_token_ids=frozenset(fields.pop("stop_ids", ())))
    return WorkItem(request_id, tuple(prompt_ids), SamplingParams(temperature=0), stop, **fields)
