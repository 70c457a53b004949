"""Vectors of keys or values as the elements, scales and zero points that pages store, and back.

fp32, bf16, fp16: rounded to nearest even; fp16 stores a vector that overflows as NaN.
fp8_e4m3, symmetric int8 and int4: scale s = fp16(max |x| / m) with m = 448, 127 or 7, and q = x / s rounded to nearest
even (to e4m3 for fp8_e4m3) and clamped to ±m. x = q · s.
Asymmetric, n bits: zero z = fp16(min x), scale s = fp16((max x - min x) / (2ⁿ - 1)), q = round((x - z) / s) clamped to
0 … 2ⁿ - 1. x = q · s + z.
A scale of 0 (all numbers zero, all equal, or too small for fp16) is stored as 1. Numbers that are not finite, or whose
scale or zero point overflows fp16, store a scale that is not finite: whoever reads them gets NaN, and so fails alone.
The numbers that share a scale are those of a vector, or per channel those of a channel over the B tokens of a page.
Shapes: x [..., D] fp32, per channel [..., B, D]; elements as x, of int4 [..., D / 2] bytes; scales and zeros fp16,
[...], per channel [..., D].
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
    top, shared = largest(format_), _shared(format_)
    if format_.symmetric:
        zeros, low = None, -top
        scales = x.abs().amax(shared).div_(top).half()
        scaled = x
    else:
        lowest, highest = torch.aminmax(x, dim=shared)
        zeros, low = lowest.half(), 0
        scales = highest.sub(lowest).div_(top).half()
        scales.masked_fill_(~torch.isfinite(zeros), float("nan"))
        scaled = x - zeros.unsqueeze(shared).float()
    scales.masked_fill_(scales == 0, 1)
    scaled = scaled.div(scales.unsqueeze(shared).float()).clamp_(low, top).nan_to_num_(0)
    if format_.element is Element.FP8_E4M3:
        return Stored(scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales)
    rounded = scaled.round_()
    if format_.element is Element.INT8:
        return Stored(rounded.to(storage_dtype(format_)), scales, zeros)
    halves = rounded.to(torch.int8).view(torch.uint8).bitwise_and_(15)
    return Stored(halves[..., ::2] | halves[..., 1::2] << 4, scales, zeros)


def _shared(format_: TensorFormat) -> int:
    """The dimension whose numbers share a scale."""
    return -2 if format_.is_per_channel else -1


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
        x = x * stored.scales.unsqueeze(_shared(format_)).float()
    return x if stored.zeros is None else x + stored.zeros.unsqueeze(_shared(format_)).float()


def quantise_ref(x: Tensor, format_: TensorFormat) -> Stored:
    """Formats with a scale: one run of numbers that share it after the other, in fp64, and one byte after the other."""
    runs = x.double().movedim(_shared(format_), -1)
    shape, codes, scales, zeros = runs.shape[:-1], [], [], []
    for run in runs.reshape(-1, runs.shape[-1]):
        run_codes, scale, zero = _quantise_run_ref(run, format_)
        codes.append(run_codes)
        scales.append(scale)
        zeros.append(zero)
    elements = torch.tensor(codes, dtype=torch.uint8).view(runs.shape).movedim(-1, _shared(format_)).contiguous()
    if format_.element is Element.INT4:
        pairs = elements.view(-1, 2).tolist()
        packed = [low & 15 | (high & 15) << 4 for low, high in pairs]
        elements = torch.tensor(packed, dtype=torch.uint8).view(*x.shape[:-1], -1)
    factors = [torch.stack(found).view(shape) for found in (scales, zeros)]
    return Stored(elements.view(storage_dtype(format_)), factors[0], None if format_.symmetric else factors[1])


def _quantise_run_ref(run: Tensor, format_: TensorFormat) -> tuple[list[int], Tensor, Tensor]:
    """A byte for each number; scale and zero point, fp16."""
    top, reach, zero = largest(format_), run.abs().max(), torch.tensor(0.0, dtype=torch.float16)
    if not format_.symmetric:
        zero, reach = run.min().half(), run.max() - run.min()
    scale = (reach / top).half()
    if not torch.isfinite(zero):
        scale = torch.full_like(scale, float("nan"))
    elif scale == 0:
        scale = torch.ones_like(scale)
    scaled = [0.0] * len(run)
    if torch.isfinite(scale):
        scaled = ((run - zero.double()) / scale.double()).tolist()
    if format_.element is Element.FP8_E4M3:
        return [fp8_encode_ref(value) for value in scaled], scale, zero
    low = -top if format_.symmetric else 0
    return [min(top, max(low, round(value))) & 255 for value in scaled], scale, zero


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
