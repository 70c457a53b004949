"""Rotation and storing, compiled: the bytes that torch stores, and nothing beside them."""

import pytest
import torch
from compiled import FORMATS, ISAS, each_isa, kernels, needs_library, sequences, unturned
from page_pools import TAIL_FORMATS, layout, poisoned

from pageferry.core.formats import PageFormat
from pageferry.engine.pages import PageTensors
from pageferry.kernels.append_pages import LayerPages, RotaryTables, append_pages, rotate_append
from pageferry.kernels.cpu_library import Isa
from pageferry.kernels.paged_attention import compiled_attention
from pageferry.kernels.quantise import quantise
from pageferry.kernels.rms_norm import rms_norm
from pageferry.kernels.rotary import rotary, rotary_table

pytestmark = needs_library
HEADS, KV_HEADS = 5, 2
FP16 = PageFormat.parse("fp16").k
TOKEN_FORMATS = tuple(page_format for page_format in FORMATS if not page_format.has_tails)


def pool(page_format: PageFormat, dim: int, page_size: int = 16) -> PageTensors:
    return poisoned(layout(page_format, heads=KV_HEADS, dim=dim, page_size=page_size), 64)


def assert_same_bytes(mine: PageTensors, theirs: PageTensors) -> None:
    """But for what sort of NaN a number is, and what sort of 0 a zero point: torch itself has several."""
    for ours, other in zip(mine.layers, theirs.layers, strict=True):
        for a, b in ((ours.keys, other.keys), (ours.values, other.values)):
            parts = ((a.payload, b.payload), (a.scales, b.scales), (a.zeros, b.zeros), (a.tails, b.tails))
            for one, two in parts:
                if one is not None:
                    assert torch.equal(bits(one, is_zero=one is a.zeros), bits(two, is_zero=two is b.zeros))


def bits(stored: torch.Tensor, *, is_zero: bool) -> torch.Tensor:
    if not stored.is_floating_point():
        return stored
    whole = stored.contiguous().view(torch.int32 if stored.dtype == torch.float32 else torch.int16)
    return whole.masked_fill(stored.isnan(), -1).masked_fill((stored == 0) & is_zero, 0)


def many_sizes(num_rows: int, dim: int) -> torch.Tensor:
    """Queries, keys and values from such with subnormal scales to such as overflow, zeros and constants among them."""
    torch.manual_seed(num_rows)
    sizes = torch.logspace(-9, 7, num_rows)[torch.randperm(num_rows)][:, None, None]
    qkv = (torch.randn(num_rows, HEADS + 2 * KV_HEADS, dim) + 0.3) * sizes
    qkv[0, -1], qkv[-1, -2] = 0, 2.0017
    return qkv


