"""RMS norm, with and without a residual that the input is added to first; formula in kernels.rms_norm.

Shapes: x [..., N] of any float dtype, residual [T, N] fp32, weight [N]; the result is fp32, or `dtype`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 1 << 14  # a row is held in registers


@triton.jit
def _rms_norm_kernel(x, row_stride, residual, weight, out, eps, N: tl.constexpr, NP: tl.constexpr):
    """A program is one row; without a residual, that pointer is None."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, NP)
    mask = column < N
    numbers = tl.load(x + row * row_stride + column, mask=mask, other=0).to(tl.float32)
    if residual is not None:
        numbers += tl.load(residual + row * N + column, mask=mask, other=0)
        tl.store(residual + row * N + column, numbers, mask=mask)
    factor = tl.rsqrt(tl.sum(numbers * numbers, 0) / N + eps)
    scaled = numbers * factor * tl.load(weight + column, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * N + column, scaled.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return _launch(x, None, weight, eps, dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Adds `x` to `residual` in place, and returns the norm of the sum."""
    if residual.shape != x.shape or residual.dtype != torch.float32 or not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous fp32 {list(x.shape)}")
    return _launch(x, residual, weight, eps, dtype)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    width = x.shape[-1]
    if weight.shape != (width,) or width > MAX_WIDTH:
        raise ValueError(f"weight {list(weight.shape)} must be [{width}], at most {MAX_WIDTH}")
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty(x.shape, dtype=dtype)
    if len(rows):
        padded = triton.next_power_of_2(width)
        _rms_norm_kernel[(len(rows),)](
            rows, rows.stride(0), residual, weight, out, eps, N=width, NP=padded, num_warps=num_warps(padded)
        )
    return out


def num_warps(padded: int) -> int:
    """So that a thread holds about 16 numbers of a row."""
    return min(16, max(1, padded // 512))
