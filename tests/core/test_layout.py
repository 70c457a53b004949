from dataclasses import replace

import pytest

from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group, parse_groups
from pageferry.core.layout import MAX_FRAME_BYTES, CacheLayout, PageKey, PageLayout, Place
from pageferry.core.pool import PageId

WORKER = CacheLayout("a" * 32, PageFormat.parse("int8"), 16, num_kv_heads=3, head_dim=64, groups=(full_group(30),))
SMOLLM2 = WORKER.pages[0]
ODD = PageLayout(PageFormat.parse("int8"), page_size=5, num_layers=3, num_kv_heads=1, head_dim=9)
LARGE = PageLayout(PageFormat.parse("bf16"), page_size=64, num_layers=7, num_kv_heads=8, head_dim=128)
FORMATS = ["fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int4", "int4:asym", "k=int8,v=int4:asym"]
FORMATS += ["k=int4:asym,v=fp32", "k=bf16,v=int8", "k=fp8_e4m3,v=bf16"]
FORMATS += ["int8:channel", "int4:channel:asym", "k=int8:channel,v=int4:asym"]
LAYOUTS = [*(replace(SMOLLM2, format=PageFormat.parse(text)) for text in FORMATS), ODD, LARGE]


def of(text: str) -> PageLayout:
    return replace(SMOLLM2, format=PageFormat.parse(text))


def worker(text: str) -> CacheLayout:
    return replace(WORKER, format=PageFormat.parse(text))


def test_bytes_of_a_page_in_each_format() -> None:
    num_values = 30 * 2 * 3 * 16 * 64
    num_scales = 30 * 2 * 3 * 16
    assert of("fp32").page_bytes == 4 * num_values
    assert of("bf16").page_bytes == of("fp16").page_bytes == 2 * num_values
    assert of("int8").page_bytes == of("fp8_e4m3").page_bytes == num_values + 2 * num_scales
    assert of("int8:asym").page_bytes == num_values + 4 * num_scales
    assert of("int4").page_bytes == num_values // 2 + 2 * num_scales
    assert of("int4:asym").page_bytes == num_values // 2 + 4 * num_scales
    assert of("k=int8,v=int4:asym").page_bytes == 3 * num_values // 4 + 3 * num_scales
    assert of("int8:channel").page_bytes == num_values + 2 * (30 * 2 * 3 * 64)


@pytest.mark.parametrize(("text", "most"), [("int8", 0.54), ("int4", 0.30), ("int8:asym", 0.54), ("int4:asym", 0.32)])
def test_bytes_beside_those_of_bf16(text: str, most: float) -> None:
    assert of(text).page_bytes <= most * of("bf16").page_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_parts_begin_at_multiples_of_64(layout: PageLayout) -> None:
    assert layout.scale_offset % 64 == layout.zero_offset % 64 == layout.page_bytes % 64 == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frames_carry_every_layer_once_and_fit(layout: PageLayout) -> None:
    layers = [layer for first, num in layout.frames() for layer in range(first, first + num)]
    assert layers == list(range(layout.num_layers))
    for first_layer, num_layers in layout.frames():
        assert sum(length for _, length in layout.ranges(first_layer, num_layers)) <= MAX_FRAME_BYTES


def test_a_large_page_takes_several_frames() -> None:
    assert LARGE.frames() == ((0, 4), (4, 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranges_of_all_layers_are_the_page_but_for_its_padding(layout: PageLayout) -> None:
    ranges = sorted(part for layer in range(layout.num_layers) for part in layout.ranges(layer, 1))
    gaps = [start - end for (start, _), end in zip(ranges, [0, *map(sum, ranges)], strict=False)]
    gaps.append(layout.page_bytes - sum(ranges[-1]))
    assert all(0 <= gap < 64 for gap in gaps)
    assert sum(gap > 0 for gap in gaps) <= 3
    for (offset, length), (one_offset, one_length) in zip(
        layout.ranges(0, layout.num_layers), layout.ranges(0, 1), strict=True
    ):
        assert (offset, length) == (one_offset, layout.num_layers * one_length)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (128, 8), (129, 9)])
def test_pages_of_a_prompt(num_tokens: int, num_pages: int) -> None:
    assert WORKER.num_pages(num_tokens) == num_pages


OTHERS = [
    replace(WORKER, fingerprint="d" * 32),
    replace(WORKER, format=PageFormat.parse("bf16")),
    replace(WORKER, page_size=32),
    replace(WORKER, groups=parse_groups("0-9=window:8,sinks:2;10-29=full", 30, None)),
    replace(WORKER, num_kv_heads=1),
    replace(WORKER, head_dim=32),
    replace(WORKER, version=2),
]


def test_another_layout_has_another_cache_key() -> None:
    assert len({layout.cache_key for layout in [WORKER, *OTHERS]}) == 8
    assert replace(WORKER).cache_key == WORKER.cache_key