def check_bytes(page_format: PageFormat, num_rows: int, dim: int, page_size: int) -> None:
    """Two sequences, on every instruction set; two threads share the rows."""
    tables = [torch.randperm(60).tolist(), [61, 63, 62, 60]]
    batch = sequences([(7, num_rows), (18, 1)], tables)
    cos, sin = rotary_table(torch.rand(dim // 2), 300)
    at = batch.positions.long()
    owner = torch.tensor([0] * num_rows + [1])
    page = torch.tensor([tables[owner[i]][position // page_size] for i, position in enumerate(at.tolist())])
    for isa in ISAS:
        qkv = many_sizes(num_rows + 1, dim)
        mine, theirs = pool(page_format, dim, page_size), pool(page_format, dim, page_size)
        turned = rotary(qkv[:, : HEADS + KV_HEADS], cos[at], sin[at])
        rotate_append(kernels(isa, 2), qkv, RotaryTables(cos, sin), mine.layers[1], batch)
        largest = turned.abs().amax(-1, keepdim=True)
        assert ((qkv[:, : HEADS + KV_HEADS] - turned).abs() <= 2**-23 * largest).all()  # one rounding more or less
        keys, values = qkv[:, HEADS:-KV_HEADS], qkv[:, HEADS + KV_HEADS :]
        append_pages(theirs.layers[1], keys, values, page, at % page_size)
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize("page_format", TOKEN_FORMATS, ids=str)
@pytest.mark.parametrize(("num_rows", "dim", "page_size"), [(1, 80, 16), (63, 16, 5), (257, 64, 16)])
def test_bytes_are_torchs(page_format: PageFormat, num_rows: int, dim: int, page_size: int) -> None:
    check_bytes(page_format, num_rows, dim, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("page_format", TOKEN_FORMATS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 63, 257])
@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("page_size", [5, 16])
def test_bytes_are_torchs_at_all_sizes(page_format: PageFormat, num_rows: int, dim: int, page_size: int) -> None:
    check_bytes(page_format, num_rows, dim, page_size)


def expect_tails(layer: LayerPages, rows: torch.Tensor, table: list[int], tail: int, start: int, end: int) -> None:
    """Store what is to be there after the chunk from `start` to `end` of a sequence: `rows` [tokens, 2 Hk, D]."""
    size = layer.keys.payload.shape[2]
    first = end // size * size  # of the page that is open then
    for side, part in ((layer.keys, rows[:, :KV_HEADS]), (layer.values, rows[:, KV_HEADS:])):
        rounded = quantise(part, FP16).elements.transpose(0, 1)  # [Hk, tokens, D]
        for index in range(start // size, end // size):
            tokens = rounded[:, index * size : (index + 1) * size].float()
            side.store(torch.tensor([table[index]]), quantise(tokens[None], side.format))
        assert side.tails is not None
        if start <= first < end:
            side.tails[tail] = 0
        side.tails[tail, :, max(first, start) - first : end - first] = rounded[:, max(first, start) : end]


def check_tails(page_format: PageFormat, ends: list[int], dim: int, page_size: int) -> None:
    """A sequence in chunks that end there, beside single rows of another."""
    rows, tables, tails = many_sizes(ends[-1], dim), [torch.randperm(60).tolist(), [61, 63, 62, 60]], [3, 5]
    other = many_sizes(len(ends), dim)
    for isa in ISAS:
        mine, theirs = pool(page_format, dim, page_size), pool(page_format, dim, page_size)
        start = 0
        for step, end in enumerate(ends):
            qkv = torch.cat((rows[start:end], other[step : step + 1]))
            batch, loaded = sequences([(start, end - start), (step, 1)], tables, tails), kernels(isa, 2)
            rotate_append(loaded, qkv, unturned(ends[-1], dim), mine.layers[1], batch)
            compiled_attention(loaded, qkv[:, :HEADS], mine.layers[1], batch, 1.0)
            expect_tails(theirs.layers[1], rows[:end, HEADS:], tables[0], tails[0], start, end)
            expect_tails(theirs.layers[1], other[: step + 1, HEADS:], tables[1], tails[1], step, step + 1)
            assert_same_bytes(mine, theirs)
            start = end


@pytest.mark.parametrize("page_format", TAIL_FORMATS, ids=str)
@pytest.mark.parametrize(("dim", "page_size"), [(80, 5), (16, 16)])
def test_pages_are_sealed_once_and_the_rest_waits(page_format: PageFormat, dim: int, page_size: int) -> None:
    check_tails(page_format, [1, 2, page_size - 1, page_size, page_size + 2, 37], dim, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("page_format", TAIL_FORMATS, ids=str)
@pytest.mark.parametrize("ends", [list(range(1, 35)), [16, 32, 48], [64], [3, 15, 31, 33, 129, 130]], ids=str)
@pytest.mark.parametrize(("dim", "page_size"), [(16, 5), (64, 16), (80, 5)])
def test_tails_at_all_sizes(page_format: PageFormat, ends: list[int], dim: int, page_size: int) -> None:
    check_tails(page_format, ends[: 4 * page_size - 1], dim, page_size)


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_odd_channels_are_stored_as_torch_does(page_format: PageFormat) -> None:
    """Of zeros, of one number, with one outlier, too small for fp16's scales, and nearly too large for them."""
    rows = torch.randn(32, HEADS + 2 * KV_HEADS, 16, generator=torch.Generator().manual_seed(3))
    rows[..., 0], rows[..., 1], rows[..., 2], rows[7, :, 3] = 0, 3.7, -3.7, 1e4
    rows[..., 4], rows[..., 5], rows[..., 6] = rows[..., 4] * 1e-9, rows[..., 5] * 6e-6, rows[..., 6].sign() * 65504
    for isa in ISAS:
        mine, theirs = pool(page_format, 16), pool(page_format, 16)
        rotate_append(kernels(isa), rows.clone(), unturned(32, 16), mine.layers[0], sequences([(0, 32)], [[3, 9]]))
        if page_format.has_tails:
            expect_tails(theirs.layers[0], rows[:, HEADS:], [3, 9], 0, 0, 32)
        else:
            at = torch.arange(32)
            page = torch.tensor([3, 9])[at // 16]
            append_pages(theirs.layers[0], rows[:, HEADS:-KV_HEADS], rows[:, -KV_HEADS:], page, at % 16)
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e9, -1e9])
def test_what_a_format_cannot_hold_is_stored_as_torch_does(page_format: PageFormat, bad: float) -> None:
    for isa in ISAS:
        qkv = torch.ones(16, HEADS + 2 * KV_HEADS, 16)
        qkv[:, HEADS + KV_HEADS :, 5] = -0.0
        qkv[4, HEADS + KV_HEADS, 3] = bad
        mine, theirs = pool(page_format, 16), pool(page_format, 16)
        keys, values = qkv[:, HEADS:-KV_HEADS].clone(), qkv[:, -KV_HEADS:].clone()
        batch = sequences([(0, 16)], [[3]])
        rotate_append(kernels(isa), qkv, unturned(16, 16), mine.layers[0], batch)
        if page_format.has_tails:
            expect_tails(theirs.layers[0], torch.cat((keys, values), dim=1), [3], 0, 0, 16)
        else:
            append_pages(theirs.layers[0], keys, values, torch.full((16,), 3), torch.arange(16))
        assert_same_bytes(mine, theirs)


@each_isa
def test_queries_and_keys_are_normed_first(isa: Isa) -> None:
    qkv = torch.randn(7, HEADS + 2 * KV_HEADS, 32)
    q_norm, k_norm = torch.rand(2, 32)
    cos, sin = rotary_table(torch.rand(16), 10)
    normed = torch.cat((rms_norm(qkv[:, :HEADS], q_norm, 1e-5), rms_norm(qkv[:, HEADS:-KV_HEADS], k_norm, 1e-5)), 1)
    expected = torch.cat((rotary(normed, cos[:7], sin[:7]), qkv[:, -KV_HEADS:]), 1)
    tables = RotaryTables(cos, sin, q_norm, k_norm, 1e-5)
    rotate_append(kernels(isa), qkv, tables, pool(PageFormat.parse("fp32"), 32).layers[0], sequences([(0, 7)], [[0]]))
    torch.testing.assert_close(qkv, expected, atol=2e-6, rtol=2e-6)
