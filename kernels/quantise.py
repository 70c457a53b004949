"""Vectors of keys or values as the elements, scales and zero points that pages store, and back.

fp32, bf16, fp16: rounded to nearest even; fp16 stores a vector that overflows as NaN.
fp8_e4m3, symmetric int8 and int4: scale s = fp16(max |x| / m) with m = 448, 127 or 7, and q = x / s rounded to nearest
even (to e4m3 for fp8_e4m3) and clamped to ±m. x = q · s.
Asymmetric, n bits: zero z = fp16(min x), scale s = fp16((max x - min x) / (2ⁿ - 1)), q = round((x - z) / s) clamped to
0 … 2ⁿ - 1. x = q · s + z.
A scale of 0 (all numbers zero, all equal, or too small for fp16) is stored as 1. A vector that is not finite, or whose
scale or zero point overflows fp16, stores a scale that is not finite: whoever reads it gets NaN, and so fails alone.
Shapes: x [..., D] fp32; elements [..., D], of int4 [..., D / 2] bytes; scales and zeros [...] fp16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pageferry.core.formats import Element, TensorFormat

FP8_MAX = 448
_FLOATS = {Element.FP32: torch.float32, Element.BF16: torch.bfloat16, Element.FP16: torch.float16}


@dataclass(frozen=True, slots=True)
class Stored:
    """Vectors in a format; what it lacks is None."""

    elements: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None


def storage_dtype(format_: TensorFormat) -> torch.dtype:
    """Of the elements; two int4 are one byte, and fp8 is kept as its bits."""
    if format_.element in _FLOATS:
        return _FLOATS[format_.element]
    return torch.int8 if format_.element is Element.INT8 and format_.symmetric else torch.uint8


def largest(format_: TensorFormat) -> int:
    """The largest q."""
    if format_.element is Element.FP8_E4M3:
        return FP8_MAX
    bits = format_.element.bits
    return 2 ** (bits - 1) - 1 if format_.symmetric else 2**bits - 1


def quantise(x: Tensor, format_: TensorFormat) -> Stored:
    if format_.element in _FLOATS:
        elements = x.to(_FLOATS[format_.element])
        if format_.element is Element.FP16:
            # An infinite score could hide its token instead of failing its sequence.
            elements.masked_fill_(~torch.isfinite(elements).all(-1, keepdim=True), float("nan"))
        return Stored(elements)
    top = largest(format_)
    if format_.symmetric:
        zeros, low = None, -top
        scales = x.abs().amax(-1).div_(top).half()
        scaled = x
    else:
        lowest, highest = torch.aminmax(x, dim=-1)
        zeros, low = lowest.half(), 0
        scales = highest.sub(lowest).div_(top).half()
        scales.masked_fill_(~torch.isfinite(zeros), float("nan"))
        scaled = x - zeros[..., None].float()
    scales.masked_fill_(scales == 0, 1)
    scaled = scaled.div(scales[..., None].float()).clamp_(low, top).nan_to_num_(0)
    if format_.element is Element.FP8_E4M3:
        return Stored(scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales)
    rounded = scaled.round_()
    if format_.element is Element.INT8:
        return Stored(rounded.to(storage_dtype(format_)), scales, zeros)
    halves = rounded.to(torch.int8).view(torch.uint8).bitwise_and_(15)
    return Stored(halves[..., ::2] | halves[..., 1::2] << 4, scales, zeros)


def numbers(elements: Tensor, format_: TensorFormat, dtype: torch.dtype) -> Tensor:
    """The elements as contiguous numbers [..., D], before scale and zero point; integers are exact in every `dtype`."""
    if format_.element is Element.FP8_E4M3:
        # Sign, exponent and mantissa moved to where fp16 has them read as 2^-8 of the number, subnormals too: twenty
        # times as fast as torch's own conversion. NaN would become 480, but none is stored.
        bits = elements.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
        halves = bits.bitwise_left_shift_(7).bitwise_and_(-1 ^ 1 << 14).view(torch.float16)
        return halves.to(dtype).mul_(256)
    if format_.element is Element.INT4:
        # As signed bytes, shifts to the right fill with the sign.
        signed = elements.view(torch.int8) if format_.symmetric else elements
        low = (signed << 4) >> 4 if format_.symmetric else signed & 15
        elements = torch.stack((low, signed >> 4), dim=-1).flatten(-2)
    return elements.to(dtype, memory_format=torch.contiguous_format)


def dequantise(stored: Stored, format_: TensorFormat) -> Tensor:
    """[..., D] fp32."""
    x = numbers(stored.elements, format_, torch.float32)
    if stored.scales is not None:
        x = x * stored.scales[..., None].float()
    return x if stored.zeros is None else x + stored.zeros[..., None].float()


def quantise_ref(x: Tensor, format_: TensorFormat) -> Stored:
    """Formats with a scale: one vector after the other, in fp64, and one byte after the other."""
    rows, top = x.reshape(-1, x.shape[-1]).double(), largest(format_)
    elements, scales, zeros = (
        [],
        torch.ones(len(rows), dtype=torch.float16),
        torch.zeros(len(rows), dtype=torch.float16),
    )
    for i, row in enumerate(rows):
        reach = row.abs().max()
        if not format_.symmetric:
            zeros[i], reach = row.min().half(), row.max() - row.min()
        scale = (reach / top).half()
        if scale != 0:
            scales[i] = scale if torch.isfinite(zeros[i]) else float("nan")
        good = torch.isfinite(scales[i])
        scaled = ((row - zeros[i].double()) / scales[i].double()).tolist() if good else [0.0] * len(row)
        if format_.element is Element.FP8_E4M3:
            codes = [fp8_encode_ref(value) for value in scaled]
        else:
            codes = [min(top, max(-top if format_.symmetric else 0, round(value))) & 255 for value in scaled]
        if format_.element is Element.INT4:
            codes = [low & 15 | (high & 15) << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        elements.append(codes)
    packed = torch.tensor(elements, dtype=torch.uint8).view(*x.shape[:-1], -1).view(storage_dtype(format_))
    shape = x.shape[:-1]
    return Stored(packed, scales.view(shape), None if format_.symmetric else zeros.view(shape))


def fp8_encode_ref(value: float) -> int:
    """e4m3 (no infinities) by integer operations: to nearest even, saturating at 448, NaN kept."""
    if value != value:
        return 0x7F
    bits = int(torch.tensor(value, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF
    sign, exponent, mantissa = bits >> 31 << 7, (bits >> 23 & 255) - 127, bits & 0x7FFFFF
    if exponent > 8:
        return sign | 0x7E
    if exponent < -10:  # below half of the smallest, 2^-9
        return sign
    # Steps are 2^(exponent - 3), and 2^-9 below 2^-6: keep what lies above them, and round by what is cut off.
    shift = 20 + max(0, -6 - exponent)
    whole = mantissa | 1 << 23
    kept, rest, half = whole >> shift, whole & ((1 << shift) - 1), 1 << (shift - 1)
    kept += rest > half or (rest == half and kept & 1)
    # Eight steps make one exponent, so a carry counts it up by itself.
    code = kept if exponent < -6 else (exponent + 6 << 3) + kept
    return sign | min(code, 0x7E)


def fp8_decode_ref(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 0x80 else size
