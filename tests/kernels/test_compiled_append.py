"""Rotation and storing, compiled: the bytes that torch stores, and nothing beside them."""

import pytest
import torch
from compiled import FORMATS, each_isa, kernels, needs_library, sequences
from page_pools import poisoned

from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageLayout
from pageferry.core.pool import PageId
from pageferry.engine.pages import PageTensors
from pageferry.kernels.append_pages import RotaryTables, append_pages, rotate_append
from pageferry.kernels.cpu_library import Isa
from pageferry.kernels.rms_norm import rms_norm
from pageferry.kernels.rotary import rotary, rotary_table

pytestmark = needs_library
HEADS, KV_HEADS = 5, 2


def pool(page_format: PageFormat, dim: int) -> PageTensors:
    return poisoned(PageLayout("tested", page_format, 16, 2, KV_HEADS, dim), 20)


def content(pages: PageTensors) -> bytes:
    return b"".join(pages.read(PageId(page), 0, 2) for page in range(pages.num_pages))


@each_isa
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 63, 257])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_bytes_are_torchs(isa: Isa, page_format: PageFormat, num_rows: int, dim: int) -> None:
    """Keys and values from subnormal scales to such as overflow, zeros among them; two threads share the rows."""
    torch.manual_seed(num_rows)
    tables = [[4, 1, 9, 2, 11, 3, 5, 8, 7, 6, 10, 0, 12, 13, 14, 15, 16], [17, 19]]
    batch = sequences([(7, num_rows), (18, 1)], tables)
    sizes = torch.logspace(-9, 7, num_rows + 1)
    qkv = torch.randn(num_rows + 1, HEADS + 2 * KV_HEADS, dim) * sizes[torch.randperm(num_rows + 1)][:, None, None]
    qkv[0, -1] = 0
    cos, sin = rotary_table(torch.rand(dim // 2), 300)
    mine, theirs = pool(page_format, dim), pool(page_format, dim)
    at = batch.positions.long()
    turned = rotary(qkv[:, : HEADS + KV_HEADS], cos[at], sin[at])
    owner = torch.tensor([0] * num_rows + [1])
    page = torch.tensor([tables[owner[i]][position // 16] for i, position in enumerate(at.tolist())])
    rotate_append(kernels(isa, 2), qkv, RotaryTables(cos, sin), mine.layers[1], batch)
    largest = turned.abs().amax(-1, keepdim=True)
    assert ((qkv[:, : HEADS + KV_HEADS] - turned).abs() <= 2**-23 * largest).all()  # one rounding more or less
    append_pages(theirs.layers[1], qkv[:, HEADS:-KV_HEADS], qkv[:, HEADS + KV_HEADS :], page, at % 16)
    assert content(mine) == content(theirs)


@each_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_what_int8_cannot_hold_is_stored_as_torch_does(isa: Isa, bad: float) -> None:
    qkv = torch.ones(1, HEADS + 2 * KV_HEADS, 16)
    qkv[0, HEADS + KV_HEADS, 3] = bad
    cos, sin = rotary_table(torch.rand(8), 4)
    mine, theirs = pool(PageFormat.parse("int8"), 16), pool(PageFormat.parse("int8"), 16)
    rotate_append(kernels(isa), qkv, RotaryTables(cos, sin), mine.layers[0], sequences([(0, 1)], [[3]]))
    keys, values = qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]
    append_pages(theirs.layers[0], keys, values, torch.tensor([3]), torch.tensor([0]))
    assert content(mine) == content(theirs)


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
