"""Pools whose every byte is poison until something is written, and layouts for them."""

import torch

from pageferry.core.formats import Element, PageFormat, TensorFormat
from pageferry.core.groups import CacheGroup, full_group
from pageferry.core.layout import CacheLayout
from pageferry.engine.batch import TokenTargets
from pageferry.engine.pages import PageTensors
from pageferry.kernels.append_pages import LayerPages, append_pages
from pageferry.kernels.quantise import largest
from pageferry.kernels.tails import OpenTokens, TailTargets, append_to_tails

# As fp32, bf16, fp16 and fp8 these bytes are NaN; as int8 and int4 they are -1, or the largest where unsigned.
POISON = 0xFF
ALIKE = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int4", "int4:asym")
APART = ("k=int8,v=int4:asym", "k=int4:asym,v=bf16", "k=fp32,v=fp8_e4m3")
TAILED = (
    "int8:channel",
    "int8:channel:asym",
    "int4:channel",
    "int4:channel:asym",
    "fp8_e4m3:channel",
    "k=int8:channel,v=int4",
    "k=int4:channel:asym,v=bf16",
    "k=fp16,v=int8:channel",
    "k=fp32,v=fp8_e4m3:channel",
)
FORMATS = tuple(PageFormat.parse(text) for text in (*ALIKE, *APART))  # without tails
TAIL_FORMATS = tuple(PageFormat.parse(text) for text in TAILED)
# Half a step of 24, 8, 11 and 4 bits of mantissa.
_HALF_STEPS = {Element.FP32: 0.0, Element.BF16: 2**-8, Element.FP16: 2**-11, Element.FP8_E4M3: 2**-4}


def layout(
    page_format: PageFormat,
    *,
    num_layers: int = 2,
    heads: int = 2,
    dim: int = 8,
    page_size: int = 16,
    groups: tuple[CacheGroup, ...] = (),
) -> CacheLayout:
    """Of one full group unless others are given."""
    return CacheLayout("tested", page_format, page_size, heads, dim, groups or (full_group(num_layers),))


def largest_error(side: TensorFormat, x: torch.Tensor) -> torch.Tensor:
    """[...] Most that a number of vectors x [..., D] may be off: half a step, and what rounding scale and zero adds.

    fp16 rounds a scale by at most 2^-11 of itself (by 2^-25 where it is tiny), which clamping turns into an error of
    the largest numbers, and each zero point likewise.
    """
    reach = x.abs().amax(-1)
    if not side.element.is_scaled:
        return _HALF_STEPS[side.element] * reach + (2**-25 if side.element is Element.FP16 else 0)
    spread = reach if side.symmetric else x.amax(-1) - x.amin(-1)
    half_step = 0.5 / largest(side) if side.element.is_integer else _HALF_STEPS[side.element]
    zero_error = 0 if side.symmetric else 2**-11 * reach + 2**-25
    return spread * (half_step * (1 + 2**-11) + 2**-11) + largest(side) * 2**-25 + zero_error


def poisoned(of: CacheLayout, num_pages: int, num_tails: int = 8) -> PageTensors:
    """As many pages in each group."""
    pages = PageTensors(of, [num_pages] * len(of.groups), num_tails)
    for pool in (*pages.pools, *pages.tails):
        pool.memory.fill_(POISON)
    return pages


def append(
    layer: LayerPages, keys: torch.Tensor, values: torch.Tensor, targets: TokenTargets | TailTargets
) -> OpenTokens | None:
    """As the model stores a batch's tokens."""
    if isinstance(targets, TailTargets):
        return append_to_tails(layer, keys, values, targets)
    append_pages(layer, keys, values, *targets)
    return None


def stored(pages: PageTensors, layer: int) -> torch.Tensor:
    """[num_pages, 2, Hk, B, D] fp32: what a reader takes the layer's bytes to mean."""
    views = pages.layers[layer]
    return torch.stack((views.keys.read(), views.values.read()), dim=1)


def spoil(layer: LayerPages, page: int) -> None:
    """Make a page's keys NaN."""
    keys = layer.keys
    (keys.payload if keys.scales is None else keys.scales)[page] = float("nan")
