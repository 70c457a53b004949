"""y = x Wᵀ + b with weights as a GGUF file has them, in groups of 32, and x quantised in the same groups.

x: scale s = max |x| / 127 and q = round(x / s) for each row's group of 32; its sum of products with the weights' q is
exact, and the groups are added in fp32, in their order. So a row's result does not depend on the rows beside it. A
group with a number that is not finite makes its row NaN.
Weights (github.com/ggml-org/ggml, src/ggml-common.h) are repacked, never quantised anew: 16 rows side by side, Q4_0's
(q - 8) d as q d + m with m = -8 d, which fp16 holds exactly. cpu/abi.h has the packed form.
Shapes: x [T, in] fp32, W [out, in], b [out] fp32 or None, y [T, out] fp32; in is a multiple of 32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.gguf import GgufType
from pageferry.kernels import cpu_library
from pageferry.kernels.cpu_library import CpuKernels, address, byref

QUANTISED_TYPES = (GgufType.Q4_0, GgufType.Q4_1, GgufType.Q8_0)
_Q4, _Q8 = 0, 1
_GROUP, _TILE = 32, 16


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`blocks` [ceil(out / 16), in / 32, 320 or 544] uint8; rows beyond `out` are zeros."""

    blocks: Tensor
    bias: Tensor | None
    kind: int
    rows: int
    columns: int

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel()

    def struct(self) -> cpu_library.Matrix:
        """Points into the tensors, which must outlive it."""
        return cpu_library.Matrix(
            blocks=address(self.blocks, torch.uint8),
            bias=address(self.bias),
            kind=self.kind,
            rows=self.rows,
            columns=self.columns,
        )


def pack(data: NDArray[np.uint8], kind: GgufType, bias: Tensor | None = None) -> PackedMatrix:
    """Of a matrix's blocks as they are in the file, [out, in / 32, bytes of a block]."""
    rows, groups, _ = data.shape
    tiles = -(-rows // _TILE)
    padded = np.zeros((tiles * _TILE, *data.shape[1:]), np.uint8)
    padded[:rows] = data
    parts = [_lanes(padded[..., :2])]
    if kind is GgufType.Q8_0:
        parts.append(_lanes(padded[..., 2:] ^ 0x80))
    elif kind is GgufType.Q4_1:
        parts += [_lanes(padded[..., 2:4]), _lanes(padded[..., 4:])]
    else:
        minimum = padded[..., :2].copy().view(np.float16) * np.float16(-8)
        parts += [_lanes(minimum.view(np.uint8)), _lanes(padded[..., 2:])]
    blocks = torch.from_numpy(np.concatenate(parts, axis=2))
    return PackedMatrix(blocks, bias, _Q8 if kind is GgufType.Q8_0 else _Q4, rows, groups * _GROUP)


def _lanes(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[rows, groups, bytes] to [rows / 16, groups, bytes * 16]: of 16 rows four bytes each in turn, or two of two."""
    rows, groups, num_bytes = data.shape
    piece = min(4, num_bytes)
    split = data.reshape(rows // _TILE, _TILE, groups, num_bytes // piece, piece)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4)).reshape(rows // _TILE, groups, num_bytes * _TILE)


def quantised_linear(kernels: CpuKernels, x: Tensor, matrix: PackedMatrix) -> Tensor:
    assert x.shape[1] == matrix.columns
    y = torch.empty((len(x), matrix.rows))
    struct = byref(matrix.struct())
    kernels.call_in_workspace("linear", (struct, len(x)), address(x), address(y))
    return y


def unpack_rows(kernels: CpuKernels, matrix: PackedMatrix, row_ids: Tensor) -> Tensor:
    """Rows [T, in] fp32 of the matrix by their numbers [T] int32: an embedding table's look-up."""
    y = torch.empty((len(row_ids), matrix.columns))
    kernels.call("unpack", byref(matrix.struct()), address(row_ids, torch.int32), address(y), len(row_ids))
    return y


def quantise_groups_ref(x: Tensor) -> Tensor:
    """What the multiplication takes x to be."""
    groups = x.double().view(len(x), -1, _GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    quantised = (groups / torch.where(scales == 0, 1, scales)).round()
    return (quantised * scales).view(x.shape)


def quantised_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`weight` is dequantised."""
    y = (quantise_groups_ref(x) @ weight.double().T).float()
    return y if bias is None else y + bias
