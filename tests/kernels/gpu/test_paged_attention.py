"""Decode and prefill attention over poisoned pools against a full mask, in all formats and at the edges of windows."""

from dataclasses import dataclass, field

import pytest
import torch
from gpu_pages import on_device
from page_pools import FORMATS, TAIL_FORMATS, layout, poisoned, spoil

from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup
from pageferry.kernels.append_pages import LayerPages, append_pages
from pageferry.kernels.gpu.page_arguments import SequencePages
from pageferry.kernels.gpu.paged_attention import decode_attention
from pageferry.kernels.gpu.paged_prefill import Chunks, prefill_attention
from pageferry.kernels.paged_attention import History, paged_attention_ref
from pageferry.kernels.quantise import quantise

HEADS, KV_HEADS, PAGE_SIZE, NUM_PAGES = 6, 2, 16, 160
# fp32 sums in another order; fp16 rounds queries and weights to 11 bits, bf16 to 8; scores amplify that.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
# One of each element and each kind of pair, without and with tails, some in windows; `slow` has all.
QUICK = (
    ("bf16", None, 0),
    ("fp8_e4m3", 20, 4),
    ("k=int8,v=int4:asym", None, 0),
    ("k=int8,v=int4:asym", 20, 4),
    ("k=int8:channel:asym,v=int4", None, 0),
    ("k=fp16,v=fp8_e4m3:channel", 20, 4),
)
FORMAT_TEXTS = tuple(str(page_format) for page_format in (*FORMATS, *TAIL_FORMATS))
DECODE = [(62, 1), (150, 1), (15, 1), (0, 1)]
PREFILL = [(31, 1), (40, 17), (0, 37)]


