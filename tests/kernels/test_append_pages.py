"""Tokens written into poisoned pages: values, tolerances, and nothing beside them."""

import pytest
import torch
from page_pools import FORMATS, largest_error, layout, poisoned, stored

from pageferry.core.formats import PageFormat
from pageferry.core.pool import PageId
from pageferry.kernels.append_pages import append_pages


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 63, 257])
@pytest.mark.parametrize("dim", [8, 80])
def test_tokens_round_trip(page_format: PageFormat, num_tokens: int, dim: int) -> None:
    torch.manual_seed(num_tokens)
    pages = poisoned(layout(page_format, dim=dim), 40)
    places = torch.randperm(40 * 16)[:num_tokens]
    page, slot = places // 16, places % 16
    keys, values = torch.randn(2, num_tokens, 2, dim) * torch.logspace(-4, 4, num_tokens)[:, None, None]
    append_pages(pages.layers[1], keys, values, page, slot)
    for expected, side, kind in ((keys, 0, page_format.k), (values, 1, page_format.v)):
        error = (stored(pages, 1)[page, side, :, slot] - expected).abs().amax(-1)
        assert (error <= largest_error(kind, expected)).all()


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_nothing_else_is_touched(page_format: PageFormat) -> None:
    pages = poisoned(layout(page_format), 3)
    append_pages(pages.layers[0], torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.tensor([1]), torch.tensor([5]))
    everything = b"".join(pages.read(PageId(page), 0, 2) for page in range(3))
    # Keys and values of two heads; none of the bytes that 1.0 takes in any format is the poison's.
    sides = (page_format.k, page_format.v)
    num_bytes = 2 * sum(side.row_bytes(8) + side.scale_bytes + side.zero_bytes for side in sides)
    assert len(everything) - everything.count(b"\xff") == num_bytes
