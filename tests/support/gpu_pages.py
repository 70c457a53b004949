"""Pools of pages on the device that kernels are tested on."""

import torch

from pageferry.engine.gpu_pages import DevicePages
from pageferry.engine.pages import PageTensors


def on_device(pages: PageTensors, device: str) -> PageTensors:
    """A copy of the pools."""
    num_tails = len(pages.tails[0].memory) if pages.tails else 0
    moved = DevicePages(pages.layout, [len(pool.memory) for pool in pages.pools], num_tails, torch.device(device))
    for source, target in zip((*pages.pools, *pages.tails), (*moved.pools, *moved.tails), strict=True):
        target.memory.copy_(source.memory)
    return moved
