"""SiLU-gated product of the feed-forward: y = silu(g) * u, silu(g) = g / (1 + exp(-g)) (arXiv:2002.05202).

Shapes: gate_up [T, 2 N], the gate's half first; y [T, N], the input's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pageferry.kernels.cpu_library import CpuKernels, address


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def compiled_silu_mul(kernels: CpuKernels, gate_up: Tensor) -> Tensor:
    """Of fp32; a row's bits do not depend on the rows beside it."""
    y = torch.empty((len(gate_up), gate_up.shape[1] // 2))
    kernels.call("silu_mul", address(gate_up), address(y), *y.shape)
    return y


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up
