"""Write tokens' keys and values into their pages, quantised bit for bit as `kernels.quantise` does.

Shapes: keys, values [T, Hk, D], strided but for D; pages, slots [T] int32 or int64, a page below 0 is no token; pages
as in kernels.append_pages. Pages with tails are written by `append_tails`.
"""

import triton
import triton.language as tl
from torch import Tensor

from pageferry.core.formats import TensorFormat
from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.gpu.page_arguments import padded_dim, row_arguments, side_arguments
from pageferry.kernels.gpu.page_tiles import rounded_vectors
from pageferry.kernels.quantise import largest

TOKENS = 8


@triton.jit
def _rounded(x):
    """To the nearest integer, halves to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _rounded_to_bf16(x):
    """Still fp32, so that converting is exact: the interpreter would cut it off instead of rounding it."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _encode_fp8(x):
    """Numbers up to ±448 as e4m3 codes, to nearest even, by integer operations."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    # Of normal numbers the upper 3 bits of mantissa stay; a carry counts the exponent up by itself.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = _rounded(tl.abs(x) * 512.0).to(tl.int32)
    code = tl.minimum(tl.where(tl.abs(x) < 0.015625, subnormal, normal), 0x7E)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80  # also of −0, as torch has it
    return (code | sign).to(tl.uint8)


@triton.jit
def _scaled(x, is_finite, live, TOP: tl.constexpr, SYMMETRIC: tl.constexpr):
    """(numbers to round [N, DP], scales, zero points [N] fp16) of x [N, DP], of which `live` [1, DP] counts."""
    if SYMMETRIC:
        zeros = tl.zeros([x.shape[0]], tl.float16)
        reach, low = tl.max(tl.abs(x), 1), -TOP
        scaled = x
    else:
        smallest = tl.min(tl.where(live, x, float("inf")), 1)
        zeros = smallest.to(tl.float16)
        reach, low = tl.max(tl.where(live, x, -float("inf")), 1) - smallest, 0
        is_finite = is_finite & (tl.abs(zeros.to(tl.float32)) < float("inf"))
        scaled = x - zeros.to(tl.float32)[:, None]
    scales = tl.div_rn(reach, tl.full(reach.shape, TOP, tl.float32)).to(tl.float16)
    scales = tl.where(scales == 0, 1.0, scales.to(tl.float32))
    scales = tl.where(is_finite, scales, float("nan"))
    scaled = tl.div_rn(scaled, tl.broadcast_to(scales[:, None], scaled.shape))
    # Also NaN, of numbers that aren't finite, becomes one: their scales say so.
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.where(scaled > low, scaled, low * 1.0)
    return tl.where(scaled < TOP, scaled, TOP * 1.0), scales.to(tl.float16), zeros


@triton.jit
def store_vectors(
    x, page, head, slot, live_token, payload, scale_ptr, zero_ptr, stride, factor_stride,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ELEMENT: tl.constexpr, TOP: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    """Vectors x [N, DP] fp32 of one head into slots [N] of pages [N]; with CHANNEL they are all of one page.

    What is beside the live numbers must be 0.
    """
    dim = tl.arange(0, DP)
    live = (dim < D)[None, :]
    mask = live_token[:, None] & live
    vector = head * PAGE + slot
    target = payload + page[:, None] * stride
    if scale_ptr is None:
        elements = x
        if ELEMENT == "fp16":
            # An infinite score could hide its token instead of failing its sequence.
            elements = rounded_vectors(x)
        elif ELEMENT == "bf16":
            elements = _rounded_to_bf16(x)
        tl.store(target + vector[:, None] * D + dim[None, :], elements.to(payload.dtype.element_ty), mask=mask)
    else:
        if CHANNEL:
            turned = tl.trans(x)
            is_finite = tl.min((tl.abs(turned) < float("inf")).to(tl.int32), 1) == 1
            scaled, scales, zeros = _scaled(turned, is_finite, live_token[None, :], TOP, zero_ptr is None)
            scaled = tl.trans(scaled)
            factor, has_factor = tl.max(page, 0) * factor_stride + head * D + dim, dim < D
        else:
            is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) == 1
            scaled, scales, zeros = _scaled(x, is_finite, live, TOP, zero_ptr is None)
            factor, has_factor = page * factor_stride + vector, live_token
        tl.store(scale_ptr + factor, scales, mask=has_factor)
        if zero_ptr is not None:
            tl.store(zero_ptr + factor, zeros, mask=has_factor)
        if ELEMENT == "fp8_e4m3":
            tl.store(target + vector[:, None] * D + dim[None, :], _encode_fp8(scaled), mask=mask)
        elif ELEMENT == "int8":
            codes = _rounded(scaled).to(tl.int32).to(payload.dtype.element_ty)
            tl.store(target + vector[:, None] * D + dim[None, :], codes, mask=mask)
        else:
            codes = _rounded(scaled).to(tl.int32)
            low, high = tl.split(tl.reshape(codes, [x.shape[0], DP // 2, 2]))
            byte = tl.arange(0, DP // 2)
            packed = ((low & 15) | ((high & 15) << 4)).to(tl.uint8)
            mask = live_token[:, None] & (byte < D // 2)[None, :]
            tl.store(target + vector[:, None] * (D // 2) + byte[None, :], packed, mask=mask)


@triton.jit
def _append_side(
    vectors, token_stride, head_stride, token, head, page, slot, live_token,
    payload, scale_ptr, zero_ptr, stride, factor_stride,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ELEMENT: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, DP)
    place = vectors + token[:, None] * token_stride + head * head_stride + dim[None, :]
    x = tl.load(place, mask=live_token[:, None] & (dim < D)[None, :], other=0).to(tl.float32)
    store_vectors(
        x, page, head, slot, live_token, payload, scale_ptr, zero_ptr, stride, factor_stride,
        D, DP, PAGE, ELEMENT, TOP, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _append_kernel(
    keys, k_token_stride, k_head_stride, values, v_token_stride, v_head_stride, pages, slots, num_tokens,
    k_payload, k_scales, k_zeros, k_stride, k_factor_stride, v_payload, v_scales, v_zeros, v_stride, v_factor_stride,
    TOKENS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    K_ELEMENT: tl.constexpr, K_TOP: tl.constexpr, V_ELEMENT: tl.constexpr, V_TOP: tl.constexpr,
):  # fmt: skip
    """A program is TOKENS tokens of one KV head."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    live = token < num_tokens
    page = tl.load(pages + token, mask=live, other=0).to(tl.int64)
    slot = tl.load(slots + token, mask=live, other=0).to(tl.int64)
    live &= page >= 0
    _append_side(
        keys, k_token_stride, k_head_stride, token, head, page, slot, live,
        k_payload, k_scales, k_zeros, k_stride, k_factor_stride, D, DP, PAGE, K_ELEMENT, K_TOP,
    )  # fmt: skip
    _append_side(
        values, v_token_stride, v_head_stride, token, head, page, slot, live,
        v_payload, v_scales, v_zeros, v_stride, v_factor_stride, D, DP, PAGE, V_ELEMENT, V_TOP,
    )  # fmt: skip


