"""Write tokens' keys and values where pages have tails: into pages that are full now, else into the tails.

A page whose last token is here is quantised as a whole, bit for bit as `kernels.quantise` does: its tokens before the
chunk are in the sequence's tail, the others are the chunk's rows, and all are rounded to fp16 first. A page that is
still open keeps its rows in the tail, with zeros behind them.
Shapes: keys, values [T, Hk, D], sequence after sequence, strided but for D; tails as in kernels.append_pages.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.gpu.append_pages import check_rows, store_vectors, top
from pageferry.kernels.gpu.page_arguments import (
    SequencePages,
    padded_dim,
    row_arguments,
    side_arguments,
    tail_arguments,
)
from pageferry.kernels.gpu.page_tiles import load_open


@dataclass(frozen=True, slots=True)
class TouchedPages:
    """Which pages a step's chunks write; made once a step, for all layers. `full` ones must be written before attention
    reads, `open` ones after it, since it reads what the tails hold from before.
    """

    starts: Tensor  # [S + 1] int32: first row of each sequence, and T
    full: Tensor  # [n, 2] int32: sequence, and index in its table
    open: Tensor  # [m, 2] int32

    @classmethod
    def of(cls, lengths: list[int], starts: Tensor, counts: list[int], page_size: int) -> "TouchedPages":
        """Of chunks that are the last `counts` of their sequences' tokens."""
        full, still_open = [], []
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            end = length // page_size
            full += [(i, index) for index in range((length - count) // page_size, end)]
            still_open += [(i, end)] * (count > 0 and length % page_size > 0)
        return cls(
            starts,
            *(torch.tensor(pages, dtype=torch.int32).view(-1, 2).to(starts.device) for pages in (full, still_open)),
        )


@triton.jit
def _write_side(
    rows, token_stride, token, slot, before, length, is_full, is_first, page, head, tail,
    payload, scales, zeros, stride, factor_stride,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ELEMENT: tl.constexpr, TOP: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    inside, dim = slot < PAGE, tl.arange(0, DP)
    x = load_open(tail, rows, token_stride, token, before, inside & (token < length), D, DP, PAGE)
    if is_full:
        store_vectors(
            x.to(tl.float32), page + tl.zeros_like(slot).to(tl.int64), head, slot, inside,
            payload, scales, zeros, stride, factor_stride, D, DP, PAGE, ELEMENT, TOP, CHANNEL,
        )  # fmt: skip
    else:
        writes = inside & (token >= before) & ((token < length) | is_first)
        tl.store(tail + slot[:, None] * D + dim[None, :], x, mask=writes[:, None] & (dim < D)[None, :])


@triton.jit
def _append_tails_kernel(
    keys, k_token_stride, k_head_stride, values, v_token_stride, v_head_stride,
    touched, starts, tables, table_stride, lengths, tails,
    k_payload, k_scales, k_zeros, k_stride, k_factor_stride, k_tails, k_tail_stride,
    v_payload, v_scales, v_zeros, v_stride, v_factor_stride, v_tails, v_tail_stride,
    SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    K_ELEMENT: tl.constexpr, K_TOP: tl.constexpr, K_CHANNEL: tl.constexpr,
    V_ELEMENT: tl.constexpr, V_TOP: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A program is one head of one touched page; without a list of them, of each sequence's last, for its one row."""
    item, head = tl.program_id(0), tl.program_id(1)
    if touched is None:
        sequence = item.to(tl.int64)
        length = tl.load(lengths + sequence)
        index, before, start = (length - 1) // PAGE, length - 1, sequence
    else:
        sequence = tl.load(touched + 2 * item).to(tl.int64)
        length = tl.load(lengths + sequence)
        index = tl.load(touched + 2 * item + 1)
        start = tl.load(starts + sequence).to(tl.int64)
        before = length - (tl.load(starts + sequence + 1) - start).to(tl.int32)
    if length == 0:
        return
    slot = tl.arange(0, SLOTS)
    first = index * PAGE
    is_full = first + PAGE <= length
    page = tl.load(tables + sequence * table_stride + index, mask=is_full, other=0).to(tl.int64)
    tail = tl.load(tails + sequence).to(tl.int64)
    _write_side(
        keys + start * k_token_stride + head * k_head_stride, k_token_stride, first + slot, slot, before, length,
        is_full, first >= before, page, head, k_tails + tail * k_tail_stride + head * PAGE * D,
        k_payload, k_scales, k_zeros, k_stride, k_factor_stride, D, DP, PAGE, K_ELEMENT, K_TOP, K_CHANNEL,
    )  # fmt: skip
    _write_side(
        values + start * v_token_stride + head * v_head_stride, v_token_stride, first + slot, slot, before, length,
        is_full, first >= before, page, head, v_tails + tail * v_tail_stride + head * PAGE * D,
        v_payload, v_scales, v_zeros, v_stride, v_factor_stride, D, DP, PAGE, V_ELEMENT, V_TOP, V_CHANNEL,
    )  # fmt: skip


def append_tails(
    layer: LayerPages,
    keys: Tensor,
    values: Tensor,
    sequences: SequencePages,
    touched: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write each sequence's one row, before attention reads it; or the pages of (`starts`, `full` or `open`)."""
    check_rows(layer, keys, values)
    if sequences.tails is None or layer.keys.tails is None:
        raise ValueError(f"{layer.keys.format} and {layer.values.format} pages have no tails: use append_pages")
    starts, items = (None, None) if touched is None else touched
    num_items = len(sequences.lengths) if items is None else len(items)
    if items is None and len(keys) != num_items:
        raise ValueError(f"keys {list(keys.shape)} must have one row for each of {num_items} sequences")
    if num_items == 0:
        return
    page_size, head_dim = layer.keys.tails.shape[2:]
    _append_tails_kernel[(num_items, keys.shape[1])](
        **row_arguments((keys, values)), touched=items, starts=starts, tables=sequences.tables,
        table_stride=sequences.tables.stride(0), lengths=sequences.lengths, tails=sequences.tails,
        **side_arguments("k", layer.keys), **side_arguments("v", layer.values), **tail_arguments(layer),
        SLOTS=triton.next_power_of_2(page_size), D=head_dim, DP=padded_dim(head_dim), PAGE=page_size,
        K_ELEMENT=layer.keys.format.element.value, K_TOP=top(layer.keys.format),
        K_CHANNEL=layer.keys.format.is_per_channel,
        V_ELEMENT=layer.values.format.element.value, V_TOP=top(layer.values.format),
        V_CHANNEL=layer.values.format.is_per_channel, num_warps=4,
    )  # fmt: skip
