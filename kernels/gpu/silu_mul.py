"""SiLU-gated product, y = silu(g) u; formula in kernels.silu_mul.

Shapes: gate_up [T, 2 N], the gate's half first; y [T, N], the input's dtype, computed in fp32.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up, row_stride, out, N: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=mask, other=0).to(tl.float32)
    up = tl.load(source + N, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * N + column, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, must have an even number, side by side")
    out = gate_up.new_empty((num_rows, width))
    if num_rows and width:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        _silu_mul_kernel[grid](gate_up, gate_up.stride(0), out, N=width, BLOCK=BLOCK, num_warps=4)
    return out
