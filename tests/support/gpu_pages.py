"""Pools of pages on the device that kernels are tested on."""

import torch

from pageferry.engine.pages import PageTensors


def on_device(pages: PageTensors, device: str) -> PageTensors:
    """The pool itself on a processor, else a copy of it, with views of the same layout."""
    if device == "cpu":
        return pages
    moved = PageTensors(pages.layout, pages.num_pages)
    moved._memory = pages._memory.to(device)
    moved.layers = tuple(moved._layer(layer) for layer in range(pages.layout.num_layers))
    return moved


def memory(pages: PageTensors) -> torch.Tensor:
    """All bytes of the pool, [num_pages, page_bytes]."""
    return pages._memory
