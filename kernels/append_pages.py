"""Write tokens' keys and values into their pages, in the pages' format.

fp32, bf16: rounded to nearest even. int8, per token and KV head, symmetric: scale s = fp16(max |x| / 127), and
q = clamp(round(x / s), -127, 127); all zeros (or too small for an fp16 scale) store q = 0, s = 1.
A vector that is not finite, or whose scale overflows fp16, stores a scale that is not finite: whoever attends to it
gets NaN, and so fails alone.
Shapes: keys, values [T, Hk, D]; pages, slots [T]; payload [num_pages, 2, Hk, B, D]; scales [num_pages, 2, Hk, B] fp16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX = 127


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's views into the pool; `scales` only where the format has them."""

    payload: Tensor  # [num_pages, 2, Hk, B, D]
    scales: Tensor | None  # [num_pages, 2, Hk, B] fp16


def append_pages(layer: LayerPages, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Token i goes to slot `slots[i]` of page `pages[i]`; no two tokens share one."""
    both = torch.stack((keys.float(), values.float()), dim=1)  # [T, 2, Hk, D]
    if layer.scales is not None:
        both, scales = quantise_int8(both)
        layer.scales[pages, :, :, slots] = scales
    layer.payload[pages, :, :, slots] = both.to(layer.payload.dtype)


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """([..., D] int8, [...] fp16 scales) of fp32 vectors along the last dimension."""
    scales = x.abs().amax(-1).div_(INT8_MAX).half()
    scales.masked_fill_(scales == 0, 1)
    quantised = x.div(scales[..., None].float()).round_().clamp_(-INT8_MAX, INT8_MAX)
    return quantised.nan_to_num_(0).to(torch.int8), scales


def quantise_int8_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """One vector after the other, in float64."""
    rows = x.reshape(-1, x.shape[-1])
    quantised, scales = torch.zeros(rows.shape, dtype=torch.int8), torch.ones(len(rows), dtype=torch.float16)
    for i, row in enumerate(rows.double()):
        scale = (row.abs().max() / INT8_MAX).half()
        if scale == 0:
            continue
        scales[i] = scale
        if torch.isfinite(scale):
            quantised[i] = (row / scale.double()).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return quantised.view(x.shape), scales.view(x.shape[:-1])
