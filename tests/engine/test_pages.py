"""The pool's bytes: ranges of layers, blanks, copies, and refusals of what does not fit."""

import pytest
import torch
from page_pools import FORMATS, layout, poisoned, stored

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageLayout
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


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
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


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_the_layout_is_the_one_that_is_promised(page_format: PageFormat) -> None:
    """Payload [layer][K|V][head][token][dim], then scales, then zero points, each at a multiple of 64 bytes."""
    shape = layout(page_format, num_layers=3)
    pages = filled(shape, 2)
    layer, head, slot = 2, 1, 7
    whole = bytes(pages.layers[0].keys.payload.untyped_storage())[shape.page_bytes : 2 * shape.page_bytes]
    sides = (pages.layers[layer].keys, pages.layers[layer].values)
    offset = 0
    for part, widths in (
        ("payload", [side.format.row_bytes(8) for side in sides]),
        ("scales", [side.format.scale_bytes for side in sides]),
        ("zeros", [side.format.zero_bytes for side in sides]),
    ):
        before = [layer * sum(widths), layer * sum(widths) + widths[0]]  # in units of one side's tokens and heads
        for side, width, units in zip(sides, widths, before, strict=True):
            if not width:
                assert getattr(side, part) is None
                continue
            start = offset + 2 * 16 * units + (head * 16 + slot) * width
            expected = getattr(side, part)[1, head, slot].reshape(-1).contiguous().view(torch.uint8)
            assert whole[start : start + width] == bytes(expected.tolist())
        offset += -(-3 * 2 * 16 * sum(widths) // 64) * 64
    assert offset == shape.page_bytes == len(whole)


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_blank_pages_are_zero_with_scale_one(page_format: PageFormat) -> None:
    pages = poisoned(layout(page_format), 3)
    pages.blank([PageId(0), TWO])
    for layer in pages.layers:
        for side in (layer.keys, layer.values):
            assert not side.payload[[0, 2]].any()
            assert side.scales is None or (side.scales[[0, 2]] == 1).all()
            assert side.zeros is None or not side.zeros[[0, 2]].any()
    assert set(pages.read(ONE, 0, 2)) == {0xFF}


def test_a_copy_takes_every_byte() -> None:
    pages = filled(layout(PageFormat.parse("int8")), 3)
    before = pages.read(ONE, 0, 2)
    pages.copy(ONE, TWO)
    assert pages.read(TWO, 0, 2) == pages.read(ONE, 0, 2) == before


def test_what_does_not_fit_is_refused() -> None:
    pages = filled(layout(PageFormat.parse("int8")), 4)
    whole = pages.read(ONE, 0, 2)
    with pytest.raises(InvalidArgumentError, match=f"has {len(whole) - 1} bytes, must have {len(whole)}"):
        pages.write(ONE, 0, 2, whole[:-1])
    for first, count in ((0, 3), (-1, 1), (2, 1), (0, 0)):
        with pytest.raises(InvalidArgumentError, match="outside the model's 2"):
            pages.read(ONE, first, count)
    with pytest.raises(InvalidArgumentError, match="page 3 is outside the pool of 3"):
        pages.write(PageId(3), 0, 2, whole)
    assert pages.read(ONE, 0, 2) == whole


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_converted_pages_are_what_the_other_pool_would_have_stored(page_format: PageFormat) -> None:
    source = filled(layout(PageFormat.parse("fp32"), num_layers=5), 6)
    expected = filled(layout(page_format, num_layers=5), 6)
    converted = source.converted(expected.layout)
    assert converted.layout == expected.layout
    for first, count in ((0, 5), (0, 2), (4, 1)):
        assert converted.read(ONE, first, count) == expected.read(ONE, first, count)


def test_what_is_quantised_is_not_converted() -> None:
    pages = filled(layout(PageFormat.parse("int8")), 7)
    assert pages.converted(pages.layout) is pages
    with pytest.raises(AssertionError, match="not converted"):
        pages.converted(layout(PageFormat.parse("int4")))