@pytest.mark.parametrize(
    ("other", "difference"),
    list(
        zip(
            OTHERS,
            [
                f"fingerprint {'a' * 32} (P) and {'d' * 32} (D)",
                "format int8 (P) and bf16 (D)",
                "page_size 16 (P) and 32 (D)",
                "groups 0-29=full (P) and 0-9=window:8,sinks:2;10-29=full (D)",
                "num_kv_heads 3 (P) and 1 (D)",
                "head_dim 64 (P) and 32 (D)",
                "version 1 (P) and 2 (D)",
            ],
            strict=True,
        )
    ),
)
def test_a_difference_is_refused_with_both_values(other: CacheLayout, difference: str) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        WORKER.check_equal(other, ours="P", theirs="D")
    assert caught.value.message == f"page layouts differ: {difference}"
    assert caught.value.reason == "LAYOUT_MISMATCH"


@pytest.mark.parametrize("ours", ["int8", "int8:channel", "int4:asym", "k=fp16,v=int8:channel", "k=fp8_e4m3,v=bf16"])
@pytest.mark.parametrize("theirs", [*FORMATS, "int8:channel:asym", "k=fp16,v=int4:channel"])
def test_a_quantised_format_is_refused_with_both_values(ours: str, theirs: str) -> None:
    if theirs == ours:
        worker(ours).check_ships_to(worker(theirs), ours="P", theirs="D")
        return
    with pytest.raises(FailedPreconditionError) as caught:
        worker(ours).check_ships_to(worker(theirs), ours="P", theirs="D")
    assert caught.value.message == f"page layouts differ: format {ours} (P) and {theirs} (D)"


def test_plain_numbers_are_shipped_in_any_format_and_to_the_same_shape_only() -> None:
    for ours in ("fp32", "bf16", "fp16", "k=fp32,v=bf16"):
        for theirs in FORMATS:
            worker(ours).check_ships_to(worker(theirs), ours="P", theirs="D")
        for other in OTHERS:
            assert worker(ours).ships_to(other) == (other.format != WORKER.format)
    for ours in ("k=fp32,v=int8", "k=fp8_e4m3,v=bf16"):
        assert not worker(ours).ships_to(worker("int4"))
        assert worker(ours).ships_to(worker(ours))


@pytest.mark.parametrize("text", ["int4", "k=int8,v=int4:asym", "k=int4,v=fp32"])
def test_an_odd_head_size_is_refused_for_int4_with_both_numbers(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="head_dim is 81, must be a multiple of 2 for int4"):
        replace(of(text), head_dim=81)
    replace(of(text), head_dim=80)


def test_parts_that_would_be_misaligned_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"page_size is 5, but a layer's 45 bytes of K and 180 of V must be"):
        replace(ODD, format=PageFormat.parse("k=int8,v=fp32"))


def test_equal_layouts_agree_and_all_differences_are_named() -> None:
    WORKER.check_equal(replace(WORKER), ours="P", theirs="D")
    with pytest.raises(FailedPreconditionError, match=r"page_size .*; head_dim "):
        WORKER.check_equal(replace(WORKER, page_size=8, head_dim=8), ours="P", theirs="D")


@pytest.mark.parametrize("field", ["page_size", "num_layers", "num_kv_heads", "head_dim"])
def test_a_layout_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field} is 0, must be at least 1"):
        replace(SMOLLM2, **{field: 0})  # type: ignore[arg-type]


def test_a_layer_that_no_frame_can_carry_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="page_size is 1024, but one layer of a page is then 4194304 bytes"):
        replace(LARGE, page_size=1024)


def test_each_group_has_pages_and_tails_of_its_layers() -> None:
    layout = replace(worker("int8:channel"), groups=parse_groups("0-9=window:8;10-29=full", 30, None))
    assert [pages.num_layers for pages in layout.pages] == [pages.num_layers for pages in layout.tails] == [10, 20]
    assert layout.of(PageKey(1, 7)) is layout.pages[1]
    assert layout.of(Place(0, PageId(3), is_tail=True)) is layout.tails[0]
    assert layout.tails[0].page_bytes == 10 * 2 * 3 * 16 * 64 * 2
    assert layout.num_layers == 30
    for key in (PageKey(2, 0), PageKey(-1, 0)):
        with pytest.raises(InvalidArgumentError, match="must be below 2, the number of groups with pages"):
            layout.of(key)
    with pytest.raises(InvalidArgumentError, match="group is 0, must be below 0, the number of groups with tails"):
        WORKER.of(PageKey(0, 0, is_tail=True))


def test_groups_hold_every_layer_once() -> None:
    for groups in ((), (full_group(2), full_group(1)), (full_group(0),)):
        with pytest.raises(InvalidArgumentError, match="must hold every layer, from 0, once"):
            replace(WORKER, groups=groups)
