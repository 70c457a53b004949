"""In which numbers a page keeps keys and values, and how that is written: `int8`, or `k=int8,v=int4:asym`.

Elements and bits:
* fp32, bf16, fp16: the number itself.
* fp8_e4m3: x = element · scale.
* int8, int4: symmetric, x = q · scale, or asymmetric, x = q · scale + zero, with unsigned q. Two int4 share a byte, the
  even index in its low half; symmetric ones are two's complement.
Scales and zero points are fp16, one each per token and KV head (`token`), or per channel and KV head of a page
(`channel`). Where K or V is scaled per channel, a sequence's last page is kept in fp16, both K and V, until it is full
and quantised once: its *tail*.
"""

from dataclasses import dataclass
from enum import Enum

from pageferry.core.errors import InvalidArgumentError, invalid

FACTOR_BYTES = 2  # of a scale or a zero point


class Element(Enum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        return {"fp32": 32, "bf16": 16, "fp16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}[self.value]

    @property
    def is_integer(self) -> bool:
        return self in (Element.INT8, Element.INT4)

    @property
    def is_scaled(self) -> bool:
        return self.bits <= 8


class Granularity(Enum):
    """Which numbers share a scale."""

    TOKEN = "token"  # those of one token and KV head
    CHANNEL = "channel"  # those of one channel within a page


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """How keys, or values, are stored."""

    element: Element
    granularity: Granularity = Granularity.TOKEN
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.granularity is Granularity.CHANNEL and not self.element.is_scaled:
            raise invalid("page_format", f"{self.element.value}:channel", "but plain numbers have no scales")
        if not (self.symmetric or self.element.is_integer):
            raise invalid("page_format", f"{self.element.value}:asym", "but only int8 and int4 have zero points")

    def __str__(self) -> str:
        channel = ":channel" if self.is_per_channel else ""
        return self.element.value + channel + ("" if self.symmetric else ":asym")

    @property
    def is_per_channel(self) -> bool:
        return self.granularity is Granularity.CHANNEL

    def scale_bytes(self, page_size: int, head_dim: int) -> int:
        """Bytes of scales of one KV head of a page."""
        num_factors = head_dim if self.is_per_channel else page_size
        return FACTOR_BYTES * num_factors if self.element.is_scaled else 0

    def zero_bytes(self, page_size: int, head_dim: int) -> int:
        """Bytes of zero points of one KV head of a page."""
        return 0 if self.symmetric else self.scale_bytes(page_size, head_dim)

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one head's elements of one token."""
        return head_dim * self.element.bits // 8


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How keys and how values are stored; as a text, what `parse` reads."""

    k: TensorFormat
    v: TensorFormat

    @classmethod
    def parse(cls, text: str) -> "PageFormat":
        """Read `FORMAT` or `k=FORMAT,v=FORMAT`; InvalidArgumentError says what is wrong."""
        sides: dict[str, TensorFormat] = {}
        parts = [part.strip() for part in text.split(",")]
        if len(parts) == 1 and "=" not in text:
            both = _parse_side(parts[0], text)
            return cls(both, both)
        for part in parts:
            name, _, spec = part.partition("=")
            if name not in ("k", "v") or name in sides:
                raise _malformed(text)
            sides[name] = _parse_side(spec, text)
        if len(sides) != 2:
            raise _malformed(text)
        return cls(**sides)

    def __str__(self) -> str:
        return str(self.k) if self.k == self.v else f"k={self.k},v={self.v}"

    @property
    def has_tails(self) -> bool:
        """Whether a sequence's last page stays in fp16 until it is full."""
        return self.k.is_per_channel or self.v.is_per_channel

    @property
    def is_convertible(self) -> bool:
        """Whether pages can be handed over in any other format: nothing in them is quantised."""
        return not (self.k.element.is_scaled or self.v.element.is_scaled)


def _parse_side(spec: str, text: str) -> TensorFormat:
    name, *qualifiers = spec.split(":")
    elements = {element.value: element for element in Element}
    if name not in elements:
        raise invalid("page_format", text, f"must be one of {', '.join(elements)}, or k=FORMAT,v=FORMAT of these")
    kinds = [qualifier for qualifier in qualifiers if qualifier in ("sym", "asym")]
    granularities = [qualifier for qualifier in qualifiers if qualifier in ("token", "channel")]
    if len(kinds) > 1 or len(granularities) > 1 or len(kinds) + len(granularities) != len(qualifiers):
        limit = "must have at most one of :token and :channel, and one of :sym and :asym, behind each format"
        raise invalid("page_format", text, limit)
    return TensorFormat(elements[name], Granularity(*(granularities or ["token"])), kinds != ["asym"])


def _malformed(text: str) -> InvalidArgumentError:
    return invalid("page_format", text, "must be FORMAT, or k=FORMAT,v=FORMAT")
