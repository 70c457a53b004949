"""Prefill attention over pages: chunks of many sequences, of unlike lengths, without padding.

A chunk's tokens are its sequence's last, and are in the pages already, as stored: cached and new tokens read alike.
Where sequences have tails, a row's open tokens come from there and from the chunk's own rows, which the tails lack.
out[t] = softmax(q[t] Kᵀ · scale) V over positions p ≤ position[t]; with a window W, p > position[t] - W or p < sinks.
Shapes: query [T, H, D], sequence after sequence; tables [S, n] and lengths [S] as in paged_attention; out [T, H, D]
fp32.

A program takes some of the (row, query head) pairs of one KV head, so that each page is read once for all of them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.gpu.page_arguments import (
    SequencePages,
    attention_arguments,
    check_attention,
    dim_of,
    padded_dim,
    row_arguments,
)
from pageferry.kernels.gpu.page_tiles import attend_open, attend_tiles, tile_range

TILE = 32  # tokens that are read at once
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which rows belong to which sequence; made once a step, for all layers."""

    pairs: int  # of a program
    starts: Tensor  # [S + 1] int32: first row of each sequence, and T
    blocks: Tensor  # [programs, 2] int32: sequence, and first pair in it

    @classmethod
    def of(cls, counts: list[int], num_heads: int, layer: LayerPages, dtype: torch.dtype) -> "Chunks":
        """Chunks of `counts` rows each, with `num_heads` query heads, that are multiplied in `dtype`."""
        pairs = num_pairs(dim_of(layer), layer.keys.tails is not None, dtype)
        group, device = num_heads // layer.keys.payload.shape[1], layer.keys.payload.device
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        blocks = [(i, pair) for i, count in enumerate(counts) for pair in range(0, count * group, pairs)]
        return cls(
            pairs,
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(blocks, dtype=torch.int32, device=device).view(-1, 2),
        )


@triton.jit
def _prefill_kernel(
    query, query_stride, head_stride, keys, k_token_stride, k_head_stride, values, v_token_stride, v_head_stride,
    tables, table_stride, lengths, tails, starts, blocks, out, scale, window, sinks,
    k_payload, k_scales, k_zeros, k_stride, k_factor_stride, k_tails, k_tail_stride,
    v_payload, v_scales, v_zeros, v_stride, v_factor_stride, v_tails, v_tail_stride,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    OPEN: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
    K_ELEMENT: tl.constexpr, K_CHANNEL: tl.constexpr, V_ELEMENT: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(blocks + 2 * block).to(tl.int64)
    first_pair = tl.load(blocks + 2 * block + 1)
    start = tl.load(starts + sequence)
    num_rows = tl.load(starts + sequence + 1) - start
    before = tl.load(lengths + sequence) - num_rows  # tokens of earlier chunks
    pair, dim = first_pair + tl.arange(0, PAIRS), tl.arange(0, DP)
    row, query_head = pair // GROUP, head * GROUP + pair % GROUP
    last_row = tl.minimum((first_pair + PAIRS - 1) // GROUP, num_rows - 1)
    mask = (row < num_rows)[:, None] & (dim < D)[None, :]
    token = (start + row).to(tl.int64)
    place = token[:, None] * query_stride + query_head[:, None] * head_stride + dim[None, :]
    rows = (tl.load(query + place, mask=mask, other=0).to(tl.float32) * scale).to(DOT)
    positions = before + tl.minimum(row, last_row)
    stored = (before + last_row + 1) // OPEN * OPEN
    low, first_tile, sink_tiles, num_tiles = tile_range(before + first_pair // GROUP, stored, window, sinks, TILE)
    result, largest, total = attend_tiles(
        rows, positions, 0, num_tiles, low, first_tile, sink_tiles, stored,
        window, sinks, tables + sequence * table_stride, head, k_payload, k_scales, k_zeros, k_stride, k_factor_stride,
        v_payload, v_scales, v_zeros, v_stride, v_factor_stride,
        PAIRS, D, DP, PAGE, OPEN, TILE, K_ELEMENT, K_CHANNEL, V_ELEMENT, V_CHANNEL,
    )  # fmt: skip
    if OPEN > 1:
        tail = tl.load(tails + sequence).to(tl.int64)
        first_token = start.to(tl.int64)
        result, largest, total = attend_open(
            rows, positions, result, largest, total, before + last_row, before, low, window, sinks,
            k_tails + tail * k_tail_stride + head * PAGE * D, v_tails + tail * v_tail_stride + head * PAGE * D,
            keys + first_token * k_token_stride + head * k_head_stride, k_token_stride,
            values + first_token * v_token_stride + head * v_head_stride, v_token_stride,
            D, DP, PAGE, TILE,
        )  # fmt: skip
    place = (token * (tl.num_programs(1) * GROUP) + query_head)[:, None] * D + dim[None, :]
    tl.store(out + place, result / total[:, None], mask=mask)


def prefill_attention(
    query: Tensor,
    layer: LayerPages,
    sequences: SequencePages,
    chunks: Chunks,
    scale: float,
    *,
    new: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Products are of `dtype`, all else is fp32; `chunks` must be of these rows, this model and this dtype.

    `new` are the rows' keys and values [T, Hk, D], strided but for D, for sequences that have tails.
    """
    check_attention(query, layer, sequences, dtype)
    num_heads, head_dim = query.shape[1:]
    num_seqs = len(chunks.starts) - 1
    if len(sequences.tables) != num_seqs:
        raise ValueError(f"tables {list(sequences.tables.shape)} must be of {num_seqs} sequences")
    num_kv_heads = layer.keys.payload.shape[1]
    out = query.new_empty(query.shape, dtype=torch.float32)
    if len(chunks.blocks):
        shared = attention_arguments(layer, sequences, dtype)
        _prefill_kernel[(len(chunks.blocks), num_kv_heads)](
            query=query, query_stride=query.stride(0), head_stride=query.stride(1), **row_arguments(new),
            starts=chunks.starts, blocks=chunks.blocks, out=out,
            scale=scale * _LOG2_E, GROUP=num_heads // num_kv_heads, PAIRS=chunks.pairs, TILE=TILE,
            num_warps=num_warps(head_dim, layer.keys.tails is not None, dtype), **shared,
        )  # fmt: skip
    return out


def num_pairs(head_dim: int, has_tails: bool, dtype: torch.dtype) -> int:
    """As many as registers hold; fp32 is multiplied as three parts."""
    if dtype == torch.float32:
        return 16
    return 32 if has_tails and padded_dim(head_dim) > 64 else 64


def num_warps(head_dim: int, has_tails: bool, dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return 8
    return 4 if has_tails or padded_dim(head_dim) <= 64 else 8
