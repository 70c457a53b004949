"""Paged attention against a function of the whole history, over poisoned pools, in all formats and windows."""

from dataclasses import dataclass, field

import pytest
import torch
from page_pools import FORMATS, POISON, TAIL_FORMATS, append, layout, poisoned, spoil

from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup, full_group
from pageferry.core.plan import Chunk
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import NO_PAGE, Sequence, WorkItem
from pageferry.engine.batch import BatchBuilder
from pageferry.kernels.paged_attention import History, paged_attention, paged_attention_ref

KV_HEADS, GROUP = 2, 3
# fp32 sums in another order; bf16 chunks round queries, keys, scores and weights to 8 bits.
FP32_TOLERANCE, BF16_TOLERANCE = 2e-5, 4e-2
ALL_FORMATS = (*FORMATS, *TAIL_FORMATS)
FULL = full_group(1)
SINKS = CacheGroup((0,), 20, sinks=4)
Shapes = list[tuple[int, int]]  # (start, tokens in the batch) of each sequence


@dataclass
class Case:
    """Sequences on pages of their own in shuffled order; everything else, pages behind the window too, is poison."""

    page_format: PageFormat
    shapes: Shapes
    group: CacheGroup = FULL
    dim: int = 8
    page_size: int = 16
    chunk_tokens: int = 1000  # in which what comes before the batch is written
    heads: tuple[int, int] = (GROUP * KV_HEADS, KV_HEADS)  # of queries, and stored
    chunks: list[Chunk] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(len(self.shapes))
        of = layout(self.page_format, heads=self.heads[1], dim=self.dim, page_size=self.page_size, groups=(self.group,))
        self.builder, self.pages = BatchBuilder(of), poisoned(of, 200)
        self.query = torch.randn(sum(count for _, count in self.shapes), self.heads[0], self.dim)
        free = torch.randperm(200).tolist()
        for i, (start, count) in enumerate(self.shapes):
            length = start + count
            keys, values = torch.randn(2, length, self.heads[1], self.dim)
            work = WorkItem("x", (0,) * length, SamplingParams(), StopParams(max_tokens=1))
            table = [PageId(free.pop()) for _ in range(-(-length // self.page_size) + 1)]  # one page of headroom
            target = Sequence(work, 0.0, tables=[table], tail=PageId(7 - i))
            self.histories.append(
                History(keys, values, self.page_format, self.page_size, self.group.window, self.group.sinks)
            )
            self.chunks.append(Chunk(target, start, count, samples=True))
            for first in range(0, start, self.chunk_tokens):
                self._write([Chunk(target, first, min(start - first, self.chunk_tokens), samples=False)], [i])
            self._forget(self.chunks[-1])
        self.open_tokens = self._write(self.chunks, list(range(len(self.chunks))))

    def _write(self, chunks: list[Chunk], indices: list[int]) -> object:
        sides = [
            torch.cat(
                [
                    getattr(self.histories[i], side)[c.start : c.start + c.num_tokens]
                    for i, c in zip(indices, chunks, strict=True)
                ]
            )
            for side in ("keys", "values")
        ]
        self.batch = self.builder.build(tuple(chunks))
        return append(self.pages.layers[0], *sides, self.batch.places[0].targets)

    def _forget(self, chunk: Chunk) -> None:
        table = chunk.sequence.tables[0]
        live = set(self.group.live_pages(chunk.start, chunk.start + chunk.num_tokens, self.page_size))
        for index, page in enumerate(table):
            if index not in live:
                self.pages.pools[0].memory[page] = POISON
                table[index] = NO_PAGE

    def run(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        segments, scale = self.batch.places[0].segments, self.dim**-0.5
        return paged_attention(
            self.query, self.pages.layers[0], segments, scale, open_tokens=self.open_tokens, dtype=dtype
        )

    def reference(self) -> torch.Tensor:
        rows, parts = 0, []
        for chunk, history in zip(self.chunks, self.histories, strict=True):
            positions = list(range(chunk.start, chunk.start + chunk.num_tokens))
            query = self.query[rows : rows + chunk.num_tokens]
            rows += chunk.num_tokens
            parts.append(paged_attention_ref(query, history, positions, self.dim**-0.5))
        return torch.cat(parts)

    def check(self, dtype: torch.dtype = torch.float32, tolerance: float = FP32_TOLERANCE) -> None:
        expected = self.reference()
        assert (self.run(dtype) - expected).abs().max() <= tolerance * expected.abs().max()


SHAPES: dict[str, Shapes] = {
    "one token": [(0, 1)],
    "decode of unlike lengths": [(0, 1), (62, 1), (256, 1), (15, 1), (16, 1), (3, 1)],
    "decode of like lengths": [(20, 1), (40, 1), (17, 1), (30, 1)],
    "chunk from the start": [(0, 63)],
    "chunk on top of pages": [(100, 57)],
    "chunks and decode together": [(31, 1), (40, 17), (0, 2), (128, 1), (5, 1), (30, 2)],
}


@pytest.mark.parametrize("page_format", ALL_FORMATS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("group", [FULL, SINKS], ids=str)
def test_fp32_equals_the_reference(page_format: PageFormat, shapes: Shapes, group: CacheGroup) -> None:
    Case(page_format, shapes, group).check()


@pytest.mark.parametrize("page_format", ALL_FORMATS, ids=str)
@pytest.mark.parametrize(("dim", "page_size"), [(16, 5), (80, 16), (96, 5), (80, 1), (6, 7)])
def test_odd_heads_and_pages(page_format: PageFormat, dim: int, page_size: int) -> None:
    """Five tokens a page and windows that end within one."""
    for group in (FULL, CacheGroup((0,), 13, sinks=3)):
        Case(page_format, [(0, 4), (12, 1), (14, 1), (17, 23), (44, 1)], group, dim, page_size).check()


@pytest.mark.parametrize("page_format", ["int8", "k=int4:channel,v=fp8_e4m3"])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (7, 7)])
def test_groupings_of_heads(page_format: str, heads: tuple[int, int]) -> None:
    for group in (FULL, SINKS):
        Case(PageFormat.parse(page_format), SHAPES["chunks and decode together"], group, heads=heads).check()


@pytest.mark.parametrize("page_format", ["bf16", "int4:channel"])
@pytest.mark.parametrize("sinks", [0, 1, 4, 16, 17, 40])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 64])
def test_the_edges_of_windows(page_format: str, sinks: int, window: int) -> None:
    """Lengths W - 1, W and W + 1, as single rows and as chunks, and far longer ones."""
    group = CacheGroup((0,), window, sinks)
    lengths = [length for length in (window - 1, window, window + 1, 90, 96, 130) if length > 0]
    Case(PageFormat.parse(page_format), [(length - 1, 1) for length in lengths], group).check()
    Case(PageFormat.parse(page_format), [(length // 2, length - length // 2) for length in lengths], group).check()


@pytest.mark.parametrize("page_format", ALL_FORMATS, ids=str)
@pytest.mark.parametrize("group", [FULL, SINKS], ids=str)
def test_bf16_chunks_stay_within_their_rounding(page_format: PageFormat, group: CacheGroup) -> None:
    Case(page_format, SHAPES["chunks and decode together"], group).check(torch.bfloat16, BF16_TOLERANCE)


def test_bf16_heads_may_be_computed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = Case(PageFormat.parse("int8"), SHAPES["chunk on top of pages"])
    together = tested.run(torch.bfloat16)
    monkeypatch.setattr("pageferry.kernels.paged_attention._MAX_SCORES", 1)
    torch.testing.assert_close(tested.run(torch.bfloat16), together, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("page_format", TAIL_FORMATS, ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 33])
def test_pages_and_tails_do_not_depend_on_chunks(page_format: PageFormat, chunk_tokens: int) -> None:
    shapes = [(89, 1), (47, 1), (48, 1)]
    tested, whole = Case(page_format, shapes, chunk_tokens=chunk_tokens), Case(page_format, shapes)
    for ours, expected in ((tested.pages.pools, whole.pages.pools), (tested.pages.tails, whole.pages.tails)):
        assert all(torch.equal(one.memory, other.memory) for one, other in zip(ours, expected, strict=True))
    assert torch.equal(tested.run(), whole.run())


@pytest.mark.parametrize("page_format", ALL_FORMATS, ids=str)
def test_a_sequence_of_nan_fails_alone(page_format: PageFormat) -> None:
    tested = Case(page_format, [(40, 1), (33, 1), (45, 1)])
    before = tested.run()
    spoil(tested.pages.layers[0], tested.chunks[1].sequence.tables[0][0])
    after = tested.run()
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize(
    "page_format", [f for f in FORMATS if f.k.element.is_scaled and f.v.element.is_scaled], ids=str
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_a_token_that_no_scale_can_hold_fails_its_sequence(page_format: PageFormat, bad: float, side: str) -> None:
    tested = Case(page_format, [(40, 1), (40, 1), (45, 1)])
    good = tested.run()
    getattr(tested.histories[1], side)[5, :, 3] = bad
    tested._write([Chunk(tested.chunks[1].sequence, 0, 40, samples=False)], [1])
    tested._write(tested.chunks, [0, 1, 2])
    result = tested.run()
    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("page_format", TAIL_FORMATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_a_token_that_fp16_can_not_hold_fails_its_sequence(page_format: PageFormat, bad: float) -> None:
    """While it is open, and once its page is quantised; the neighbours' results are the same."""
    for position in (35, 5):
        tested = Case(page_format, [(40, 1), (40, 1), (45, 1)])
        good = tested.run()
        tested.histories[1].values[position, 0, 0] = bad
        for start, count in ((0, 40), (40, 1)):
            chunk = Chunk(tested.chunks[1].sequence, start, count, samples=False)
            tested._write([chunk], [1])
        tested.open_tokens = tested._write(tested.chunks, [0, 1, 2])
        result = tested.run()
        assert result[1].isnan().any()
        assert torch.equal(result[[0, 2]], good[[0, 2]])
