"""What is checked of a page's bytes before they are written."""

import struct

import pytest
from crc32c import crc32c

from pageferry.core.errors import DataLossError, InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group
from pageferry.core.layout import CacheLayout
from pageferry.runtime.frames import check_payload
from pageferry.v1.page_pb2 import PageFrame

FIRST_LAYER, NUM_LAYERS = 2, 3


def layout(text: str) -> CacheLayout:
    return CacheLayout("f" * 32, PageFormat.parse(text), 4, num_kv_heads=2, head_dim=8, groups=(full_group(6),))


def check(text: str, part: int = 0, index: int = 0, value: float = 0.0) -> None:
    """A frame whose scales are 1 and whose zero points are 0, but for one of its `part` (1: scales, 2: zero points)."""
    lengths = [length for _, length in layout(text).pages[0].ranges(FIRST_LAYER, NUM_LAYERS)]
    parts = [bytearray(length) for length in lengths]
    if len(parts) > 1:
        parts[1][:] = struct.pack("<e", 1.0) * (lengths[1] // 2)
    if part:
        struct.pack_into("<e", parts[part], index * 2, value)
    payload = b"".join(parts)
    frame = PageFrame(page_index=7, first_layer=FIRST_LAYER, num_layers=NUM_LAYERS, crc32c=crc32c(payload))
    check_payload(frame, payload, layout(text))


@pytest.mark.parametrize(
    "text", ["fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int4", "k=bf16,v=int4:asym", "int4:channel:asym"]
)
def test_good_pages_pass(text: str) -> None:
    check(text)


@pytest.mark.parametrize("value", [6e-8, 1.0, 65504.0])
def test_any_finite_positive_scale_passes(value: float) -> None:
    check("int8", 1, 5, value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, -0.0])
@pytest.mark.parametrize(
    ("text", "in_layer"),
    [("int8", 16), ("fp8_e4m3", 16), ("int4:asym", 16), ("k=int4,v=bf16", 8), ("int8:channel", 32)],
)
def test_a_scale_that_is_not_finite_and_positive_is_refused(text: str, in_layer: int, value: float) -> None:
    for index, layer in ((0, 2), (in_layer - 1, 2), (in_layer, 3), (3 * in_layer - 1, 4)):
        with pytest.raises(
            DataLossError, match=rf"page 7 of group 0, layer {layer}: a scale is .*, must be finite and positive"
        ):
            check(text, 1, index, value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_zero_point_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(DataLossError, match=r"page 7 of group 0, layer 3: a zero point is .*, must be finite"):
        check("int8:asym", 2, 16, value)
    check("int8:asym", 2, 16, -65504.0)


def test_a_payload_without_its_scales_is_refused() -> None:
    one = layout("int8")
    payload = bytes(NUM_LAYERS * one.pages[0].payload_layer_bytes)
    frame = PageFrame(first_layer=FIRST_LAYER, num_layers=NUM_LAYERS, crc32c=crc32c(payload))
    with pytest.raises(InvalidArgumentError, match="must be 480 bytes for 3 layers"):
        check_payload(frame, payload, one)
