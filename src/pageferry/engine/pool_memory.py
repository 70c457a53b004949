"""One pool's memory: its pages as bytes, and as tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import TensorFormat
from pageferry.core.layout import PageLayout
from pageferry.core.page_io import Buffer, PageRun, Written
from pageferry.core.pool import PageId
from pageferry.engine.copies import written
from pageferry.kernels.append_pages import SidePages
from pageferry.kernels.copy_pages import read_pages, write_pages
from pageferry.kernels.quantise import storage_dtype


class PoolMemory:
    """All pages of a pool in one buffer, `memory` [num_pages, page_bytes].

    What reads and writes takes no part in torch: any thread may call it for pages that it holds and no other thread
    touches. All else is for the engine's thread.
    """

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self.layout = layout
        # Written here, so that the process has its size from the start, and no step waits for memory.
        self.memory = torch.zeros((num_pages, layout.page_bytes), dtype=torch.uint8)
        self._bytes = self.memory.numpy().reshape(-1).data
        self._blank = self._blank_page()

    def read(self, page: PageId, first_layer: int, num_layers: int) -> bytes:
        return b"".join([self._bytes[start:end] for start, end in self._spans(page, first_layer, num_layers)])

    def write(self, page: PageId, first_layer: int, num_layers: int, payload: bytes) -> None:
        view, offset = memoryview(payload), 0
        for start, end in self._spans_of(page, first_layer, num_layers, payload):
            self._bytes[start:end] = view[offset : offset + end - start]
            offset += end - start

    def read_into(self, run: PageRun, buffer: memoryview) -> Sequence[int]:
        ranges = self._ranges(run, buffer)
        return read_pages(self._bytes, self._starts(run.pages), ranges, buffer, run.offsets)

    def write_from(self, run: PageRun, buffer: Buffer) -> Written:
        ranges = self._ranges(run, buffer)
        return written(write_pages(self._bytes, self._starts(run.pages), ranges, buffer, run.offsets))

    def blank(self, pages: Sequence[PageId]) -> None:
        self.memory[torch.tensor(pages, dtype=torch.long)] = self._blank

    def copy(self, source: PageId, target: PageId) -> None:
        self.memory[target].copy_(self.memory[source])

    def sides(self, layer: int) -> tuple[SidePages, SidePages]:
        """Keys and values of a layer."""
        layout, k = self.layout, self.layout.format.k
        starts = (
            layer * layout.payload_layer_bytes,
            layout.scale_offset + layer * layout.scale_layer_bytes,
            layout.zero_offset + layer * layout.zero_layer_bytes,
        )
        ends = [start + length for start, length in zip(starts, layout.side_bytes(k), strict=True)]
        return self._side(k, starts), self._side(layout.format.v, ends)

    def _side(self, side: TensorFormat, offsets: Sequence[int]) -> SidePages:
        """K or V of a layer, whose elements, scales and zero points begin there in each page."""
        layout, dtype = self.layout, storage_dtype(side)
        width = side.row_bytes(layout.head_dim) // dtype.itemsize
        factors = (layout.num_kv_heads, layout.head_dim if side.is_per_channel else layout.page_size)
        return SidePages(
            side,
            self._view(dtype, offsets[0], (layout.num_kv_heads, layout.page_size, width)),
            self._view(torch.float16, offsets[1], factors) if side.element.is_scaled else None,
            None if side.symmetric else self._view(torch.float16, offsets[2], factors),
        )

    def _view(self, dtype: torch.dtype, offset: int, inner: tuple[int, ...]) -> Tensor:
        """[num_pages, *inner] of `dtype` that begins `offset` bytes into each page."""
        typed = self.memory.view(dtype)
        strides, size = [], 1
        for length in reversed(inner):
            strides.append(size)
            size *= length
        width = dtype.itemsize
        return typed.as_strided(
            (len(typed), *inner), (self.layout.page_bytes // width, *reversed(strides)), offset // width
        )

    def _spans(self, page: PageId, first_layer: int, num_layers: int) -> list[tuple[int, int]]:
        """Start and end in the buffer of a layer range's payload, scales and zero points."""
        self._check_layers(first_layer, num_layers)
        (base,) = self._starts([page])
        ranges = self.layout.ranges(first_layer, num_layers)
        return [(base + offset, base + offset + length) for offset, length in ranges]

    def _starts(self, pages: Sequence[PageId]) -> list[int]:
        """Where pages begin in the buffer."""
        num_pages = len(self.memory)
        for page in pages:
            if not 0 <= page < num_pages:
                raise InvalidArgumentError(f"page {page} is outside the pool of {num_pages}", reason="BAD_FRAME")
        page_bytes = self.layout.page_bytes
        return [page * page_bytes for page in pages]

    def _ranges(self, run: PageRun, buffer: Buffer) -> tuple[tuple[int, int], ...]:
        """Of the run's layers in a page; InvalidArgumentError unless the run lies in the buffer."""
        self._check_layers(run.first_layer, run.num_layers)
        last = len(buffer) - run.num_layers * self.layout.layer_bytes
        if len(run.offsets) != len(run.pages) or not 0 <= min(run.offsets) <= max(run.offsets) <= last:
            raise InvalidArgumentError(f"the run is outside the buffer of {len(buffer)} bytes", reason="BAD_FRAME")
        return self.layout.ranges(run.first_layer, run.num_layers)

    def _check_layers(self, first_layer: int, num_layers: int) -> None:
        if not 0 <= first_layer < first_layer + num_layers <= self.layout.num_layers:
            raise InvalidArgumentError(
                f"layers {first_layer} to {first_layer + num_layers} are outside the page's {self.layout.num_layers}",
                reason="BAD_FRAME",
            )

    def _spans_of(self, page: PageId, first_layer: int, num_layers: int, payload: bytes) -> list[tuple[int, int]]:
        """Where the payload goes; InvalidArgumentError unless it is as long."""
        spans = self._spans(page, first_layer, num_layers)
        expected = sum(end - start for start, end in spans)
        if len(payload) != expected:
            raise InvalidArgumentError(
                f"payload of {num_layers} layers has {len(payload)} bytes, must have {expected}", reason="BAD_FRAME"
            )
        return spans

    def _blank_page(self) -> Tensor:
        page = torch.zeros(self.layout.page_bytes, dtype=torch.uint8)
        start, num_bytes = self.layout.scale_offset, self.layout.num_layers * self.layout.scale_layer_bytes
        if num_bytes:
            page[start : start + num_bytes].view(torch.float16).fill_(1)
        return page
