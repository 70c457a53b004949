"""For torch a batch is a list of segments, whose keys and values are gathered from pages and open tokens.

A segment is sequences that have equally many rows, padded to equally many pages and open tokens. One decode step's
sequences make few segments, a prefill chunk is one of its own. So each KV head's pages are read once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pageferry.kernels.append_pages import LayerPages, SidePages
from pageferry.kernels.quantise import numbers
from pageferry.kernels.tails import OpenTokens


@dataclass(frozen=True, slots=True)
class Segment:
    """S sequences of R rows, n pages and m open tokens each; shorter ones are padded with what `mask` hides."""

    rows: Tensor  # [S * R] of the batch, ascending: sequence after sequence
    pages: Tensor  # [S * n]
    num_seqs: int
    mask: Tensor  # [S, R, n * B + m] fp32: 0 where visible, else -inf
    masked_from: int  # the first column that is hidden from any row
    unused: tuple[Tensor, Tensor]  # (page of the segment, slot) pairs of all slots that hold no token yet
    open: Tensor | None = None  # [S * m] of the OpenTokens

    @property
    def num_rows(self) -> int:
        return self.mask.shape[1]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A segment's keys or values; slots without a token read as 0. Scales and zero points, one a token, are fp32."""

    numbers: Tensor  # [S, Hk, n * B, D] of the dtype that was asked for
    scales: Tensor | None  # [S, Hk, n * B]
    zeros: Tensor | None  # [S, Hk, n * B]
    open: Tensor | None  # [S, Hk, m, D] as the numbers

    def dequantised(self) -> Tensor:
        """[Hk, n * B + m, D] of a segment of one sequence; overwrites the numbers."""
        numbers = self.numbers[0]
        if self.scales is not None:
            zeros = None if self.zeros is None else self.zeros[0].unsqueeze(-1)
            numbers = _scaled(numbers, self.scales[0].unsqueeze(-1), zeros)
        return numbers if self.open is None else torch.cat((numbers, self.open[0]), dim=1)


def _scaled(numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Overwrites the numbers."""
    if zeros is None:
        return numbers.mul_(scales.to(numbers.dtype))
    # A zero point takes most of a large product away again: rounding before that would cost what quantising did.
    return torch.addcmul(zeros, numbers.float(), scales).to(numbers.dtype)


def gather_keys(layer: LayerPages, segment: Segment, open_tokens: OpenTokens | None, dtype: torch.dtype) -> Gathered:
    return _gather(layer.keys, segment, None if open_tokens is None else open_tokens.keys, dtype)


def gather_values(layer: LayerPages, segment: Segment, open_tokens: OpenTokens | None, dtype: torch.dtype) -> Gathered:
    return _gather(layer.values, segment, None if open_tokens is None else open_tokens.values, dtype)


def _gather(side: SidePages, segment: Segment, open_tokens: Tensor | None, dtype: torch.dtype) -> Gathered:
    raw = side.payload.index_select(0, segment.pages)
    _, num_kv_heads, page_size, width = raw.shape
    num_seqs, num_pages = segment.num_seqs, len(segment.pages) // segment.num_seqs
    page, slot = segment.unused
    if not side.format.element.is_scaled:  # what was left there may be NaN
        raw[page, :, slot] = 0
    ordered = raw.view(num_seqs, num_pages, num_kv_heads, page_size, width).transpose(1, 2)
    decoded = numbers(ordered, side.format, dtype)  # [S, Hk, n, B, D]
    factors: list[Tensor | None] = []
    for stored in (side.scales, side.zeros):
        if stored is None:
            factors.append(None)
            continue
        raw = stored.index_select(0, segment.pages)
        if not side.format.is_per_channel:  # such pages are full, and padding repeats one
            raw[page, :, slot] = 0
        factors.append(raw.view(num_seqs, num_pages, *raw.shape[1:]).transpose(1, 2).float())
    scales, zeros = factors
    opened = None
    if open_tokens is not None and segment.open is not None:
        num_open = len(segment.open) // num_seqs
        opened = open_tokens.index_select(0, segment.open).view(num_seqs, num_open, *open_tokens.shape[1:])
        opened = opened.transpose(1, 2).to(dtype)
    if scales is not None and side.format.is_per_channel:
        # A large channel must not be rounded by a scale of 8 bits, which differs from page to page.
        zeros = None if zeros is None else zeros.unsqueeze(-2)
        decoded, scales, zeros = _scaled(decoded.float(), scales.unsqueeze(-2), zeros).to(dtype), None, None
    flat = (num_seqs, num_kv_heads, num_pages * page_size)
    scales, zeros = (None if factor is None else factor.reshape(flat) for factor in (scales, zeros))
    return Gathered(decoded.reshape(*flat, decoded.shape[-1]), scales, zeros, opened)
