"""How a page's bytes are laid out, and how two workers tell whether they agree.

A page holds `page_size` tokens of all layers: payload `[layer][K|V][kv_head][token][dim]`, then scales
`[layer][K|V][kv_head][token]` fp16 where the format has them, each part starting at a multiple of 64 bytes. Unused
slots are zero with scale 1. A layer range of a page is therefore at most two byte ranges.
"""

import hashlib
from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol

from pageferry.core.errors import FailedPreconditionError, invalid
from pageferry.core.pool import PageId

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
_ALIGN = 64


class PageFormat(Enum):
    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"

    @property
    def element_bytes(self) -> int:
        return {"fp32": 4, "bf16": 2, "int8": 1}[self.value]

    @property
    def scale_bytes(self) -> int:
        """Bytes of scale per token and KV head."""
        return 2 if self is PageFormat.INT8 else 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of a pool's pages; workers may hand over where all fields are equal."""

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
        layer_bytes = self.payload_layer_bytes + self.scale_layer_bytes
        if layer_bytes > MAX_FRAME_BYTES:
            limit = (
                f"but one layer of a page is then {layer_bytes} bytes, and a frame carries at most {MAX_FRAME_BYTES}"
            )
            raise invalid("page_size", self.page_size, limit)

    @property
    def payload_layer_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.page_size * self.head_dim * self.format.element_bytes

    @property
    def scale_layer_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.page_size * self.format.scale_bytes

    @property
    def scale_offset(self) -> int:
        """Where the scales begin in a page."""
        return _aligned(self.num_layers * self.payload_layer_bytes)

    @property
    def page_bytes(self) -> int:
        return self.scale_offset + _aligned(self.num_layers * self.scale_layer_bytes)

    @property
    def layers_per_frame(self) -> int:
        """Most layers whose payload and scales fit into one frame."""
        return min(self.num_layers, MAX_FRAME_BYTES // (self.payload_layer_bytes + self.scale_layer_bytes))

    def ranges(self, first_layer: int, num_layers: int) -> tuple[tuple[int, int], ...]:
        """(offset, length) in the page of a layer range's payload, then of its scales."""
        payload = (first_layer * self.payload_layer_bytes, num_layers * self.payload_layer_bytes)
        if not self.scale_layer_bytes:
            return (payload,)
        start = self.scale_offset + first_layer * self.scale_layer_bytes
        return (payload, (start, num_layers * self.scale_layer_bytes))

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

    def check_equal(self, other: "PageLayout", *, ours: str, theirs: str) -> None:
        """Raise FailedPreconditionError naming each field that differs with both values."""
        values = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        differences = [
            f"{name} {_text(our)} ({ours}) and {_text(their)} ({theirs})" for name, our, their in values if our != their
        ]
        if differences:
            raise FailedPreconditionError("page layouts differ: " + "; ".join(differences), reason="LAYOUT_MISMATCH")


def _text(value: object) -> str:
    return value.value if isinstance(value, PageFormat) else str(value)


class PageSource(Protocol):
    """Where pages are read from; any thread may call, for pages it holds a reference to."""

    layout: PageLayout

    def read(self, page: PageId, first_layer: int, num_layers: int) -> bytes:
        """A copy of the layer range's bytes, payload then scales."""
        ...


class PageSink(Protocol):
    """Where pages are written to; any thread may call, for pages it holds a reference to."""

    layout: PageLayout

    def write(self, page: PageId, first_layer: int, num_layers: int, payload: bytes) -> None:
        """Copy a layer range's bytes, as `PageSource.read` gave them, into the page."""
        ...
