"""How pages' bytes are laid out, and how two workers tell whether they agree.

A page holds `page_size` tokens of one cache group's layers: payload `[layer][K|V][kv_head][token][dim]`, then scales
and then zero points, of those of K and V whose format has them: `[layer][K|V][kv_head][token]`, or `[dim]` where they
are per channel, fp16 each. Each part starts at a multiple of 64 bytes. Unused slots are zero with scale 1. A layer
range of a page is at most three byte ranges.
"""

import hashlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple

from pageferry.core.errors import FailedPreconditionError, invalid
from pageferry.core.formats import Element, PageFormat, TensorFormat
from pageferry.core.groups import CacheGroup, groups_text
from pageferry.core.pool import PageId

PROTOCOL_VERSION = 1
HEAD_DIM_MULTIPLE = 16  # of what the compiled kernels take
MAX_FRAME_BYTES = 1 << 20
TAIL_FORMAT = PageFormat.parse("fp16")
_ALIGN = 64


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class PageLayout:
    """The bytes of one pool's pages."""

    format: PageFormat
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("page_size", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise invalid(name, getattr(self, name), "must be at least 1")
        self._check_elements()
        if self.layer_bytes > MAX_FRAME_BYTES:
            limit = (
                f"but one layer of a page is then {self.layer_bytes} bytes, and a frame carries at most "
                f"{MAX_FRAME_BYTES}"
            )
            raise invalid("page_size", self.page_size, limit)

    def _check_elements(self) -> None:
        """Whether elements fill bytes, and K and V begin at multiples of their elements in every layer."""
        for side in (self.format.k, self.format.v):
            if side.element is Element.INT4 and self.head_dim % 2:
                raise invalid("head_dim", self.head_dim, "must be a multiple of 2 for int4, which has 2 to a byte")
            width = max(1, side.element.bits // 8)
            if self.k_layer_bytes % width or self.payload_layer_bytes % width:
                parts = f"{self.k_layer_bytes} bytes of K and {self.payload_layer_bytes - self.k_layer_bytes} of V"
                limit = f"but a layer's {parts} must be multiples of {width}, the bytes of {side.element.value}"
                raise invalid("page_size", self.page_size, limit)

    def side_bytes(self, side: TensorFormat) -> tuple[int, int, int]:
        """Bytes of elements, scales and zero points of one layer's K, or V, of that format."""
        elements = self.num_kv_heads * self.page_size * side.row_bytes(self.head_dim)
        scales = self.num_kv_heads * side.scale_bytes(self.page_size, self.head_dim)
        return elements, scales, self.num_kv_heads * side.zero_bytes(self.page_size, self.head_dim)

    @cached_property
    def k_layer_bytes(self) -> int:
        """Bytes of one layer's K elements, which V's follow."""
        return self.side_bytes(self.format.k)[0]

    @cached_property
    def payload_layer_bytes(self) -> int:
        return self.k_layer_bytes + self.side_bytes(self.format.v)[0]

    @cached_property
    def scale_layer_bytes(self) -> int:
        return self.side_bytes(self.format.k)[1] + self.side_bytes(self.format.v)[1]

    @cached_property
    def zero_layer_bytes(self) -> int:
        return self.side_bytes(self.format.k)[2] + self.side_bytes(self.format.v)[2]

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a page, without padding."""
        return self.payload_layer_bytes + self.scale_layer_bytes + self.zero_layer_bytes

    @cached_property
    def scale_offset(self) -> int:
        """Where the scales begin in a page."""
        return _aligned(self.num_layers * self.payload_layer_bytes)

    @cached_property
    def zero_offset(self) -> int:
        """Where the zero points begin in a page."""
        return self.scale_offset + _aligned(self.num_layers * self.scale_layer_bytes)

    @cached_property
    def page_bytes(self) -> int:
        return self.zero_offset + _aligned(self.num_layers * self.zero_layer_bytes)

    @property
    def layers_per_frame(self) -> int:
        """Most layers whose elements, scales and zero points fit into one frame."""
        return min(self.num_layers, MAX_FRAME_BYTES // self.layer_bytes)

    def ranges(self, first_layer: int, num_layers: int) -> tuple[tuple[int, int], ...]:
        """(offset, length) in the page of a layer range's payload, then of its scales, then of its zero points."""
        parts = (
            (0, self.payload_layer_bytes),
            (self.scale_offset, self.scale_layer_bytes),
            (self.zero_offset, self.zero_layer_bytes),
        )
        return tuple(
            (start + first_layer * layer_bytes, num_layers * layer_bytes) for start, layer_bytes in parts if layer_bytes
        )

    def frames(self) -> tuple[tuple[int, int], ...]:
        """(first_layer, num_layers) of the frames that carry a page."""
        step = self.layers_per_frame
        return tuple((layer, min(step, self.num_layers - layer)) for layer in range(0, self.num_layers, step))


class PageKey(NamedTuple):
    """Which of a sequence's pages: as a hand-off names it."""

    group: int
    index: int  # type: ignore[assignment]  # in the group's page table; hides a method of tuples
    is_tail: bool = False  # the last page, not full, in fp16

    def __str__(self) -> str:
        return f"{'tail' if self.is_tail else 'page'} {self.index} of group {self.group}"


class Place(NamedTuple):
    """Where a page's bytes lie: in the pool of a cache group, or in the pool of its tails."""

    group: int
    page: PageId
    is_tail: bool = False


@dataclass(frozen=True)
class CacheLayout:
    """The layout of all that a worker caches; workers may hand over where all fields are equal, or see `ships_to`.

    Each cache group has a pool of pages, and where the format has tails one of those.
    """

    fingerprint: str
    format: PageFormat
    page_size: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[CacheGroup, ...]
    version: int = PROTOCOL_VERSION
    pages: tuple[PageLayout, ...] = field(init=False, compare=False, repr=False)  # of each group
    tails: tuple[PageLayout, ...] = field(init=False, compare=False, repr=False)  # of each group, or empty

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))):
            raise invalid("groups", groups_text(self.groups), "must hold every layer, from 0, once")
        pages = tuple(
            PageLayout(self.format, self.page_size, len(group.layers), self.num_kv_heads, self.head_dim)
            for group in self.groups
        )
        tails = tuple(replace(layout, format=TAIL_FORMAT) for layout in pages) if self.format.has_tails else ()
        object.__setattr__(self, "pages", pages)
        object.__setattr__(self, "tails", tails)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def of(self, place: PageKey | Place) -> PageLayout:
        """The layout of the page there; InvalidArgumentError where there is no such group, or no tails."""
        layouts = self.tails if place.is_tail else self.pages
        if not 0 <= place.group < len(layouts):
            what = "tails" if place.is_tail else "pages"
            raise invalid("group", place.group, f"must be below {len(layouts)}, the number of groups with {what}")
        return layouts[place.group]

    def num_pages(self, num_tokens: int) -> int:
        """Of a page table."""
        return -(-num_tokens // self.page_size)

    def ships_to(self, other: "CacheLayout") -> bool:
        """Whether a sender of these pages can fill the other's: they are equal, or it can convert its format."""
        pairs = zip(self._values, other._values, strict=True)
        is_same_shape = all(ours == theirs for ours, theirs in pairs if ours[0] != "format")
        return is_same_shape and (self.format == other.format or self.format.is_convertible)

    def check_ships_to(self, other: "CacheLayout", *, ours: str, theirs: str) -> None:
        """Raise FailedPreconditionError naming each field that differs with both values, unless `ships_to`."""
        if not self.ships_to(other):
            self.check_equal(other, ours=ours, theirs=theirs)

    def check_equal(self, other: "CacheLayout", *, ours: str, theirs: str) -> None:
        """Raise FailedPreconditionError naming each field that differs with both values."""
        pairs = zip(self._values, other._values, strict=True)
        differences = [
            f"{name} {our} ({ours}) and {their} ({theirs})" for (name, our), (_, their) in pairs if our != their
        ]
        if differences:
            raise FailedPreconditionError("page layouts differ: " + "; ".join(differences), reason="LAYOUT_MISMATCH")

    @cached_property  # since routers ask for each request
    def cache_key(self) -> bytes:
        """What the prefix cache mixes into its hashes, so that pages of another kind never match."""
        text = "/".join(f"{name}={value}" for name, value in self._values)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @cached_property  # since routers ask at every change of a load
    def _values(self) -> list[tuple[str, str]]:
        """Name and text of each field that counts."""
        values = [(item.name, getattr(self, item.name)) for item in fields(self) if item.compare]
        return [(name, groups_text(value) if name == "groups" else str(value)) for name, value in values]
