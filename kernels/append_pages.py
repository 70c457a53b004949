"""Write tokens' keys and values into their pages, in the pages' format (see `quantise`).

Shapes: keys, values [T, Hk, D]; pages, slots [T]; of K and of V, payload [num_pages, Hk, B, D] (of int4 D / 2 bytes),
scales and zeros [num_pages, Hk, B] fp16. Formats with tails are written by `tails`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pageferry.core.formats import Element, TensorFormat
from pageferry.kernels import cpu_library
from pageferry.kernels.cpu_library import CpuKernels, address, byref
from pageferry.kernels.quantise import Stored, dequantise, quantise
from pageferry.kernels.sequences import Sequences

# By their numbers in the compiled kernels.
_ELEMENTS = (Element.FP32, Element.BF16, Element.FP16, Element.FP8_E4M3, Element.INT8, Element.INT4)


@dataclass(frozen=True, slots=True)
class SidePages:
    """One layer's keys, or its values, as views into the pools; `scales` and `zeros` only where the format has them."""

    format: TensorFormat
    payload: Tensor  # [num_pages, Hk, B, D]
    scales: Tensor | None  # [num_pages, Hk, B] fp16; per channel [num_pages, Hk, D]
    zeros: Tensor | None  # as the scales
    tails: Tensor | None = None  # [num_tails, Hk, B, D] fp16, where the page format has tails

    @property
    def head_dim(self) -> int:
        return self.payload.shape[-1] * self.payload.element_size() * 8 // self.format.element.bits

    def struct(self) -> cpu_library.Side:
        scales, zeros, tails = (
            None if part is None else part.data_ptr() for part in (self.scales, self.zeros, self.tails)
        )
        return cpu_library.Side(
            payload=self.payload.data_ptr(),
            scales=scales,
            zeros=zeros,
            tails=tails,
            row_bytes=self.payload.shape[-1] * self.payload.element_size(),
            element=_ELEMENTS.index(self.format.element),
            is_per_channel=self.format.is_per_channel,
        )

    def read(self) -> Tensor:
        """[num_pages, Hk, B, D] fp32: all that is stored."""
        return dequantise(Stored(self.payload, self.scales, self.zeros), self.format)

    def store(self, at: Tensor | tuple[Tensor | slice, ...], stored: Stored) -> None:
        """Overwrite what lies there: pages [n], or (pages [n], all heads, slots [n])."""
        self.payload[at] = stored.elements
        if self.scales is not None:
            self.scales[at] = stored.scales
        if self.zeros is not None:
            self.zeros[at] = stored.zeros


@dataclass(frozen=True)
class LayerPages:
    """One layer's views into the pools, and which of the tokens before it a query reads (see `core.groups`)."""

    keys: SidePages
    values: SidePages
    group: int = 0  # the cache group, whose page tables are the layer's
    window: int | None = None
    sinks: int = 0

    @cached_property
    def struct(self) -> cpu_library.Pages:
        """For the compiled kernels; points into the pool."""
        keys = self.keys
        _, num_kv_heads, page_size, _ = keys.payload.shape
        return cpu_library.Pages(
            sides=(keys.struct(), self.values.struct()),
            page_bytes=keys.payload.stride(0) * keys.payload.element_size(),
            tail_bytes=0 if keys.tails is None else keys.tails.stride(0) * keys.tails.element_size(),
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=keys.head_dim,
            group=self.group,
            window=self.window or 0,
            sinks=self.sinks,
        )


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Of all positions; the norms are RMS norms over each head of the queries and keys, before they are turned."""

    cos: Tensor  # [positions, D / 2] fp32
    sin: Tensor
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None
    eps: float = 0.0

    def struct(self) -> cpu_library.Rotary:
        return cpu_library.Rotary(
            cos=address(self.cos),
            sin=address(self.sin),
            q_norm=address(self.q_norm),
            k_norm=address(self.k_norm),
            eps=self.eps,
        )


def rotate_append(
    kernels: CpuKernels, qkv: Tensor, rotary: RotaryTables, layer: LayerPages, sequences: Sequences
) -> None:
    """Turn queries and keys of `qkv` [T, H + 2 Hk, D] fp32 in place, and store keys and values: compiled, one pass.

    Turned and stored bytes are those of `rotary` and `append_pages`, but for a norm's last bits. With tails, keys and
    values are rounded to fp16 in place, and only pages that fill are stored; `compiled_attention` must follow, which
    reads the others from `qkv` and leaves them in the tails.
    """
    assert layer.keys.tails is None or sequences.tails is not None
    num_heads = qkv.shape[1] - 2 * layer.keys.payload.shape[1]
    structs = (byref(rotary.struct()), byref(layer.struct), byref(sequences.struct))
    kernels.call("append", address(qkv), *structs, num_heads)


def append_pages(layer: LayerPages, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Token i goes to slot `slots[i]` of page `pages[i]`; no two tokens share one."""
    k, v = layer.keys, layer.values
    if k.format == v.format:
        both = quantise(torch.stack((keys.float(), values.float())), k.format)
        parts = (both.elements, both.scales, both.zeros)
        stored = [Stored(*(None if part is None else part[i] for part in parts)) for i in (0, 1)]
    else:
        stored = [quantise(keys.float(), k.format), quantise(values.float(), v.format)]
    for side, new in zip((k, v), stored, strict=True):
        side.store((pages, slice(None), slots), new)
