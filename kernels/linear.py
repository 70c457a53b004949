"""y = x Wᵀ + b, with W repacked once into the blocked order that oneDNN multiplies fastest.

Shapes: x [T, in], W [out, in], b [out] or None, y [T, out]; fp32 or bf16, accumulated in fp32.
A row's last bits may depend on T: oneDNN picks its blocking by shape. It also keeps up to a megabyte of code and
buffers for each shape that it has met, so T is padded to one of few sizes.
"""

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """Holds the repacked weight; where oneDNN lacks the packing, the plain one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.numel() * weight.element_size()
        self.bias = bias
        self._is_packed = _can_pack(weight.dtype)
        self._weight = _packed(weight) if self._is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_packed:
            num_rows = len(x)
            padded = functional.pad(x, (0, 0, 0, _padded_rows(num_rows) - num_rows))
            return torch.ops.mkldnn._linear_pointwise(padded, self._weight, self.bias, "none", [], "")[:num_rows]
        return functional.linear(x, self._weight, self.bias)


def _padded_rows(num_rows: int) -> int:
    """The next of 1, 2, 4, 8, 16, 24, 32, 64, 96, ..."""
    if num_rows <= 8:
        return 1 << max(0, num_rows - 1).bit_length()
    step = 8 if num_rows <= 32 else 32
    return -(-num_rows // step) * step


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.float() @ weight.float().T
    return y if bias is None else y + bias.float()


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _packed(weight: Tensor) -> Tensor:
    # The hint is a number of rows; packings for 8 and for 256 rows are the same and serve all.
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 256)
