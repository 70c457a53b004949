"""Formats as texts."""

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import Element, Granularity, PageFormat, TensorFormat

INT8, INT4 = TensorFormat(Element.INT8), TensorFormat(Element.INT4)
INT4_ASYM = TensorFormat(Element.INT4, symmetric=False)
INT8_CHANNEL = TensorFormat(Element.INT8, Granularity.CHANNEL)


@pytest.mark.parametrize(
    ("text", "k", "v", "canonical"),
    [
        ("int8", INT8, INT8, "int8"),
        ("int4:asym", INT4_ASYM, INT4_ASYM, "int4:asym"),
        ("int8:token:sym", INT8, INT8, "int8"),
        ("k=int8,v=int4", INT8, INT4, "k=int8,v=int4"),
        ("v=int4:asym:token, k=int8:token", INT8, INT4_ASYM, "k=int8,v=int4:asym"),
        ("k=int4,v=int4", INT4, INT4, "int4"),
        ("k=int8:channel,v=int4", INT8_CHANNEL, INT4, "k=int8:channel,v=int4"),
        ("int8:sym:channel", INT8_CHANNEL, INT8_CHANNEL, "int8:channel"),
        ("k=fp8_e4m3,v=bf16", TensorFormat(Element.FP8_E4M3), TensorFormat(Element.BF16), "k=fp8_e4m3,v=bf16"),
    ],
)
def test_a_text_is_read_and_written(text: str, k: TensorFormat, v: TensorFormat, canonical: str) -> None:
    parsed = PageFormat.parse(text)
    assert (parsed.k, parsed.v) == (k, v)
    assert str(parsed) == canonical
    assert PageFormat.parse(canonical) == parsed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be one of fp32, bf16, fp16, fp8_e4m3, int8, int4, or k=FORMAT,v=FORMAT of these"),
        ("int5", "is 'int5', must be"),
        ("k=int8,v=", "is 'k=int8,v=', must be"),
        ("k=int8", "must be FORMAT, or k=FORMAT,v=FORMAT"),
        ("int8,int4", "must be FORMAT, or k=FORMAT,v=FORMAT"),
        ("k=int8,k=int8", "must be FORMAT, or k=FORMAT,v=FORMAT"),
        ("k=int8,v=int8,q=int8", "must be FORMAT, or k=FORMAT,v=FORMAT"),
        ("int8:page", "must have at most one of :token and :channel, and one of :sym and :asym"),
        ("int8:asym:asym", "must have at most one of"),
        ("bf16:asym", "is 'bf16:asym', but only int8 and int4 have zero points"),
        ("fp8_e4m3:asym", "but only int8 and int4 have zero points"),
        ("bf16:channel", "is 'bf16:channel', but plain numbers have no scales"),
        ("k=int8:channel:token,v=int4", "must have at most one of :token and :channel"),
    ],
)
def test_a_wrong_text_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        PageFormat.parse(text)
    assert caught.value.message.startswith("page_format is ")
    assert message in caught.value.message


@pytest.mark.parametrize(("text", "has_tails"), [("int8", False), ("k=fp16,v=int4:channel", True), ("bf16", False)])
def test_a_side_scaled_per_channel_makes_tails(text: str, has_tails: bool) -> None:
    assert PageFormat.parse(text).has_tails == has_tails
