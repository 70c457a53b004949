"""The pool's memory: pages as bytes to the transport, and as tensors to the kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.layout import PageFormat, PageLayout
from pageferry.core.pool import PageId
from pageferry.kernels.append_pages import LayerPages

_DTYPES = {PageFormat.FP32: torch.float32, PageFormat.BF16: torch.bfloat16, PageFormat.INT8: torch.int8}


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
        """A copy of the layer range's bytes, payload then scales."""
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

    def blank(self, pages: Sequence[PageId]) -> None:
        """Make every slot unused: zero, with scale 1."""
        self._memory[torch.tensor(pages, dtype=torch.long)] = self._blank

    def copy(self, source: PageId, target: PageId) -> None:
        self._memory[target].copy_(self._memory[source])

    def _spans(self, page: PageId, first_layer: int, num_layers: int) -> list[tuple[int, int]]:
        """Start and end in the buffer of a layer range's payload, then of its scales."""
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
        layout = self.layout
        inner = (2, layout.num_kv_heads, layout.page_size)
        payload = self._view(_DTYPES[layout.format], layer * layout.payload_layer_bytes, (*inner, layout.head_dim))
        if not layout.scale_layer_bytes:
            return LayerPages(payload, None)
        offset = layout.scale_offset + layer * layout.scale_layer_bytes
        return LayerPages(payload, self._view(torch.float16, offset, inner))

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
        if self.layout.scale_layer_bytes:
            start = self.layout.scale_offset
            page[start : start + self.layout.num_layers * self.layout.scale_layer_bytes].view(torch.float16).fill_(1)
        return page
