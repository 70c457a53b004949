"""y = x Wᵀ + b with W in groups of 32 along its rows, as GGUF files hold it; nothing is quantised anew.

Of a group, value i is: Q8_0 q[i] d; Q4_0 (q[i] - 8) d; Q4_1 q[i] d + m, with byte i of 4-bit groups holding q[i] in its
low half and q[i + 16] in its high half (github.com/ggml-org/ggml, src/ggml-common.h).
Shapes: x [T, in]; elements [out, in] int8 or [out, in / 2] uint8; scales, minima [out, in / 32] fp16; y [T, out] in x's
dtype. A weight is rounded to the dtype of the products; sums are fp32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.core.gguf import GgufType
from pageferry.kernels.gpu.page_arguments import DOT_DTYPES

GROUP = 32
COLUMNS, STEP = 64, 64


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix in groups, its parts side by side instead of block after block."""

    elements: Tensor  # [out, in] int8, or [out, in / 2] uint8
    scales: Tensor  # [out, in / 32] fp16
    minima: Tensor | None  # [out, in / 32] fp16
    offset: int = 0  # what is taken off each q

    @classmethod
    def from_blocks(cls, blocks: Tensor, kind: GgufType, out_features: int) -> "GroupedWeight":
        """Takes a GGUF tensor's bytes apart; the groups stay as they are."""
        rows = blocks.view(out_features, -1, kind.block[1])
        head = 4 if kind is GgufType.Q4_1 else 2
        factors = rows[..., :head].contiguous().view(torch.float16)
        elements = rows[..., head:].flatten(1).contiguous()
        return cls(
            elements.view(torch.int8) if kind is GgufType.Q8_0 else elements,
            factors[..., 0].contiguous(),
            factors[..., 1].contiguous() if kind is GgufType.Q4_1 else None,
            8 if kind is GgufType.Q4_0 else 0,
        )

    @property
    def is_packed(self) -> bool:
        return self.elements.dtype == torch.uint8

    @property
    def in_features(self) -> int:
        return self.scales.shape[1] * GROUP

    def rows(self, row_ids: Tensor) -> "GroupedWeight":
        """Of those numbers, such as of tokens in an embedding table."""
        elements, scales = self.elements.index_select(0, row_ids), self.scales.index_select(0, row_ids)
        minima = None if self.minima is None else self.minima.index_select(0, row_ids)
        return GroupedWeight(elements, scales, minima, self.offset)

    def dequantise(self) -> Tensor:
        """[out, in] fp32."""
        groups = self.elements.unflatten(1, (-1, 16 if self.is_packed else GROUP))
        if self.is_packed:
            groups = torch.cat((groups & 15, groups >> 4), dim=-1)
        numbers = (groups.float() - self.offset) * self.scales[..., None].float()
        return (numbers if self.minima is None else numbers + self.minima[..., None].float()).flatten(1)


@triton.jit
def _weights(numbers, scales, minima, place, mask, OFFSET: tl.constexpr, PER_GROUP: tl.constexpr, DOT: tl.constexpr):
    """[N, K] numbers times their groups' factors, which lie at `place` [N, K / PER_GROUP]."""
    shape: tl.constexpr = [numbers.shape[0], numbers.shape[1] // PER_GROUP, PER_GROUP]
    grouped = tl.reshape(numbers.to(tl.float32) - OFFSET, shape)
    grouped *= tl.load(scales + place, mask=mask, other=0).to(tl.float32)[:, :, None]
    if minima is not None:
        grouped += tl.load(minima + place, mask=mask, other=0).to(tl.float32)[:, :, None]
    return tl.reshape(grouped.to(DOT), numbers.shape)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, row_stride, elements, scales, minima, bias, out, num_rows, out_features, in_features,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """A program is ROWS × COLUMNS of y, over STEP of x's columns at a time."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = (row < num_rows)[:, None], (column < out_features)[:, None]
    row, wide = row.to(tl.int64), column.to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, in_features, STEP):
        group = begin // 32 + tl.arange(0, STEP // 32)
        place = wide[:, None] * (in_features // 32) + group[None, :]
        factor_mask = has_column & (group < in_features // 32)[None, :]
        if PACKED:
            byte = tl.arange(0, STEP // 2)
            k = begin + byte // 16 * 32 + byte % 16
            mask = (k < in_features)[None, :]
            source = elements + wide[:, None] * (in_features // 2) + (begin // 2 + byte)[None, :]
            packed = tl.load(source, mask=has_column & mask, other=0)
            inputs = x + row[:, None] * row_stride + k[None, :]
            first = tl.load(inputs, mask=has_row & mask, other=0).to(DOT)
            second = tl.load(inputs + 16, mask=has_row & mask, other=0).to(DOT)
            low = _weights(packed & 15, scales, minima, place, factor_mask, OFFSET, 16, DOT)
            high = _weights(packed >> 4, scales, minima, place, factor_mask, OFFSET, 16, DOT)
            total = tl.dot(first, tl.trans(low), total, input_precision="tf32x3")
            total = tl.dot(second, tl.trans(high), total, input_precision="tf32x3")
        else:
            k = begin + tl.arange(0, STEP)
            mask = (k < in_features)[None, :]
            numbers = tl.load(elements + wide[:, None] * in_features + k[None, :], mask=has_column & mask, other=0)
            inputs = tl.load(x + row[:, None] * row_stride + k[None, :], mask=has_row & mask, other=0).to(DOT)
            whole = _weights(numbers, scales, minima, place, factor_mask, OFFSET, 32, DOT)
            total = tl.dot(inputs, tl.trans(whole), total, input_precision="tf32x3")
    if bias is not None:
        total += tl.load(bias + column, mask=column < out_features, other=0).to(tl.float32)[None, :]
    target = out + row[:, None] * out_features + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=has_row & (column < out_features)[None, :])


def linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Products are of `dtype`, or else of x's."""
    num_rows, in_features = x.shape
    out_features = len(weight.scales)
    if in_features != weight.in_features or x.stride(1) != 1:
        raise ValueError(f"x {list(x.shape)} must have {weight.in_features} columns, side by side")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias {list(bias.shape)} must be [{out_features}]")
    out = x.new_empty((num_rows, out_features))
    if num_rows:
        dtype = x.dtype if dtype is None else dtype
        rows = min(most_rows(dtype), max(16, triton.next_power_of_2(num_rows)))
        _linear_kernel[(triton.cdiv(out_features, COLUMNS), triton.cdiv(num_rows, rows))](
            x, x.stride(0), weight.elements, weight.scales, weight.minima, bias, out,
            num_rows, out_features, in_features, ROWS=rows, COLUMNS=COLUMNS, STEP=STEP, OFFSET=weight.offset,
            PACKED=weight.is_packed, DOT=DOT_DTYPES[dtype], num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def most_rows(dtype: torch.dtype) -> int:
    """Of a program, as registers hold; fp32 is multiplied as three parts."""
    return 16 if dtype == torch.float32 else 64
