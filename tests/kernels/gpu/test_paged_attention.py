"""Decode and prefill attention over poisoned pools against a full mask, in all formats and at the edges of windows."""

from dataclasses import dataclass

import pytest
import torch
from gpu_pages import on_device
from page_pools import FORMATS, layout, poisoned, spoil

from pageferry.core.formats import PageFormat
from pageferry.engine.pages import PageTensors
from pageferry.kernels.append_pages import append_pages
from pageferry.kernels.gpu.paged_attention import attention_ref, decode_attention
from pageferry.kernels.gpu.paged_prefill import Chunks, prefill_attention
from pageferry.kernels.paged_attention import paged_attention_ref

HEADS, KV_HEADS, PAGE_SIZE, NUM_PAGES = 6, 2, 16, 160
# fp32 sums in another order; fp16 rounds queries and weights to 11 bits, bf16 to 8; scores amplify that.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
# One of each element and each kind of pair; `slow` has all.
QUICK = tuple(PageFormat.parse(text) for text in ("bf16", "fp8_e4m3", "int8", "k=int8,v=int4:asym"))
DECODE = [(62, 1), (256, 1), (15, 1), (0, 1)]
PREFILL = [(31, 1), (40, 17), (0, 63)]


@dataclass
class Case:
    pages: PageTensors
    tables: list[list[int]]
    shapes: list[tuple[int, int]]  # (tokens before, rows) of each sequence
    query: torch.Tensor

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    def run(
        self, device: str, dtype: torch.dtype, window: int | None = None, sinks: int = 0, *, free: bool = False
    ) -> torch.Tensor:
        """With `free`, pages that the window has left behind are gone from the tables."""
        width = max(map(len, self.tables))
        tables = torch.full((len(self.tables), width), -1, dtype=torch.int32)
        for i, (table, (before, _)) in enumerate(zip(self.tables, self.shapes, strict=True)):
            tables[i, : len(table)] = torch.tensor(table)
            if free and window is not None:
                tables[i, -(-sinks // PAGE_SIZE) : max(0, before - window + 1) // PAGE_SIZE] = -1
        lengths = torch.tensor([sum(shape) for shape in self.shapes], dtype=torch.int32, device=device)
        layer = on_device(self.pages, device).layers[0]
        query, tables = self.query.to(device), tables.to(device)
        options = {"window": window, "sinks": sinks, "dtype": dtype}
        counts = [count for _, count in self.shapes]
        if max(counts) == 1:
            return decode_attention(query, layer, tables, lengths, self.scale, **options).cpu()
        chunks = Chunks.of(counts, HEADS // KV_HEADS, dtype, device)
        return prefill_attention(query, layer, tables, lengths, chunks, self.scale, **options).cpu()

    def reference(self, window: int | None = None, sinks: int = 0) -> torch.Tensor:
        parts, row = [], 0
        for table, (before, count) in zip(self.tables, self.shapes, strict=True):
            positions = torch.arange(before, before + count)
            query = self.query[row : row + count]
            row += count
            parts.append(attention_ref(query, self.pages.layers[0], table, positions, self.scale, window, sinks))
        return torch.cat(parts)


def case(page_format: PageFormat, shapes: list[tuple[int, int]], dim: int = 8) -> Case:
    """Sequences each on its own pages in shuffled order; every byte beside their tokens is poison."""
    pages = poisoned(layout(page_format, heads=KV_HEADS, dim=dim), NUM_PAGES)
    free, tables = torch.randperm(NUM_PAGES).tolist(), []
    for shape in shapes:
        positions = torch.arange(sum(shape))
        table = [free.pop() for _ in range(len(positions) // PAGE_SIZE + 1)]  # at times one page of headroom
        keys, values = torch.randn(2, len(positions), KV_HEADS, dim) + 0.3
        append_pages(pages.layers[0], keys, values, torch.tensor(table)[positions // PAGE_SIZE], positions % PAGE_SIZE)
        tables.append(table)
    rows = sum(count for _, count in shapes)
    wide = torch.full((rows, HEADS + 1, dim + 1), float("nan"))
    wide[:, :HEADS, :dim] = torch.randn(rows, HEADS, dim)
    return Case(pages, tables, shapes, wide[:, :HEADS, :dim])


def check(tested: Case, device: str, dtype: torch.dtype, window: int | None = None, sinks: int = 0) -> None:
    result = tested.run(device, dtype, window, sinks, free=True)
    expected = tested.reference(window, sinks)
    assert (result - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


def supported(page_format: PageFormat, dtype: torch.dtype, device: str) -> bool:
    if dtype == torch.bfloat16:
        return device != "cpu"  # the interpreter multiplies bf16 wrongly
    return dtype == torch.float32 or not {"fp32", "bf16"} & {str(page_format.k), str(page_format.v)}


def test_the_reference_equals_the_processors() -> None:
    tested = case(FORMATS[0], [(40, 17)])
    positions = list(range(40, 57))
    expected = paged_attention_ref(tested.query, tested.pages.layers[0], tested.tables[0], positions, tested.scale, 20)
    torch.testing.assert_close(tested.reference(20), expected)


@pytest.mark.parametrize("page_format", QUICK, ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (20, 4)])
def test_decode(page_format: PageFormat, window: int | None, sinks: int, device: str) -> None:
    check(case(page_format, DECODE, 64), device, torch.float32, window, sinks)


@pytest.mark.parametrize("page_format", QUICK, ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (20, 4)])
def test_prefill(page_format: PageFormat, window: int | None, sinks: int, device: str) -> None:
    check(case(page_format, PREFILL), device, torch.float32, window, sinks)


@pytest.mark.parametrize("shapes", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_products_in_fp16(shapes: list[tuple[int, int]], device: str) -> None:
    check(case(PageFormat.parse("k=int8:asym,v=int4"), shapes, 64), device, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("length", [1, 63, 257])
@pytest.mark.parametrize("dim", [8, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (20, 0), (100, 17)])
def test_every_format(
    page_format: PageFormat, length: int, dim: int, dtype: torch.dtype, window: int | None, sinks: int, device: str
) -> None:
    if not supported(page_format, dtype, device):
        pytest.skip("not computed in this dtype")
    check(case(page_format, [(length - 1, 1), (length // 2, 1)], dim), device, dtype, window, sinks)
    check(case(page_format, [(length // 3, length - length // 3), (length, 2)], dim), device, dtype, window, sinks)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 16, 50, 64, 200])
@pytest.mark.parametrize("sinks", [0, 1, 16, 70])
@pytest.mark.parametrize("page_format", [FORMATS[0], PageFormat.parse("int8")], ids=str)
def test_the_edges_of_windows(page_format: PageFormat, window: int, sinks: int, device: str) -> None:
    """Lengths W - 1, W and W + 1, and far beyond; a prompt that is longer than W; sinks that meet the window."""
    lengths = [max(1, window - 1), window, window + 1, 2 * window + 77]
    check(case(page_format, [(length - 1, 1) for length in lengths]), device, torch.float32, window, sinks)
    check(case(page_format, [(0, window + 30), (window, 3)]), device, torch.float32, window, sinks)


def test_a_sequence_without_tokens_gives_zeros(device: str) -> None:
    """As in a CUDA graph whose batch isn't full."""
    tested = case(FORMATS[0], [(40, 1), (0, 1)])
    tested.shapes[1] = (0, 0)
    lengths = torch.tensor([41, 0], dtype=torch.int32, device=device)
    tables = torch.tensor([tested.tables[0], [-1] * len(tested.tables[0])], dtype=torch.int32, device=device)
    layer = on_device(tested.pages, device).layers[0]
    result = decode_attention(tested.query.to(device), layer, tables, lengths, tested.scale)
    assert torch.equal(result[1].cpu(), torch.zeros(HEADS, 8))
    assert result[0].isfinite().all()


@pytest.mark.parametrize("page_format", QUICK, ids=str)
def test_a_sequence_of_nan_fails_alone(page_format: PageFormat, device: str) -> None:
    for shapes in ([(40, 1), (33, 1), (300, 1)], [(3, 5), (33, 2), (40, 2)]):
        tested = case(page_format, shapes)
        before = tested.run(device, torch.float32)
        spoil(tested.pages.layers[0], tested.tables[1][0])
        after = tested.run(device, torch.float32)
        first = shapes[0][1]
        rows = torch.arange(len(after))
        bad = (rows >= first) & (rows < first + shapes[1][1])
        assert after[bad].isnan().all()
        assert torch.equal(after[~bad], before[~bad])


def test_a_row_is_the_same_alone_and_in_a_batch(device: str) -> None:
    tested = case(PageFormat.parse("int8"), [(300, 1), (700, 1), (20, 1)])
    together = tested.run(device, torch.float32)
    alone = Case(tested.pages, tested.tables[:1], tested.shapes[:1], tested.query[:1])
    assert torch.equal(alone.run(device, torch.float32), together[:1])


def test_what_cannot_be_computed_is_refused(device: str) -> None:
    tested = case(PageFormat.parse("bf16"), [(3, 1)])
    with pytest.raises(ValueError, match="bf16 pages can exceed fp16"):
        tested.run(device, torch.float16)
    with pytest.raises(ValueError, match="window is 0"):
        tested.run(device, torch.float32, 0)
    tested.query = tested.query[:, :5]
    with pytest.raises(ValueError, match="5 query heads must be a multiple of 2"):
        tested.run(device, torch.float32)
