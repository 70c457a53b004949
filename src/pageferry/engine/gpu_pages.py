"""Pools of pages in a device's memory, which go to and from the host through pinned buffers."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock

import torch
from torch import Tensor

from pageferry.core.layout import CacheLayout, PageKey, PageLayout, Place
from pageferry.core.page_io import Buffer, PageRun, PageSource, Written
from pageferry.core.pool import PageId
from pageferry.engine.conversion import ConvertedPages
from pageferry.engine.copies import read_by_page, write_by_page
from pageferry.engine.device_times import DeviceTimes, device_name
from pageferry.engine.pages import PageTensors
from pageferry.engine.pool_memory import PoolMemory


class Staging:
    """A pinned buffer and a stream of its own, on which byte ranges are copied: beside the model's steps, not behind.

    Any thread may call; one copy is made at a time. On a processor, plain memory and plain copies.
    """

    def __init__(self, device: torch.device, num_bytes: int, times: DeviceTimes | None = None) -> None:
        """`times` measures the copies."""
        self.times = times
        is_cuda = device.type == "cuda"
        self._device = device
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._bytes = self._buffer.numpy().data
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._changed = torch.cuda.Event() if is_cuda else None
        self._lock = Lock()

    def read(self, memory: Tensor, spans: Iterable[tuple[int, int]]) -> bytes:
        """The bytes from each start to each end of flat `memory`, one after the other."""
        with self._lock:
            offset = 0
            with self._copying():
                for start, end in spans:
                    part = self._buffer[offset : offset + end - start]
                    part.copy_(memory[start:end], non_blocking=True)
                    offset += end - start
            return bytes(self._bytes[:offset])

    def write(self, memory: Tensor, spans: Iterable[tuple[int, int]], payload: bytes) -> None:
        """Copy the payload's bytes to where `read` would have them from; they are there on return."""
        with self._lock:
            self._bytes[: len(payload)] = payload
            offset = 0
            with self._copying():
                for start, end in spans:
                    part = self._buffer[offset : offset + end - start]
                    memory[start:end].copy_(part, non_blocking=True)
                    offset += end - start

    def changed(self) -> None:
        """Pages have been blanked or copied on the current stream: later reads and writes come after it."""
        if self._changed is not None:
            self._changed.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._stream is None or self._changed is None:
            with self._measured():
                yield
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._changed)
                with self._measured():
                    yield
            self._stream.synchronize()
        if self.times is not None:
            self.times.take()

    def _measured(self) -> AbstractContextManager[None]:
        return self.times.measured() if self.times is not None else nullcontext()


class DeviceMemory(PoolMemory):
    """A pool whose buffer is on a device. A step's writes must be over before a page of them is read."""

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device, staging: Staging) -> None:
        self.layout = layout
        self.memory = torch.zeros((num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
        self._flat = self.memory.view(-1)
        self._blank = self._blank_page().to(device)
        self._staging = staging

    def read(self, page: PageId, first_layer: int, num_layers: int) -> bytes:
        return self._staging.read(self._flat, self._spans(page, first_layer, num_layers))

    def write(self, page: PageId, first_layer: int, num_layers: int, payload: bytes) -> None:
        self._staging.write(self._flat, self._spans_of(page, first_layer, num_layers, payload), payload)

    def read_into(self, run: PageRun, buffer: memoryview) -> Sequence[int]:
        return read_by_page(lambda _, place, *layers: self.read(place.page, *layers), run, buffer)

    def write_from(self, run: PageRun, buffer: Buffer) -> Written:
        return write_by_page(lambda place, *rest: self.write(place.page, *rest), self.layout, run, buffer)

    def blank(self, pages: Sequence[PageId]) -> None:
        super().blank(pages)
        self._staging.changed()

    def copy(self, source: PageId, target: PageId) -> None:
        super().copy(source, target)
        self._staging.changed()


class DevicePages(PageTensors):
    """`PageTensors` on a device."""

    def __init__(self, layout: CacheLayout, num_pages: Sequence[int], num_tails: int, device: torch.device) -> None:
        self.device = device
        largest = max(pages.page_bytes for pages in (*layout.pages, *layout.tails))
        self._staging = Staging(device, largest, DeviceTimes.of(device))
        super().__init__(layout, num_pages, num_tails)

    @property
    def device_name(self) -> str:
        return device_name(self.device)

    @property
    def copied_s(self) -> float | None:
        times = self._staging.times
        return times.total_s if times is not None else None

    def converted(self, layout: CacheLayout) -> PageSource:
        return self if layout == self.layout else ConvertedOnHost(self, layout)

    def _pool_memory(self, layout: PageLayout, num_pages: int) -> PoolMemory:
        return DeviceMemory(layout, num_pages, self.device, self._staging)


class ConvertedOnHost:
    """As `ConvertedPages`, of pages on a device: each is copied to the host as it is, and converted there."""

    def __init__(self, pages: DevicePages, layout: CacheLayout) -> None:
        self.layout = layout
        self._pages = pages
        self._host = PageTensors(pages.layout, [1] * len(pages.layout.groups), num_tails=1)
        self._converted = ConvertedPages(self._host, layout)
        self._lock = Lock()

    def read(self, key: PageKey, place: Place, first_layer: int, num_layers: int) -> bytes:
        as_stored = key._replace(is_tail=place.is_tail)
        here = place._replace(page=PageId(0))
        with self._lock:
            self._host.write(here, first_layer, num_layers, self._pages.read(as_stored, place, first_layer, num_layers))
            return self._converted.read(key, here, first_layer, num_layers)

    def read_into(self, run: PageRun, buffer: memoryview) -> Sequence[int]:
        return read_by_page(self.read, run, buffer)

    def converted(self, layout: CacheLayout) -> PageSource:
        return self._pages.converted(layout)