def append_pages(layer: LayerPages, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Token i goes to slot `slots[i]` of page `pages[i]`; no two tokens share one."""
    num_tokens, num_heads, head_dim = keys.shape
    page_size = layer.keys.payload.shape[2]
    check_rows(layer, keys, values)
    if pages.shape != (num_tokens,) or slots.shape != (num_tokens,):
        raise ValueError(f"pages {list(pages.shape)} and slots {list(slots.shape)} must be [{num_tokens}]")
    if num_tokens == 0:
        return
    _append_kernel[(triton.cdiv(num_tokens, TOKENS), num_heads)](
        **row_arguments((keys, values)), pages=pages, slots=slots, num_tokens=num_tokens,
        **side_arguments("k", layer.keys), **side_arguments("v", layer.values),
        TOKENS=TOKENS, D=head_dim, DP=padded_dim(head_dim), PAGE=page_size,
        K_ELEMENT=layer.keys.format.element.value, K_TOP=top(layer.keys.format),
        V_ELEMENT=layer.values.format.element.value, V_TOP=top(layer.values.format), num_warps=4,
    )  # fmt: skip


def check_rows(layer: LayerPages, keys: Tensor, values: Tensor) -> None:
    """Raise ValueError unless keys and values are alike, and of the pages' heads."""
    num_kv_heads = layer.keys.payload.shape[1]
    if keys.shape != values.shape or keys.shape[1] != num_kv_heads:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} must be alike, of {num_kv_heads} heads"
        )


def top(side: TensorFormat) -> int:
    """The largest q of a format that has a scale."""
    return largest(side) if side.element.is_scaled else 0
