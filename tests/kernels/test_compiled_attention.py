"""Compiled attention against one row and one head at a time, and against itself in other company."""

from dataclasses import dataclass

import pytest
import torch
from compiled import FORMATS, ISAS, each_isa, fill, kernels, needs_library, sequences
from page_pools import poisoned

from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageLayout
from pageferry.engine.pages import PageTensors
from pageferry.kernels.cpu_library import Isa
from pageferry.kernels.paged_attention import compiled_attention, paged_attention_ref

pytestmark = needs_library
TOLERANCE = 2e-5  # of the largest result: fp32 sums in another order, and an exponential of 2e-7 relative error
NUM_PAGES = 160
Shapes = list[tuple[int, int]]


@dataclass
class Case:
    pages: PageTensors
    shapes: Shapes
    tables: list[list[int]]
    queries: list[torch.Tensor]  # of each sequence

    def run(
        self, isa: Isa, *, window: int | None = None, threads: int = 1, only: list[int] | None = None
    ) -> torch.Tensor:
        picked = range(len(self.shapes)) if only is None else only
        query = torch.cat([self.queries[i] for i in picked])
        batch = sequences([self.shapes[i] for i in picked], [self.tables[i] for i in picked])
        scale = query.shape[-1] ** -0.5
        return compiled_attention(kernels(isa, threads), query, self.pages.layers[1], batch, scale, window)

    def reference(self, window: int | None) -> torch.Tensor:
        parts = []
        for (start, count), table, query in zip(self.shapes, self.tables, self.queries, strict=True):
            positions = list(range(start, start + count))
            scale = query.shape[-1] ** -0.5
            parts.append(paged_attention_ref(query, self.pages.layers[1], table, positions, scale, window))
        return torch.cat(parts)


def case(
    shapes: Shapes, page_format: PageFormat, *, heads: int = 6, kv_heads: int = 2, dim: int = 32, size: int = 16
) -> Case:
    """Each sequence on its own pages in shuffled order; everything else, and what lies beyond its end, is poison."""
    pages = poisoned(PageLayout("tested", page_format, size, 2, kv_heads, dim), NUM_PAGES)
    free = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    tables, queries = [], []
    for i, (start, count) in enumerate(shapes):
        table = [free.pop() for _ in range(-(-(start + count) // size) + 1)]
        fill(pages.layers[1], table, start + count, seed=i)
        tables.append(table)
        queries.append(torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(100 + i)))
    return Case(pages, shapes, tables, queries)


SHAPES: dict[str, Shapes] = {
    "one token": [(0, 1)],
    "decode": [(0, 1), (62, 1), (256, 1), (255, 1), (15, 1), (16, 1), (700, 1)],
    "chunk from the start": [(0, 63)],
    "chunk on top of pages": [(250, 57)],
    "chunks and decode together": [(31, 1), (40, 17), (0, 2), (300, 1), (5, 1)],
}


@each_isa
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [None, 20])
def test_equals_the_reference(isa: Isa, page_format: PageFormat, shapes: Shapes, window: int | None) -> None:
    tested = case(shapes, page_format)
    result, expected = tested.run(isa, window=window), tested.reference(window)
    assert (result - expected).abs().max() <= TOLERANCE * expected.abs().max()


@each_isa
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (8, 1), (10, 2), (7, 7)])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_all_groupings_of_heads(isa: Isa, heads: int, kv_heads: int, dim: int) -> None:
    tested = case([(40, 1), (3, 12)], PageFormat.parse("int8"), heads=heads, kv_heads=kv_heads, dim=dim)
    result, expected = tested.run(isa), tested.reference(None)
    assert (result - expected).abs().max() <= TOLERANCE * expected.abs().max()


@each_isa
@pytest.mark.parametrize("size", [1, 8, 40, 512])
@pytest.mark.parametrize("window", [None, 30])
def test_pages_of_other_sizes(isa: Isa, size: int, window: int | None) -> None:
    tested = case([(90, 1), (20, 9)], PageFormat.parse("int8"), size=size)
    result, expected = tested.run(isa, window=window), tested.reference(window)
    assert (result - expected).abs().max() <= TOLERANCE * expected.abs().max()


@each_isa
@pytest.mark.parametrize("window", [None, 290])
def test_bits_depend_on_nothing_but_position_and_pages(isa: Isa, window: int | None) -> None:
    """Alone, in a batch, on two threads, as a chunk, in other chunks and row by row."""
    tested = case([(600, 1), (0, 330), (63, 1), (255, 1), (256, 2)], PageFormat.parse("int8"))
    whole = tested.run(isa, window=window)
    assert torch.equal(whole, tested.run(isa, window=window, threads=2))
    rows = [0, 1, 331, 332, 333, 335]
    for i in range(5):
        assert torch.equal(whole[rows[i] : rows[i + 1]], tested.run(isa, window=window, only=[i]))
    query, table = tested.queries[1], tested.tables[1]
    for step in (1, 47):
        for start in range(0, 330, step):
            count = min(step, 330 - start)
            part = Case(tested.pages, [(start, count)], [table], [query[start : start + count]])
            assert torch.equal(whole[1 + start : 1 + start + count], part.run(isa, window=window))


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@each_isa
def test_a_sequence_of_nan_fails_alone(isa: Isa, page_format: PageFormat) -> None:
    tested = case([(40, 1), (300, 1), (45, 1)], page_format)
    before = tested.run(isa)
    views = tested.pages.layers[1].keys
    (views.payload if views.scales is None else views.scales)[tested.tables[1][0]] = float("nan")
    after = tested.run(isa)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_avx2_and_avx512_give_the_same_bits() -> None:
    tested = case([(600, 1), (0, 90)], PageFormat.parse("int8"))
    results = [tested.run(isa) for isa in ISAS if isa is not Isa.PORTABLE]
    assert all(torch.equal(results[0], other) for other in results[1:])
