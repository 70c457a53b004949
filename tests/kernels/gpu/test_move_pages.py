"""Gathered ranges are what the pool reads, and scattering puts them back and touches nothing else."""

import pytest
import torch
from gpu_pages import on_device
from page_pools import FORMATS, TAIL_FORMATS, layout

from pageferry.core.formats import PageFormat
from pageferry.core.pool import PageId
from pageferry.engine.pages import PageTensors
from pageferry.kernels.gpu.move_pages import gather_pages, scatter_pages

NUM_PAGES = 63


def pools(page_format: PageFormat, dim: int, device: str) -> tuple[PageTensors, PageTensors]:
    """(on the processor, on the device) with the same random bytes."""
    pages = PageTensors(layout(page_format, num_layers=3, heads=3, dim=dim), [NUM_PAGES], num_tails=1)
    pages.pools[0].memory.random_(0, 256)
    return pages, on_device(pages, device)


@pytest.mark.parametrize("page_format", (*FORMATS, *TAIL_FORMATS), ids=str)
@pytest.mark.parametrize("dim", [2, 80])
@pytest.mark.parametrize(("first_layer", "num_layers"), [(0, 3), (1, 1)])
@pytest.mark.parametrize("count", [1, pytest.param(31, marks=pytest.mark.slow)])
def test_gather(page_format: PageFormat, dim: int, first_layer: int, num_layers: int, count: int, device: str) -> None:
    pages, moved = pools(page_format, dim, device)
    taken = torch.randperm(NUM_PAGES)[:count]
    ranges = pages.layout.pages[0].ranges(first_layer, num_layers)
    buffer = gather_pages(moved.pools[0].memory, taken.to(device), ranges)
    for row, page in zip(buffer.cpu(), taken.tolist(), strict=True):
        assert row.numpy().tobytes() == pages.pools[0].read(PageId(page), first_layer, num_layers)


@pytest.mark.parametrize("page_format", (*FORMATS, *TAIL_FORMATS), ids=str)
@pytest.mark.parametrize("count", [31])
def test_scatter(page_format: PageFormat, count: int, device: str) -> None:
    pages, source = pools(page_format, 80, device)
    expected = PageTensors(pages.layout, [NUM_PAGES], num_tails=1).pools[0]
    expected.memory.fill_(0xFF)
    target = expected.memory.to(device, copy=True)
    taken, placed = torch.randperm(NUM_PAGES)[:count], torch.randperm(NUM_PAGES)[:count]
    ranges = pages.layout.pages[0].ranges(1, 2)
    buffer = gather_pages(source.pools[0].memory, taken.to(device), ranges)
    scatter_pages(target, placed.to(device), ranges, buffer)
    for old, new in zip(taken.tolist(), placed.tolist(), strict=True):
        expected.write(PageId(new), 1, 2, pages.pools[0].read(PageId(old), 1, 2))
    assert torch.equal(target.cpu(), expected.memory)


def test_ranges_outside_a_page_are_refused(device: str) -> None:
    _, moved = pools(FORMATS[0], 2, device)
    page = torch.zeros(1, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match="inside a page of"):
        gather_pages(moved.pools[0].memory, page, [(0, moved.layout.pages[0].page_bytes + 64)])
    with pytest.raises(ValueError, match="buffer"):
        scatter_pages(moved.pools[0].memory, page, [(0, 64)], torch.zeros(1, 65, dtype=torch.uint8, device=device))
