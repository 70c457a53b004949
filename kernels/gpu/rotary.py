"""Rotary position embedding, halves form; formula in kernels.rotary.

Shapes: x [T, H, D] of any float dtype, strided but for D; cos, sin [T, D/2] fp32; y [T, H, D] fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8


@triton.jit
def _rotary_kernel(
    x, token_stride, head_stride, cos, sin, out, num_heads,
    HEADS: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
):  # fmt: skip
    """A program is HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF_P)
    live = dim < HALF
    mask = (head < num_heads)[:, None] & live[None, :]
    source = x + token * token_stride + head[:, None] * head_stride + dim[None, :]
    first = tl.load(source, mask=mask, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0).to(tl.float32)
    c = tl.load(cos + token * HALF + dim, mask=live, other=0)[None, :]
    s = tl.load(sin + token * HALF + dim, mask=live, other=0)[None, :]
    target = out + (token * num_heads + head[:, None]) * (2 * HALF) + dim[None, :]
    tl.store(target, first * c - second * s, mask=mask)
    tl.store(target + HALF, second * c + first * s, mask=mask)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`cos` and `sin` are of the tokens' positions."""
    num_tokens, num_heads, dim = x.shape
    half = dim // 2
    if dim % 2 or x.stride(2) != 1:
        raise ValueError(f"head size is {dim}, must be even, its numbers side by side")
    for table in (cos, sin):
        if table.shape != (num_tokens, half) or table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(f"cos and sin must be contiguous fp32 [{num_tokens}, {half}]")
    out = x.new_empty(x.shape, dtype=torch.float32)
    if num_tokens:
        _rotary_kernel[(num_tokens, triton.cdiv(num_heads, HEADS))](
            x, x.stride(0), x.stride(1), cos, sin, out, num_heads,
            HEADS=HEADS, HALF=half, HALF_P=triton.next_power_of_2(half), num_warps=2,
        )  # fmt: skip
    return out
