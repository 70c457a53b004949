"""Compiled attention against one row and one head at a time, and against itself in other company."""

from dataclasses import dataclass

import pytest
import torch
from compiled import FORMATS, ISAS, each_isa, kernels, needs_library, sequences, unturned
from page_pools import POISON, layout, poisoned

from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup
from pageferry.engine.pages import PageTensors
from pageferry.kernels.append_pages import rotate_append
from pageferry.kernels.cpu_library import Isa
from pageferry.kernels.paged_attention import History, compiled_attention, paged_attention_ref

pytestmark = needs_library
TOLERANCE = 2e-5  # of the largest result: fp32 sums in another order, and an exponential of 2e-7 relative error
NUM_PAGES = 220
NO_MEMORY = 1 << 30  # a page that would be read far outside of the pool; with it, reading where no page is held crashes
Shapes = list[tuple[int, int]]


@dataclass(frozen=True)
class Heads:
    queries: int = 6
    stored: int = 2
    dim: int = 32


@dataclass
class Case:
    """Sequences of (start, rows) each, whose earlier tokens are stored; rows are queries, keys and values."""

    pages: PageTensors
    heads: Heads
    shapes: Shapes
    tables: list[list[int]]
    rows: list[torch.Tensor]  # [tokens, H + 2 Hk, D] of each sequence, from its first token on

    def run(self, isa: Isa, *, threads: int = 1, only: list[int] | None = None) -> torch.Tensor:
        """Leaves the pages as they were."""
        before = [pool.memory.clone() for pool in (*self.pages.pools, *self.pages.tails)]
        picked = list(range(len(self.shapes))) if only is None else only
        result = self._attend(isa, threads, [self.shapes[i] for i in picked], picked)
        for pool, memory in zip((*self.pages.pools, *self.pages.tails), before, strict=True):
            pool.memory.copy_(memory)
        return result

    def run_in_chunks(self, isa: Isa, index: int, step: int) -> torch.Tensor:
        """The rows of one sequence, from its first token on, over pages that held nothing."""
        length = sum(self.shapes[index])
        shapes = [(start, min(step, length - start)) for start in range(0, length, step)]
        return torch.cat([self._attend(isa, 1, [shape], [index]) for shape in shapes])

    def _attend(self, isa: Isa, threads: int, shapes: Shapes, picked: list[int]) -> torch.Tensor:
        rows = torch.cat([self.rows[i][start : start + n] for i, (start, n) in zip(picked, shapes, strict=True)])
        batch = sequences(shapes, [self.tables[i] for i in picked], picked)
        layer, loaded = self.pages.layers[1], kernels(isa, threads)
        longest = max(len(rows) for rows in self.rows)
        rotate_append(loaded, rows, unturned(longest, self.heads.dim), layer, batch)
        return compiled_attention(loaded, rows[:, : self.heads.queries], layer, batch, self.heads.dim**-0.5)

    def reference(self) -> torch.Tensor:
        parts, layout = [], self.pages.layout
        group = layout.groups[0]
        for (start, count), rows in zip(self.shapes, self.rows, strict=True):
            queries, stored = rows[:, : self.heads.queries], rows[:, self.heads.queries :]
            keys, values = stored.split(self.heads.stored, dim=1)
            history = History(keys, values, layout.format, layout.page_size, group.window, group.sinks)
            positions = list(range(start, start + count))
            parts.append(paged_attention_ref(queries[start:], history, positions, self.heads.dim**-0.5))
        return torch.cat(parts)