@dataclass
class Case:
    """Sequences of (tokens before, rows) each, on their own pages in shuffled order; every byte beside is poison."""

    text: str
    shapes: list[tuple[int, int]]
    device: str
    dim: int = 8
    window: int | None = None
    sinks: int = 0
    page_size: int = PAGE_SIZE
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    layer: LayerPages = field(init=False)
    tables: list[list[int]] = field(init=False)
    tokens: list[torch.Tensor] = field(init=False)  # [2, tokens, Hk, D] of each sequence
    query: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        group = CacheGroup((0, 1), self.window, self.sinks)
        of = layout(self.format, heads=self.heads[1], dim=self.dim, page_size=self.page_size, groups=(group,))
        pages = poisoned(of, NUM_PAGES)
        free, self.tables, self.tokens = torch.randperm(NUM_PAGES).tolist(), [], []
        for tail, shape in enumerate(self.shapes):
            self.tokens.append(torch.randn(2, sum(shape), self.heads[1], self.dim) + 0.3)
            # At times one page of headroom.
            self.tables.append([free.pop() for _ in range(sum(shape) // self.page_size + 1)])
            self.store(pages.layers[1], tail)
        self.layer = on_device(pages, self.device).layers[1]
        rows, num_heads = sum(count for _, count in self.shapes), self.heads[0]
        wide = torch.full((rows, num_heads + 1, self.dim + 1), float("nan"))
        wide[:, :num_heads, : self.dim] = torch.randn(rows, num_heads, self.dim)
        self.query = wide[:, :num_heads, : self.dim]

    def store(self, layer: LayerPages, index: int) -> None:
        """A sequence's tokens, as they lie when attention begins."""
        table, x, (before, count) = torch.tensor(self.tables[index]), self.tokens[index], self.shapes[index]
        if not self.format.has_tails:
            positions = torch.arange(x.shape[1])
            append_pages(layer, *x, table[positions // self.page_size], positions % self.page_size)
            return
        num_full = x.shape[1] // self.page_size
        end = before + count if self.singles else before  # of what the tail holds
        for side, vectors in zip((layer.keys, layer.values), x.half(), strict=True):
            full = vectors[: num_full * self.page_size].float().unflatten(0, (num_full, self.page_size)).transpose(1, 2)
            side.store(table[:num_full], quantise(full, side.format))
            assert side.tails is not None
            opened = vectors[end // self.page_size * self.page_size : end].transpose(0, 1)
            side.tails[len(self.shapes) - 1 - index, :, : opened.shape[1]] = opened

    @property
    def singles(self) -> bool:
        return all(count == 1 for _, count in self.shapes)

    @property
    def format(self) -> PageFormat:
        return PageFormat.parse(self.text)

    def sequences(self) -> SequencePages:
        """Pages that the window has left behind are gone from the tables, and with tails those that are not full."""
        tables = torch.full((len(self.tables), max(map(len, self.tables))), -1, dtype=torch.int32)
        for row, table, (before, count) in zip(tables, self.tables, self.shapes, strict=True):
            row[: len(table)] = torch.tensor(table)
            if self.window is not None:
                row[-(-self.sinks // self.page_size) : max(0, before - self.window + 1) // self.page_size] = -1
            if self.format.has_tails:
                row[(before + count) // self.page_size :] = -1
        lengths = torch.tensor([sum(shape) for shape in self.shapes], dtype=torch.int32, device=self.device)
        tails = torch.arange(len(self.shapes), dtype=torch.int32, device=self.device).flip(0)
        return SequencePages(tables.to(self.device), lengths, tails if self.format.has_tails else None)

    def run(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        query, sequences, scale = self.query.to(self.device), self.sequences(), self.dim**-0.5
        if self.singles:
            return decode_attention(query, self.layer, sequences, scale, dtype=dtype).cpu()
        chunks = Chunks.of([count for _, count in self.shapes], self.heads[0], self.layer, dtype)
        rows = [x[:, before:] for x, (before, _) in zip(self.tokens, self.shapes, strict=True)]
        keys, values = torch.cat(rows, 1).to(self.device)
        result = prefill_attention(query, self.layer, sequences, chunks, scale, new=(keys, values), dtype=dtype)
        return result.cpu()

    def reference(self) -> torch.Tensor:
        parts, row = [], 0
        for (keys, values), (before, count) in zip(self.tokens, self.shapes, strict=True):
            history = History(keys, values, self.format, self.page_size, self.window, self.sinks)
            query = self.query[row : row + count]
            row += count
            parts.append(paged_attention_ref(query, history, list(range(before, before + count)), self.dim**-0.5))
        return torch.cat(parts)


def check(tested: Case, dtype: torch.dtype = torch.float32) -> None:
    result, expected = tested.run(dtype), tested.reference()
    assert (result - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


def supported(text: str, dtype: torch.dtype, device: str) -> bool:
    if dtype == torch.bfloat16:
        return device != "cpu"  # the interpreter multiplies bf16 wrongly
    page_format = PageFormat.parse(text)
    return (
        dtype == torch.float32
        or page_format.has_tails
        or not {"fp32", "bf16"} & {str(page_format.k), str(page_format.v)}
    )


@pytest.mark.parametrize("shapes", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(("text", "window", "sinks"), QUICK)
def test_attention(shapes: list[tuple[int, int]], text: str, window: int | None, sinks: int, device: str) -> None:
    check(Case(text, shapes, device, 8, window, sinks))


@pytest.mark.parametrize("shapes", [[(40, 1), (20, 1)], [(9, 29)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("text", FORMAT_TEXTS)
def test_every_format_in_a_window(shapes: list[tuple[int, int]], text: str, device: str) -> None:
    check(Case(text, shapes, device, 8, 21, 3))


@pytest.mark.parametrize(
    "shapes", [[(18, 1), (19, 1), (20, 1), (60, 1)], [(0, 41), (19, 3)]], ids=["decode", "prefill"]
)
@pytest.mark.parametrize("sinks", [0, 17])
def test_lengths_around_a_window_that_is_no_multiple_of_the_page(
    shapes: list[tuple[int, int]], sinks: int, device: str
) -> None:
    """W - 1, W and W + 1, and beyond; a prompt that is longer than W, and rows on both sides of it."""
    check(Case("int8", shapes, device, 8, 20, sinks))


@pytest.mark.parametrize("shapes", [[(40, 1)], [(3, 12)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (7, 7)])
@pytest.mark.parametrize("text", ["int8", "k=int4:channel,v=fp8_e4m3"])
def test_groupings_of_heads(shapes: list[tuple[int, int]], heads: tuple[int, int], text: str, device: str) -> None:
    check(Case(text, shapes, device, heads=heads))


@pytest.mark.parametrize("shapes", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("text", ["k=int8:asym,v=int4", "k=int4:channel,v=bf16"])
def test_products_in_fp16(shapes: list[tuple[int, int]], text: str, device: str) -> None:
    check(Case(text, shapes, device, 64), torch.float16)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 1), (16, 17)])
def test_windows_that_end_among_the_open_tokens(window: int, sinks: int, device: str) -> None:
    check(Case("int8:channel", [(40, 1), (47, 1), (3, 1)], device, 8, window, sinks))
    check(Case("int8:channel", [(20, 15), (3, 9)], device, 8, window, sinks))


@pytest.mark.slow
@pytest.mark.parametrize("text", FORMAT_TEXTS)
@pytest.mark.parametrize("length", [1, 63, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "window", "sinks"), [(8, None, 0), (80, 20, 0), (80, 100, 17)])
def test_every_format(
    text: str, length: int, dim: int, dtype: torch.dtype, window: int | None, sinks: int, device: str
) -> None:
    if not supported(text, dtype, device):
        pytest.skip("not computed in this dtype")
    check(Case(text, [(length - 1, 1), (length // 2, 1)], device, dim, window, sinks), dtype)
    rows = min(length - length // 3, 70)
    check(Case(text, [(length - rows, rows), (length, 2)], device, dim, window, sinks), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 16, 50, 64, 200])
@pytest.mark.parametrize("sinks", [0, 1, 16, 70])
@pytest.mark.parametrize(
    ("text", "page_size"), [("fp32", 16), ("int8", 16), ("int8:channel", 16), ("int8:channel", 48)]
)
def test_the_edges_of_windows(window: int, sinks: int, text: str, page_size: int, device: str) -> None:
    """Lengths W - 1, W and W + 1, and far beyond; a prompt that is longer than W; sinks that meet the window."""
    lengths = [max(1, window - 1), window, window + 1, 2 * window + 77]
    check(Case(text, [(length - 1, 1) for length in lengths], device, 8, window, sinks, page_size))
    check(Case(text, [(0, window + 30), (window, 3)], device, 8, window, sinks, page_size))


@pytest.mark.parametrize("text", ["fp32", "int8:channel"])
def test_a_sequence_without_tokens_gives_zeros(text: str, device: str) -> None:
    """As in a CUDA graph whose batch isn't full."""
    tested = Case(text, [(40, 1), (0, 1)], device)
    held = tested.sequences()
    held.lengths[1] = 0
    result = decode_attention(tested.query.to(device), tested.layer, held, 0.3)
    assert torch.equal(result[1].cpu(), torch.zeros(HEADS, 8))
    assert result[0].isfinite().all()


@pytest.mark.parametrize("text", ["bf16", "int4:asym", "k=int8:channel:asym,v=int4"])
@pytest.mark.parametrize(
    "shapes", [[(40, 1), (33, 1), (140, 1)], [(3, 5), (33, 2), (40, 2)]], ids=["decode", "prefill"]
)
def test_a_sequence_of_nan_fails_alone(text: str, shapes: list[tuple[int, int]], device: str) -> None:
    tested = Case(text, shapes, device)
    before = tested.run()
    spoil(tested.layer, tested.tables[1][0])
    after = tested.run()
    first = shapes[0][1]
    rows = torch.arange(len(after))
    bad = (rows >= first) & (rows < first + shapes[1][1])
    assert after[bad].isnan().all()
    assert torch.equal(after[~bad], before[~bad])


def test_a_row_is_the_same_alone_and_in_a_batch(device: str) -> None:
    for text in ("int8", "int8:channel"):
        tested = Case(text, [(150, 1), (280, 1), (20, 1)], device)
        together, held = tested.run(), tested.sequences()
        tails = None if held.tails is None else held.tails[:1]
        one = SequencePages(held.tables[:1], held.lengths[:1], tails)
        alone = decode_attention(tested.query[:1].to(device), tested.layer, one, tested.dim**-0.5)
        assert torch.equal(alone.cpu(), together[:1])


def test_what_cannot_be_computed_is_refused(device: str) -> None:
    tested = Case("bf16", [(3, 1)], device)
    with pytest.raises(ValueError, match="bf16 pages can exceed fp16"):
        tested.run(torch.float16)
    query, held = tested.query.to(device), tested.sequences()
    with pytest.raises(ValueError, match="5 query heads must be a multiple of 2"):
        decode_attention(query[:, :5], tested.layer, held, 1.0)
    with pytest.raises(ValueError, match="must both have tails, or neither"):
        decode_attention(query, tested.layer, SequencePages(held.tables, held.lengths, held.lengths), 1.0)
    with pytest.raises(ValueError, match="must be of as many sequences"):
        decode_attention(query, tested.layer, SequencePages(held.tables, held.lengths[:0]), 1.0)
