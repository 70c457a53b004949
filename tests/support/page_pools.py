"""Pools whose every byte is poison until something is written, and layouts for them."""

import torch

from pageferry.core.layout import PageFormat, PageLayout
from pageferry.engine.pages import PageTensors

# As fp32, bf16 and fp16 these bytes are NaN; as int8 they are -1.
POISON = 0xFF
FORMATS = tuple(PageFormat)
# Largest error of a stored number, relative to the largest of its vector: half a step of bf16 (8 bits of mantissa), and
# of int8 (127 steps) plus what rounding the scale to fp16 adds. Below fp16's normal numbers the latter is absolute.
TOLERANCE = {PageFormat.FP32: 0.0, PageFormat.BF16: 2**-8, PageFormat.INT8: 0.5 / 127 + 2**-10}

TINY_SCALE_ERROR = 127 * 2**-25


def layout(page_format: PageFormat, *, num_layers: int = 2, heads: int = 2, dim: int = 8) -> PageLayout:
    return PageLayout("tested", page_format, 16, num_layers, heads, dim)


def poisoned(of: PageLayout, num_pages: int) -> PageTensors:
    pages = PageTensors(of, num_pages)
    pages.layers[0].payload.untyped_storage().fill_(POISON)
    return pages


def stored(pages: PageTensors, layer: int) -> torch.Tensor:
    """[num_pages, 2, Hk, B, D] fp32: what a reader takes the layer's bytes to mean."""
    views = pages.layers[layer]
    payload = views.payload.float()
    return payload if views.scales is None else payload * views.scales.float()[..., None]