def case(
    shapes: Shapes,
    page_format: PageFormat | str,
    *,
    heads: Heads = Heads(),
    page_size: int = 16,
    window: int | None = None,
    sinks: int = 0,
) -> Case:
    """Each sequence on its own pages in shuffled order; everything else, and what lies beyond its end, is poison."""
    page_format = PageFormat.parse(page_format) if isinstance(page_format, str) else page_format
    group = CacheGroup((0, 1), window, sinks)
    of = layout(page_format, heads=heads.stored, dim=heads.dim, page_size=page_size, groups=(group,))
    free = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    tables, rows = [], []
    for i, (start, count) in enumerate(shapes):
        tables.append([free.pop() for _ in range(-(-(start + count) // page_size))])
        random = torch.Generator().manual_seed(i)
        rows.append(torch.randn(start + count, heads.queries + 2 * heads.stored, heads.dim, generator=random))
    tested = Case(poisoned(of, NUM_PAGES), heads, shapes, tables, rows)
    for i, (start, count) in enumerate(shapes):
        if start:
            tested._attend(ISAS[-1], 1, [(0, start)], [i])
        live = set(group.live_pages(start, start + count, page_size))
        for index in set(range(len(tables[i]))) - live:
            tested.pages.pools[0].memory[tables[i][index]] = POISON
            tables[i][index] = NO_MEMORY
    return tested


def check(tested: Case, isas: tuple[Isa, ...] = ISAS) -> None:
    expected = tested.reference()
    for isa in isas:
        assert (tested.run(isa) - expected).abs().max() <= TOLERANCE * expected.abs().max(), isa


SHAPES: dict[str, Shapes] = {
    "one token": [(0, 1)],
    "decode": [(0, 1), (62, 1), (256, 1), (255, 1), (15, 1), (16, 1), (300, 1)],
    "chunk from the start": [(0, 63)],
    "chunk on top of pages": [(250, 37)],
    "chunks and decode together": [(31, 1), (40, 17), (0, 2), (300, 1), (5, 1)],
}
POLICIES: list[tuple[int | None, int]] = [(None, 0), (20, 0), (20, 5)]


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize(("page_size", "dim", "window", "sinks"), [(16, 64, None, 0), (5, 16, 20, 7), (16, 80, 20, 3)])
def test_equals_the_reference(
    page_format: PageFormat, page_size: int, dim: int, window: int | None, sinks: int
) -> None:
    shapes = [(31, 1), (27, 12), (0, 2), (62, 1), (4, 1), (63, 1)]
    check(case(shapes, page_format, heads=Heads(dim=dim), page_size=page_size, window=window, sinks=sinks))


@pytest.mark.slow
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("window", "sinks"), POLICIES)
@pytest.mark.parametrize(("page_size", "dim"), [(5, 80), (5, 16), (16, 64)])
def test_equals_the_reference_at_all_sizes(
    page_format: PageFormat, shapes: Shapes, window: int | None, sinks: int, page_size: int, dim: int
) -> None:
    check(case(shapes, page_format, heads=Heads(2, 1, dim), page_size=page_size, window=window, sinks=sinks))


@pytest.mark.parametrize("page_format", ["int8", "k=int4:channel:asym,v=bf16"])
@pytest.mark.parametrize("page_size", [5, 16, 24])
@pytest.mark.parametrize("window", [1, 23, 32])
@pytest.mark.parametrize("sinks", [0, 1, 4, 16, 21, 60])
def test_edges_of_windows(page_format: str, page_size: int, window: int, sinks: int) -> None:
    """Sequences of W - 1, W and W + 1 tokens and longer ones, as single rows and as chunks across the edge."""
    lengths = [window - 1, window, window + 1, 70]
    shapes = [(length - 1, 1) for length in lengths if length] + [(0, window + 3), (window - 1, 4), (66, 9)]
    check(case(shapes, page_format, heads=Heads(2, 1, 16), page_size=page_size, window=window, sinks=sinks), ISAS[-1:])


@pytest.mark.parametrize(("queries", "stored"), [(1, 1), (9, 3), (8, 1), (10, 2), (7, 7)])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_all_groupings_of_heads(queries: int, stored: int, dim: int) -> None:
    check(case([(40, 1), (3, 12)], "int8", heads=Heads(queries, stored, dim)))


@pytest.mark.parametrize("page_format", ["int8", "k=int8:channel,v=int4"])
@pytest.mark.parametrize("page_size", [1, 8, 40, 512])
@pytest.mark.parametrize("window", [None, 30])
def test_pages_of_other_sizes(page_format: str, page_size: int, window: int | None) -> None:
    check(case([(90, 1), (20, 9)], page_format, heads=Heads(2, 1, 16), page_size=page_size, window=window, sinks=0))


@each_isa
@pytest.mark.parametrize(
    "page_format", ["int8", "k=fp8_e4m3,v=int4:asym", "int8:channel", "k=int4:channel:asym,v=int8"]
)
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (290, 0), (40, 19)])
def test_bits_depend_on_nothing_but_position_and_pages(
    isa: Isa, page_format: str, window: int | None, sinks: int
) -> None:
    """Alone, in a batch, on two threads, as a chunk, in other chunks and row by row."""
    tested = case([(600, 1), (0, 330), (63, 1), (255, 1), (256, 2)], page_format, window=window, sinks=sinks)
    whole = tested.run(isa)
    assert torch.equal(whole, tested.run(isa, threads=2))
    rows = [0, 1, 331, 332, 333, 335]
    for i in range(5):
        assert torch.equal(whole[rows[i] : rows[i + 1]], tested.run(isa, only=[i]))
        assert torch.equal(whole[rows[i] : rows[i + 1]], tested.run(isa, only=[i], threads=2))
    for step in (1, 47):
        assert torch.equal(whole[1:331], tested.run_in_chunks(isa, 1, step))


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@each_isa
def test_a_sequence_of_nan_fails_alone(isa: Isa, page_format: PageFormat) -> None:
    tested = case([(40, 1), (300, 1), (45, 1)], page_format, heads=Heads(2, 1, 16))
    before = tested.run(isa)
    views = tested.pages.layers[1].keys
    (views.payload if views.scales is None else views.scales)[tested.tables[1][0]] = float("nan")
    after = tested.run(isa)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(
    "page_format", [f for f in FORMATS if f.k.element.is_scaled and f.v.element.is_scaled], ids=str
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("column", [2, 3], ids=["keys", "values"])
@each_isa
def test_a_token_that_no_scale_can_hold_fails_its_sequence(
    isa: Isa, page_format: PageFormat, bad: float, column: int
) -> None:
    """Read from pages, and from the tail of the last one."""
    tested = case([(0, 41), (0, 41)], page_format, heads=Heads(2, 1, 16))
    for position in (5, 33):
        before = tested.rows[1].clone()
        tested.rows[1][position, column, 3] = bad
        result = tested.run(isa)
        tested.rows[1] = before
        assert not result[: 41 + position].isnan().any()
        assert result[41 + position :].isnan().any(dim=(1, 2)).all()


@pytest.mark.parametrize("page_format", ["int8", "int8:channel"])
@each_isa
def test_what_fp16_cannot_hold_fails_in_a_tail(isa: Isa, page_format: str) -> None:
    """With tails a row meets keys and values in fp16; without, int8's scale still holds them."""
    tested = case([(19, 1), (20, 1)], page_format, heads=Heads(2, 1, 16))
    tested.rows[0][19, 3, 5] = 1e5
    result = tested.run(isa)
    assert result[0].isnan().all() == (page_format == "int8:channel")
    assert not result[1].isnan().any()


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_avx2_and_avx512_give_the_same_bits(page_format: PageFormat) -> None:
    tested = case([(100, 1), (0, 30)], page_format, window=50, sinks=3)
    results = [tested.run(isa) for isa in ISAS if isa is not Isa.PORTABLE]
    assert all(torch.equal(results[0], other) for other in results[1:])
