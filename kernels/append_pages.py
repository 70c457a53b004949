"""Write tokens' keys and values into their pages, in the pages' format (see `quantise`).

Shapes: keys, values [T, Hk, D]; pages, slots [T]; of K and of V, payload [num_pages, Hk, B, D] (of int4 D / 2 bytes),
scales and zeros [num_pages, Hk, B] fp16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pageferry.core.formats import TensorFormat
from pageferry.kernels.quantise import Stored, dequantise, quantise


@dataclass(frozen=True, slots=True)
class SidePages:
    """One layer's keys, or its values, as views into the pool; `scales` and `zeros` only where the format has them."""

    format: TensorFormat
    payload: Tensor  # [num_pages, Hk, B, D]
    scales: Tensor | None  # [num_pages, Hk, B] fp16
    zeros: Tensor | None  # [num_pages, Hk, B] fp16

    def read(self) -> Tensor:
        """[num_pages, Hk, B, D] fp32: all that is stored."""
        return dequantise(Stored(self.payload, self.scales, self.zeros), self.format)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's views into the pool."""

    keys: SidePages
    values: SidePages


def append_pages(layer: LayerPages, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Token i goes to slot `slots[i]` of page `pages[i]`; no two tokens share one."""
    if layer.keys.format == layer.values.format:
        both = quantise(torch.stack((keys.float(), values.float())), layer.keys.format)
        stored = [Stored(*(None if part is None else part[i] for part in _parts(both))) for i in (0, 1)]
    else:
        stored = [quantise(keys.float(), layer.keys.format), quantise(values.float(), layer.values.format)]
    for side, new in zip((layer.keys, layer.values), stored, strict=True):
        side.payload[pages, :, slots] = new.elements
        if side.scales is not None:
            side.scales[pages, :, slots] = new.scales
        if side.zeros is not None:
            side.zeros[pages, :, slots] = new.zeros


def _parts(stored: Stored) -> tuple[Tensor | None, ...]:
    return stored.elements, stored.scales, stored.zeros
