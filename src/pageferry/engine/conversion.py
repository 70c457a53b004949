"""Pages of a 16- or 32-bit pool in the format of another pool, converted as they are read."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from pageferry.core.layout import PageLayout, PageSource
from pageferry.core.pool import PageId
from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.quantise import quantise


class FloatPages(Protocol):
    """A pool whose pages hold plain numbers."""

    layout: PageLayout
    layers: tuple[LayerPages, ...]


class ConvertedPages:
    """A `PageSource` over another pool's pages; its `layout` is the one converted to.

    `read` may be called from any thread, for pages that it holds. It takes one side of one layer at a time, which is
    too little work for torch to wake its other threads.
    """

    def __init__(self, pages: FloatPages, layout: PageLayout) -> None:
        assert pages.layout.ships_to(layout), "what is quantised is not converted"
        self.layout = layout
        self._pages = pages

    def read(self, page: PageId, first_layer: int, num_layers: int) -> bytes:
        """The layer range's bytes: payload, then scales, then zero points."""
        formats = (self.layout.format.k, self.layout.format.v)
        stored = [
            quantise(side.payload[page].float(), target)
            for layer in self._pages.layers[first_layer : first_layer + num_layers]
            for side, target in zip((layer.keys, layer.values), formats, strict=True)
        ]
        elements = _bytes(part.elements for part in stored)
        scales = _bytes(part.scales for part in stored if part.scales is not None)
        return elements + scales + _bytes(part.zeros for part in stored if part.zeros is not None)

    def converted(self, layout: PageLayout) -> PageSource:
        return ConvertedPages(self._pages, layout)


def _bytes(tensors: Iterable[Tensor]) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
