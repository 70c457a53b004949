"""The pool's bytes: ranges of layers, blanks, copies, and refusals of what does not fit."""

import pytest
import torch
from page_pools import FORMATS, layout, poisoned, stored

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.layout import PageFormat, PageLayout
from pageferry.core.pool import PageId
from pageferry.engine.pages import PageTensors
from pageferry.kernels.append_pages import append_pages

ONE, TWO = PageId(1), PageId(2)


def filled(of: PageLayout, seed: int) -> PageTensors:
    """Pages of which every slot holds a token."""
    torch.manual_seed(seed)
    pages = poisoned(of, 3)
    places = torch.arange(3 * of.page_size)
    for layer in pages.layers:
        keys, values = torch.randn(2, len(places), of.num_kv_heads, of.head_dim)
        append_pages(layer, keys, values, places // of.page_size, places % of.page_size)
    return pages


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_pages_travel_layer_range_by_layer_range(page_format: PageFormat, dim: int) -> None:
    shape = layout(page_format, num_layers=5, heads=3, dim=dim)
    source, target = filled(shape, 1), poisoned(shape, 3)
    for first, count in ((0, 2), (2, 1), (3, 2)):
        target.write(TWO, first, count, source.read(ONE, first, count))
    assert target.read(TWO, 0, 5) == source.read(ONE, 0, 5)
    for layer in range(5):
        assert torch.equal(stored(target, layer)[2], stored(source, layer)[1])
    assert set(target.read(PageId(0), 0, 5)) == set(target.read(ONE, 0, 5)) == {0xFF}


@pytest.mark.parametrize("page_format", FORMATS)
def test_the_layout_is_the_one_that_is_promised(page_format: PageFormat) -> None:
    """Payload [layer][K|V][head][token][dim], then scales, each part at a multiple of 64 bytes."""
    shape = layout(page_format, num_layers=3)
    pages = filled(shape, 2)
    layer, side, head, slot = 2, 1, 1, 7
    row = ((layer * 2 + side) * 2 + head) * 16 + slot
    size = page_format.element_bytes * 8
    whole = bytes(pages.layers[0].payload.untyped_storage())[shape.page_bytes : 2 * shape.page_bytes]
    expected = pages.layers[layer].payload[1, side, head, slot].contiguous().view(torch.uint8)
    assert whole[row * size : (row + 1) * size] == bytes(expected.tolist())
    assert shape.page_bytes % 64 == shape.scale_offset % 64 == 0
    if page_format.scale_bytes:
        scale = whole[shape.scale_offset + 2 * row :][:2]
        scales = pages.layers[layer].scales
        assert scales is not None
        assert scale == bytes(scales[1, side, head, slot : slot + 1].view(torch.uint8).tolist())


@pytest.mark.parametrize("page_format", FORMATS)
def test_blank_pages_are_zero_with_scale_one(page_format: PageFormat) -> None:
    pages = poisoned(layout(page_format), 3)
    pages.blank([PageId(0), TWO])
    for layer in pages.layers:
        assert not layer.payload[[0, 2]].any()
        assert layer.scales is None or (layer.scales[[0, 2]] == 1).all()
    assert set(pages.read(ONE, 0, 2)) == {0xFF}


def test_a_copy_takes_every_byte() -> None:
    pages = filled(layout(PageFormat.INT8), 3)
    before = pages.read(ONE, 0, 2)
    pages.copy(ONE, TWO)
    assert pages.read(TWO, 0, 2) == pages.read(ONE, 0, 2) == before


def test_what_does_not_fit_is_refused() -> None:
    pages = filled(layout(PageFormat.INT8), 4)
    whole = pages.read(ONE, 0, 2)
    with pytest.raises(InvalidArgumentError, match=f"has {len(whole) - 1} bytes, must have {len(whole)}"):
        pages.write(ONE, 0, 2, whole[:-1])
    for first, count in ((0, 3), (-1, 1), (2, 1), (0, 0)):
        with pytest.raises(InvalidArgumentError, match="outside the model's 2"):
            pages.read(ONE, first, count)
    with pytest.raises(InvalidArgumentError, match="page 3 is outside the pool of 3"):
        pages.write(PageId(3), 0, 2, whole)
    assert pages.read(ONE, 0, 2) == whole
