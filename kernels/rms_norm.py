"""RMS norm: y = x / sqrt(mean(x²) + eps) * w, over the last dimension (arXiv:1910.07467).

Shapes: x [..., N] fp32 or bf16, w [N]; computed in fp32. With a residual r [T, N] fp32, r += x comes first, in place.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pageferry.kernels.cpu_library import CpuKernels, address


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Fp32 result; the caller casts."""
    return functional.rms_norm(x.float(), weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place, and returns the norm of the sum in fp32."""
    residual.add_(x)
    return functional.rms_norm(residual, weight.shape, weight, eps)


def compiled_rms_norm(
    kernels: CpuKernels, residual: Tensor, weight: Tensor, eps: float, added: Tensor | None = None
) -> Tensor:
    """The norm of `residual` [T, N] fp32, to which `added`, where given, is added in place first."""
    y = torch.empty_like(residual)
    pointers = (address(added), address(residual), address(weight), address(y))
    kernels.call("rms_norm", *pointers, *residual.shape, eps)
    return y


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
