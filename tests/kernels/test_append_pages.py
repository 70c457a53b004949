"""Tokens written into poisoned pages: values, tolerances, and nothing beside them."""

import pytest
import torch
from engines import sequence
from page_pools import FORMATS, POISON, TAIL_FORMATS, append, largest_error, layout, poisoned, stored

from pageferry.core.formats import PageFormat
from pageferry.core.plan import Chunk
from pageferry.engine.batch import BatchBuilder
from pageferry.kernels.append_pages import append_pages
from pageferry.kernels.quantise import quantise


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
    # Keys and values of two heads; none of the bytes that 1.0 takes in any format is the poison's.
    num_bytes = sum(sum(pages.layout.pages[0].side_bytes(side)) for side in (page_format.k, page_format.v)) // 16
    assert int((pages.pools[0].memory != POISON).sum()) == num_bytes


@pytest.mark.parametrize("page_format", TAIL_FORMATS, ids=str)
@pytest.mark.parametrize(("dim", "page_size"), [(8, 16), (80, 5), (96, 1)])
def test_pages_fill_from_tails_and_rows(page_format: PageFormat, dim: int, page_size: int) -> None:
    """Two sequences in one batch: one goes on in its tail over two page ends, the other's begins a tail of its own."""
    pages = poisoned(layout(page_format, dim=dim, page_size=page_size), 9)
    torch.manual_seed(dim)
    layer, builder, length = pages.layers[1], BatchBuilder(pages.layout), 2 * page_size + page_size // 2
    keys, values = torch.randn(2, 2, length, 2, dim) * torch.logspace(-3, 3, dim)
    targets = [sequence([0] * length, 3 * i, 3) for i in range(2)]
    for starts, count in (([0], page_size // 2), ([page_size // 2, 0], 0)):
        chunks = [Chunk(targets[i], start, count or length - start, samples=False) for i, start in enumerate(starts)]
        chunks = [chunk for chunk in chunks if chunk.num_tokens]
        rows = [
            torch.cat([side[i, c.start : c.start + c.num_tokens] for i, c in enumerate(chunks)])
            for side in (keys, values)
        ]
        if chunks:
            append(layer, *rows, builder.build(tuple(chunks)).places[0].targets)
    for i in range(2):
        for x, side in ((keys[i], layer.keys), (values[i], layer.values)):
            halves = x.half().transpose(0, 1)  # [Hk, tokens, D]
            for page in range(2):
                expected = quantise(halves[:, page * page_size : (page + 1) * page_size].float(), side.format)
                found = (side.payload, side.scales, side.zeros)
                for ours, theirs in zip(found, (expected.elements, expected.scales, expected.zeros), strict=True):
                    assert ours is None if theirs is None else torch.equal(ours[3 * i + page], theirs)
            num_open = page_size // 2
            if num_open:
                assert torch.equal(side.tails[3 * i, :, :num_open], halves[:, 2 * page_size :])
                assert not side.tails[3 * i, :, num_open:].any()
    assert (pages.pools[0].memory[[2, 5, 6, 7, 8]] == POISON).all()
