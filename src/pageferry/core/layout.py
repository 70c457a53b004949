"""How a page's bytes are laid out, and how two workers tell whether they agree.

A page holds `page_size` tokens of all layers: payload `[layer][K|V][kv_head][token][dim]`, then scales and then zero
points, `[layer][K|V][kv_head][token]` fp16 each, of those of K and V whose format has them; each part starts at a
multiple of 64 bytes. Unused slots are zero with scale 1. A layer range of a page is at most three byte ranges.
"""

import hashlib
from dataclasses import dataclass, fields
from typing import Protocol

from pageferry.core.errors import FailedPreconditionError, invalid
from pageferry.core.formats import Element, PageFormat
from pageferry.core.pool import PageId

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
_ALIGN = 64


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of a pool's pages; workers may hand over where all fields are equal, or see `ships_to`."""

    fingerprint: str
    format: PageFormat
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    version: int = PROTOCOL_VERSION

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

    @property
    def num_vectors(self) -> int:
        """Of K, or of V, in one layer of a page."""
        return self.num_kv_heads * self.page_size

    @property
    def k_layer_bytes(self) -> int:
        """Bytes of one layer's K elements, which V's follow."""
        return self.num_vectors * self.format.k.row_bytes(self.head_dim)

    @property
    def payload_layer_bytes(self) -> int:
        return self.k_layer_bytes + self.num_vectors * self.format.v.row_bytes(self.head_dim)

    @property
    def scale_layer_bytes(self) -> int:
        return self.num_vectors * (self.format.k.scale_bytes + self.format.v.scale_bytes)

    @property
    def zero_layer_bytes(self) -> int:
        return self.num_vectors * (self.format.k.zero_bytes + self.format.v.zero_bytes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a page, without padding."""
        return self.payload_layer_bytes + self.scale_layer_bytes + self.zero_layer_bytes

    @property
    def scale_offset(self) -> int:
        """Where the scales begin in a page."""
        return _aligned(self.num_layers * self.payload_layer_bytes)

    @property
    def zero_offset(self) -> int:
        """Where the zero points begin in a page."""
        return self.scale_offset + _aligned(self.num_layers * self.scale_layer_bytes)

    @property
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

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def cache_key(self) -> bytes:
        """What the prefix cache mixes into its hashes, so that pages of another kind never match."""
        text = "/".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def ships_to(self, other: "PageLayout") -> bool:
        """Whether a sender of these pages can fill the other's: they are equal, or it can convert its format."""
        others = (field.name for field in fields(self) if field.name != "format")
        is_same_shape = all(getattr(self, name) == getattr(other, name) for name in others)
        return is_same_shape and (self.format == other.format or self.format.is_convertible)

    def check_ships_to(self, other: "PageLayout", *, ours: str, theirs: str) -> None:
        """Raise FailedPreconditionError naming each field that differs with both values, unless `ships_to`."""
        if not self.ships_to(other):
            self.check_equal(other, ours=ours, theirs=theirs)

    def check_equal(self, other: "PageLayout", *, ours: str, theirs: str) -> None:
        """Raise FailedPreconditionError naming each field that differs with both values."""
        values = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        differences = [f"{name} {our} ({ours}) and {their} ({theirs})" for name, our, their in values if our != their]
        if differences:
            raise FailedPreconditionError("page layouts differ: " + "; ".join(differences), reason="LAYOUT_MISMATCH")


class PageSource(Protocol):
    """Where pages are read from; any thread may call, for pages it holds a reference to."""

    layout: PageLayout

    def read(self, page: PageId, first_layer: int, num_layers: int) -> bytes:
        """A copy of the layer range's bytes: payload, then scales, then zero points."""
        ...

    def converted(self, layout: PageLayout) -> "PageSource":
        """The same pages as a pool of that layout holds them, for a `layout` that this one's `ships_to`."""
        ...


class PageSink(Protocol):
    """Where pages are written to; any thread may call, for pages it holds a reference to."""

    layout: PageLayout

    def write(self, page: PageId, first_layer: int, num_layers: int, payload: bytes) -> None:
        """Copy a layer range's bytes, as `PageSource.read` gave them, into the page."""
        ...
