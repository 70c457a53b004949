"""The pool's bytes: ranges of layers, blanks, copies, and refusals of what does not fit."""

import pytest
import torch
from page_pools import FORMATS, POISON, TAIL_FORMATS, layout, poisoned, stored

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.pool import PageId
from pageferry.engine.pages import PageTensors
from pageferry.kernels.quantise import quantise

ALL_FORMATS = (*FORMATS, *TAIL_FORMATS)
ZERO, ONE, TWO = (Place(0, PageId(page)) for page in range(3))
KEY = PageKey(0, 0)
TAIL, TAIL_KEY = Place(0, PageId(1), is_tail=True), PageKey(0, 0, is_tail=True)


def filled(of: CacheLayout, seed: int) -> PageTensors:
    """Pages and tails of which every slot holds a token."""
    torch.manual_seed(seed)
    pages = poisoned(of, 3)
    for layer in pages.layers:
        x = torch.randn(2, 3, of.num_kv_heads, of.page_size, of.head_dim)
        for side, numbers in zip((layer.keys, layer.values), x, strict=True):
            halves = numbers.half()
            side.store(torch.arange(3), quantise(halves.float() if of.tails else numbers, side.format))
            if side.tails is not None:
                side.tails[:3] = halves
    return pages


@pytest.mark.parametrize("page_format", ALL_FORMATS, ids=str)
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_pages_travel_layer_range_by_layer_range(page_format: PageFormat, dim: int) -> None:
    shape = layout(page_format, num_layers=5, heads=3, dim=dim)
    source, target = filled(shape, 1), poisoned(shape, 3)
    for first, count in ((0, 2), (2, 1), (3, 2)):
        target.write(TWO, first, count, source.read(KEY, ONE, first, count))
    assert target.read(KEY, TWO, 0, 5) == source.read(KEY, ONE, 0, 5)
    for layer in range(5):
        assert torch.equal(stored(target, layer)[2], stored(source, layer)[1])
    assert set(target.read(KEY, ZERO, 0, 5)) == set(target.read(KEY, ONE, 0, 5)) == {POISON}


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_the_layout_is_the_one_that_is_promised(page_format: PageFormat) -> None:
    """Payload [layer][K|V][head][token][dim], then scales, then zero points, each at a multiple of 64 bytes."""
    pages = filled(layout(page_format, num_layers=3), 2)
    shape = pages.layout.pages[0]
    layer, head, slot = 2, 1, 7
    whole = bytes(pages.pools[0].memory[1].numpy())
    sides = (pages.layers[layer].keys, pages.layers[layer].values)
    offset = 0
    for part, widths in (
        ("payload", [side.format.row_bytes(8) for side in sides]),
        ("scales", [side.format.scale_bytes(1, 0) for side in sides]),
        ("zeros", [side.format.zero_bytes(1, 0) for side in sides]),
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


@pytest.mark.parametrize("page_format", ALL_FORMATS, ids=str)
def test_factors_per_channel_follow_the_payload(page_format: PageFormat) -> None:
    """Of each layer K's, then V's: [head][dim] where they are per channel, [head][token] where not."""
    pages = filled(layout(page_format, num_layers=3), 2)
    shape, layer = pages.layout.pages[0], pages.layers[2]
    for part, index, start in (("scales", 1, shape.scale_offset), ("zeros", 2, shape.zero_offset)):
        widths = [shape.side_bytes(side.format)[index] for side in (layer.keys, layer.values)]
        start += 2 * sum(widths)
        for side, width in zip((layer.keys, layer.values), widths, strict=True):
            stored_factors = getattr(side, part)
            assert (stored_factors is None) == (width == 0)
            if stored_factors is not None:
                found = pages.pools[0].memory[1, start : start + width]
                assert torch.equal(found.view(torch.float16), stored_factors[1].reshape(-1))
            start += width


@pytest.mark.parametrize("page_format", ALL_FORMATS, ids=str)
def test_blank_pages_are_zero_with_scale_one(page_format: PageFormat) -> None:
    pages = poisoned(layout(page_format), 3)
    pages.blank([ZERO, TWO])
    for layer in pages.layers:
        for side in (layer.keys, layer.values):
            assert not side.payload[[0, 2]].any()
            assert side.scales is None or (side.scales[[0, 2]] == 1).all()
            assert side.zeros is None or not side.zeros[[0, 2]].any()
    assert set(pages.read(KEY, ONE, 0, 2)) == {POISON}


def test_a_copy_takes_every_byte() -> None:
    pages = filled(layout(PageFormat.parse("int8")), 3)
    before = pages.read(KEY, ONE, 0, 2)
    pages.copy(ONE, TWO)
    assert pages.read(KEY, TWO, 0, 2) == pages.read(KEY, ONE, 0, 2) == before


def test_groups_have_pools_of_their_own() -> None:
    """Page 1 of one group is not page 1 of the other; a tail is a third; layers count from the group's first."""
    groups = (CacheGroup((0, 2, 3), 20), CacheGroup((1, 4)))
    pages = filled(layout(PageFormat.parse("int8:channel"), groups=groups), 5)
    assert [(layer.group, layer.window) for layer in pages.layers] == [(0, 20), (1, None), (0, 20), (0, 20), (1, None)]
    other = Place(1, PageId(1))
    whole = pages.read(PageKey(1, 0), other, 0, 2)
    assert whole[: len(whole) // 2] != pages.read(KEY, ONE, 0, 1)
    for place, layer, view in (
        (ONE, 2, pages.layers[3].keys.payload),
        (other, 1, pages.layers[4].keys.payload),
        (TAIL, 1, pages.layers[2].keys.tails),
        (Place(1, PageId(1), is_tail=True), 0, pages.layers[1].keys.tails),
    ):
        key = PageKey(place.group, 0, place.is_tail)
        assert view is not None
        assert pages.read(key, place, layer, 1).startswith(view[1].contiguous().numpy().tobytes())
        payload = bytes(len(pages.read(key, place, layer, 1)))
        pages.write(place, layer, 1, payload)
        assert not view[1].any()
    with pytest.raises(InvalidArgumentError, match="group is 2, must be below 2"):
        pages.write(Place(2, PageId(0)), 0, 1, b"")


def test_what_does_not_fit_is_refused() -> None:
    pages = filled(layout(PageFormat.parse("int8")), 4)
    whole = pages.read(KEY, ONE, 0, 2)
    with pytest.raises(InvalidArgumentError, match=f"has {len(whole) - 1} bytes, must have {len(whole)}"):
        pages.write(ONE, 0, 2, whole[:-1])
    for first, count in ((0, 3), (-1, 1), (2, 1), (0, 0)):
        with pytest.raises(InvalidArgumentError, match="outside the page's 2"):
            pages.read(KEY, ONE, first, count)
    with pytest.raises(InvalidArgumentError, match="page 3 is outside the pool of 3"):
        pages.write(Place(0, PageId(3)), 0, 2, whole)
    with pytest.raises(InvalidArgumentError, match="must be below 0, the number of groups with tails"):
        pages.write(TAIL, 0, 2, whole)
    assert pages.read(KEY, ONE, 0, 2) == whole


@pytest.mark.parametrize("ours", ["fp32", "bf16", "fp16", "k=fp16,v=fp32"])
@pytest.mark.parametrize("page_format", ALL_FORMATS, ids=str)
def test_converted_pages_are_what_the_other_pool_would_have_stored(page_format: PageFormat, ours: str) -> None:
    source = filled(layout(PageFormat.parse(ours), num_layers=5), 6)
    expected = poisoned(layout(page_format, num_layers=5), 3)
    for plain, layer in zip(source.layers, expected.layers, strict=True):
        for held, side in ((plain.keys, layer.keys), (plain.values, layer.values)):
            halves = held.payload.half()
            side.store(
                torch.arange(3), quantise((halves if page_format.has_tails else held.payload).float(), side.format)
            )
            if side.tails is not None:
                side.tails[:3] = halves
    converted = source.converted(expected.layout)
    if expected.layout == source.layout:
        assert converted is source
    assert converted.layout == expected.layout
    for first, count in ((0, 5), (0, 2), (4, 1)):
        assert converted.read(KEY, ONE, first, count) == expected.read(KEY, ONE, first, count)
        if page_format.has_tails:
            assert converted.read(TAIL_KEY, ONE, first, count) == expected.read(TAIL_KEY, TAIL, first, count)


def test_layers_of_a_group_are_converted_by_their_numbers_in_it() -> None:
    groups = (CacheGroup((0, 2), 20), CacheGroup((1, 3)))
    source = filled(layout(PageFormat.parse("bf16"), groups=groups), 7)
    converted = source.converted(layout(PageFormat.parse("fp32"), groups=groups))
    expected = source.layers[3].keys.payload[2].float().contiguous().numpy().tobytes()
    assert converted.read(PageKey(1, 0), Place(1, PageId(2)), 1, 1).startswith(expected)


def test_what_is_quantised_is_not_converted() -> None:
    pages = filled(layout(PageFormat.parse("int8")), 7)
    assert pages.converted(pages.layout) is pages
    with pytest.raises(AssertionError, match="not converted"):
        pages.converted(layout(PageFormat.parse("int4")))
