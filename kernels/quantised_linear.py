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
    if rows % _TILE:
        data = np.concatenate((data, np.zeros((-rows % _TILE, *data.shape[1:]), np.uint8)))
    if kind is GgufType.Q8_0:
        parts = data[..., :2], data[..., 2:] ^ 0x80
    elif kind is GgufType.Q4_1:
        parts = data[..., :2], data[..., 2:4], data[..., 4:]
    else:
        minimum = data[..., :2].copy().view(np.float16) * np.float16(-8)
        parts = data[..., :2], minimum.view(np.uint8), data[..., 2:]
    blocks = np.empty((len(data) // _TILE, groups, _TILE * sum(part.shape[2] for part in parts)), np.uint8)
    start = 0
    for part in parts:
        end = start + _TILE * part.shape[2]
        _set_lanes(blocks[..., start:end], part)
        start = end
    return PackedMatrix(torch.from_numpy(blocks), bias, _Q8 if kind is GgufType.Q8_0 else _Q4, rows, groups * _GROUP)


def _set_lanes(lanes: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
    """[rows / 16, groups, bytes * 16] of [rows, groups, bytes]: of 16 rows four bytes each in turn, or two of two."""
    words = np.ascontiguousarray(data).view(np.uint32 if data.shape[2] % 4 == 0 else np.uint16)
    tiles = words.reshape(len(lanes), _TILE, *words.shape[1:])
    lanes.view(words.dtype).reshape(*lanes.shape[:2], -1, _TILE)[...] = tiles.transpose(0, 2, 3, 1)


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
