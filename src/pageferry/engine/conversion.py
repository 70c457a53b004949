"""Pages of a 16- or 32-bit pool in the format of another pool, converted as they are read."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pageferry.core.formats import TensorFormat
from pageferry.core.layout import TAIL_FORMAT, CacheLayout, PageKey, Place
from pageferry.core.page_io import PageRun, PageSource
from pageferry.engine.copies import read_by_page
from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.quantise import Stored, quantise


class FloatPages(Protocol):
    """Pools whose pages hold plain numbers."""

    layout: CacheLayout
    layers: tuple[LayerPages, ...]  # of the model


class ConvertedPages:
    """A `PageSource` over other pools' pages; its `layout` is the one converted to.

    `read` may be called from any thread, for pages that it holds. It takes one side of one layer at a time, which is
    too little work for torch to wake its other threads.
    """

    def __init__(self, pages: FloatPages, layout: CacheLayout) -> None:
        assert pages.layout.ships_to(layout), "what is quantised is not converted"
        self.layout = layout
        self._pages = pages

    def read(self, key: PageKey, place: Place, first_layer: int, num_layers: int) -> bytes:
        """The layer range's bytes as those of page `key`: payload, then scales, then zero points."""
        self.layout.of(key)
        target = TAIL_FORMAT if key.is_tail else self.layout.format
        layers = self.layout.groups[place.group].layers[first_layer : first_layer + num_layers]
        stored = [
            self._quantise(side.payload[place.page].float(), format_)
            for layer in (self._pages.layers[number] for number in layers)
            for side, format_ in ((layer.keys, target.k), (layer.values, target.v))
        ]
        elements = _bytes(part.elements for part in stored)
        scales = _bytes(part.scales for part in stored if part.scales is not None)
        return elements + scales + _bytes(part.zeros for part in stored if part.zeros is not None)

    def read_into(self, run: PageRun, buffer: memoryview) -> Sequence[int]:
        return read_by_page(self.read, run, buffer)

    def converted(self, layout: CacheLayout) -> PageSource:
        return ConvertedPages(self._pages, layout)

    def _quantise(self, x: Tensor, format_: TensorFormat) -> Stored:
        if self.layout.format.has_tails:
            x = quantise(x, TAIL_FORMAT.k).elements.float()
        return quantise(x, format_)


def _bytes(tensors: Iterable[Tensor]) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
