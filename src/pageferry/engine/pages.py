"""The pool's memory: pages as bytes to the transport, and as tensors to the kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import TensorFormat
from pageferry.core.layout import PageLayout, PageSource
from pageferry.core.pool import PageId
from pageferry.engine.conversion import ConvertedPages
from pageferry.kernels.append_pages import LayerPages, SidePages
from pageferry.kernels.quantise import storage_dtype


class PageTensors:
    """All pages in one buffer [num_pages, page_bytes]; both `PageSource` and `PageSink`.

    `read` and `write` are copies that take no part in torch: any thread may call them for pages that it holds and no
    other thread touches. All else is for the engine's thread.
    """

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        # Zeros come from the system without being written: memory is taken as pages are first used.
        self._memory = torch.zeros((num_pages, layout.page_bytes), dtype=torch.uint8)
        self._bytes = self._memory.numpy().reshape(-1).data
        self.layers = tuple(self._layer(layer) for layer in range(layout.num_layers))
        self._blank = self._blank_page()

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def read(self, page: PageId, first_layer: int, num_layers: int) -> bytes:
        """A copy of the layer range's bytes: payload, then scales, then zero points."""
        return b"".join([self._bytes[start:end] for start, end in self._spans(page, first_layer, num_layers)])

    def write(self, page: PageId, first_layer: int, num_layers: int, payload: bytes) -> None:
        """Copy a layer range's bytes into the page; InvalidArgumentError unless exactly that many are given."""
        spans = self._spans(page, first_layer, num_layers)
        expected = sum(end - start for start, end in spans)
        if len(payload) != expected:
            raise InvalidArgumentError(
                f"payload of {num_layers} layers has {len(payload)} bytes, must have {expected}", reason="BAD_FRAME"
            )
        view, offset = memoryview(payload), 0
        for start, end in spans:
            self._bytes[start:end] = view[offset : offset + end - start]
            offset += end - start

    def converted(self, layout: PageLayout) -> PageSource:
        """The same pages as a pool of that layout holds them, for a `layout` that this one's `ships_to`."""
        return self if layout == self.layout else ConvertedPages(self, layout)

    def blank(self, pages: Sequence[PageId]) -> None:
        """Make every slot unused: zero, with scale 1 and zero point 0."""
        self._memory[torch.tensor(pages, dtype=torch.long)] = self._blank

    def copy(self, source: PageId, target: PageId) -> None:
        self._memory[target].copy_(self._memory[source])

    def _spans(self, page: PageId, first_layer: int, num_layers: int) -> list[tuple[int, int]]:
        """Start and end in the buffer of a layer range's payload, scales and zero points."""
        if not 0 <= page < self.num_pages:
            raise InvalidArgumentError(f"page {page} is outside the pool of {self.num_pages}", reason="BAD_FRAME")
        if not 0 <= first_layer < first_layer + num_layers <= self.layout.num_layers:
            raise InvalidArgumentError(
                f"layers {first_layer} to {first_layer + num_layers} are outside the model's {self.layout.num_layers}",
                reason="BAD_FRAME",
            )
        base = page * self.layout.page_bytes
        ranges = self.layout.ranges(first_layer, num_layers)
        return [(base + offset, base + offset + length) for offset, length in ranges]

    def _layer(self, layer: int) -> LayerPages:
        layout, k = self.layout, self.layout.format.k
        starts = (
            layer * layout.payload_layer_bytes,
            layout.scale_offset + layer * layout.scale_layer_bytes,
            layout.zero_offset + layer * layout.zero_layer_bytes,
        )
        taken = (layout.k_layer_bytes, layout.num_vectors * k.scale_bytes, layout.num_vectors * k.zero_bytes)
        ends = [start + length for start, length in zip(starts, taken, strict=True)]
        return LayerPages(self._side(k, starts), self._side(layout.format.v, ends))

    def _side(self, side: TensorFormat, offsets: Sequence[int]) -> SidePages:
        """K or V of a layer, whose elements, scales and zero points begin there in each page."""
        inner, dtype = (self.layout.num_kv_heads, self.layout.page_size), storage_dtype(side)
        width = side.row_bytes(self.layout.head_dim) // dtype.itemsize
        return SidePages(
            side,
            self._view(dtype, offsets[0], (*inner, width)),
            self._view(torch.float16, offsets[1], inner) if side.scale_bytes else None,
            self._view(torch.float16, offsets[2], inner) if side.zero_bytes else None,
        )

    def _view(self, dtype: torch.dtype, offset: int, inner: tuple[int, ...]) -> Tensor:
        """[num_pages, *inner] of `dtype` that begins `offset` bytes into each page."""
        typed = self._memory.view(dtype)
        strides, size = [], 1
        for length in reversed(inner):
            strides.append(size)
            size *= length
        width = dtype.itemsize
        return typed.as_strided(
            (self.num_pages, *inner), (self.layout.page_bytes // width, *reversed(strides)), offset // width
        )

    def _blank_page(self) -> Tensor:
        page = torch.zeros(self.layout.page_bytes, dtype=torch.uint8)
        start, num_bytes = self.layout.scale_offset, self.layout.num_layers * self.layout.scale_layer_bytes
        if num_bytes:
            page[start : start + num_bytes].view(torch.float16).fill_(1)
        return page
