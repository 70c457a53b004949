"""Decode attention over pages: one row a sequence, which is the last of its tokens.

out[s] = softmax(q[s] Kᵀ · scale) V over positions p that are seen: all, or with a window W the last W and p < sinks.
Query head h reads KV head h // (H / Hk). Shapes: query [S, H, D]; tables [S, n] int32, pages of positions 0, B, 2 B …,
entries outside the window are not read; lengths [S] int32, 0 gives a row of zeros; out [S, H, D] fp32. Where a sequence
has a tail, its open tokens are all there, the row's own included.

Each split of 4 tiles of tokens is one program and leaves its normalised sum and log-sum-exp; a second kernel joins them
(flash decoding). Splits are of one size, so that a row's result doesn't depend on the batch it is in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.gpu.page_arguments import (
    SequencePages,
    attention_arguments,
    check_attention,
    padded_dim,
)
from pageferry.kernels.gpu.page_tiles import attend_open, attend_tiles, tile_range

SPLIT_TILES = 4
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_splits"])
def _decode_kernel(
    query, query_stride, head_stride, tables, table_stride, lengths, tails, partial, logs, num_splits, scale,
    window, sinks, k_payload, k_scales, k_zeros, k_stride, k_factor_stride, k_tails, k_tail_stride,
    v_payload, v_scales, v_zeros, v_stride, v_factor_stride, v_tails, v_tail_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    OPEN: tl.constexpr, TILE: tl.constexpr, OPEN_TILE: tl.constexpr, SPLIT_TILES: tl.constexpr, DOT: tl.constexpr,
    K_ELEMENT: tl.constexpr, K_CHANNEL: tl.constexpr, V_ELEMENT: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A program is one (sequence, KV head, split) and has the head's GROUP query heads as rows."""
    sequence, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    stored = length // OPEN * OPEN
    low, first_tile, sink_tiles, num_tiles = tile_range(length - 1, stored, window, sinks, TILE)
    begin = split * SPLIT_TILES
    # There is one split at least, and the last one has the open tokens.
    if (begin >= tl.maximum(num_tiles, 1)) | (length == 0):
        return
    member, dim = tl.arange(0, ROWS), tl.arange(0, DP)
    query_head = head * GROUP + member
    mask = (member < GROUP)[:, None] & (dim < D)[None, :]
    rows = tl.load(
        query + sequence * query_stride + query_head[:, None] * head_stride + dim[None, :], mask=mask, other=0
    )
    rows = (rows.to(tl.float32) * scale).to(DOT)
    positions = tl.zeros([ROWS], tl.int32) + (length - 1)
    out, largest, total = attend_tiles(
        rows, positions, begin, tl.minimum(begin + SPLIT_TILES, num_tiles), low, first_tile, sink_tiles, stored,
        window, sinks, tables + sequence * table_stride, head, k_payload, k_scales, k_zeros, k_stride, k_factor_stride,
        v_payload, v_scales, v_zeros, v_stride, v_factor_stride,
        ROWS, D, DP, PAGE, OPEN, TILE, K_ELEMENT, K_CHANNEL, V_ELEMENT, V_CHANNEL,
    )  # fmt: skip
    if OPEN > 1:
        if begin + SPLIT_TILES >= num_tiles:
            tail = tl.load(tails + sequence).to(tl.int64)
            out, largest, total = attend_open(
                rows, positions, out, largest, total, length - 1, length, low, window, sinks,
                k_tails + tail * k_tail_stride + head * PAGE * D, v_tails + tail * v_tail_stride + head * PAGE * D,
                None, 0, None, 0, D, DP, PAGE, OPEN_TILE,
            )  # fmt: skip
    place = (sequence * tl.num_programs(1) * GROUP + query_head) * num_splits + split
    tl.store(partial + place[:, None] * D + dim[None, :], out / total[:, None], mask=mask)
    tl.store(logs + place, largest + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial, logs, lengths, out, num_splits, window, sinks,
    D: tl.constexpr, DP: tl.constexpr, OPEN: tl.constexpr, TILE: tl.constexpr, SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """A program joins the splits of one (sequence, query head), in their order."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + sequence)
    _, _, _, num_tiles = tile_range(length - 1, length // OPEN * OPEN, window, sinks, TILE)
    used = tl.where(length == 0, 0, (tl.maximum(num_tiles, 1) + SPLIT_TILES - 1) // SPLIT_TILES)
    place = sequence * tl.num_programs(1) + head
    dim = tl.arange(0, DP)
    reached, total, joined = -float("inf"), 0.0, tl.zeros([DP], tl.float32)
    for split in range(used):
        log = tl.load(logs + place * num_splits + split)
        part = tl.load(partial + (place * num_splits + split) * D + dim, mask=dim < D, other=0)
        larger = tl.maximum(reached, log)
        shrink, weight = tl.exp2(reached - larger), tl.exp2(log - larger)
        joined = joined * shrink + part * weight
        total = total * shrink + weight
        reached = larger
    tl.store(out + place * D + dim, joined / tl.where(used == 0, 1.0, total), mask=dim < D)


def decode_attention(
    query: Tensor, layer: LayerPages, sequences: SequencePages, scale: float, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Products are of `dtype`, all else is fp32. Nothing is read back: a CUDA graph can hold it."""
    check_attention(query, layer, sequences, dtype)
    num_seqs, num_heads, head_dim = query.shape
    if len(sequences.tables) != num_seqs:
        raise ValueError(f"query {list(query.shape)} must have a row for each of {len(sequences.tables)} sequences")
    num_kv_heads, page_size = layer.keys.payload.shape[1:3]
    tile = tile_tokens(dtype)
    shared = attention_arguments(layer, sequences, dtype)
    num_splits = most_splits(sequences.tables.shape[1] * page_size, layer.window, shared["sinks"], tile)
    partial = query.new_empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32)
    logs = query.new_empty((num_seqs, num_heads, num_splits), dtype=torch.float32)
    out = query.new_empty(query.shape, dtype=torch.float32)
    group = num_heads // num_kv_heads
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        query=query, query_stride=query.stride(0), head_stride=query.stride(1), partial=partial, logs=logs,
        num_splits=num_splits, scale=scale * _LOG2_E, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        TILE=tile, OPEN_TILE=open_tile(page_size), SPLIT_TILES=SPLIT_TILES, num_warps=num_warps(head_dim), **shared,
    )  # fmt: skip
    _combine_kernel[(num_seqs, num_heads)](
        partial, logs, sequences.lengths, out, num_splits, shared["window"], shared["sinks"],
        D=head_dim, DP=padded_dim(head_dim), OPEN=shared["OPEN"], TILE=tile, SPLIT_TILES=SPLIT_TILES, num_warps=1,
    )  # fmt: skip
    return out


def open_tile(page_size: int) -> int:
    """Open tokens that are read at once."""
    return min(32, padded_dim(page_size))


def tile_tokens(dtype: torch.dtype) -> int:
    """Tokens that are read at once, as many as registers hold; fp32 is multiplied as three parts."""
    return 32 if dtype == torch.float32 else 64


def num_warps(head_dim: int) -> int:
    return 4 if padded_dim(head_dim) <= 64 else 8


def most_splits(num_tokens: int, window: int | None, sinks: int, tile: int) -> int:
    """Splits of a sequence of up to `num_tokens`, of which a window hides some."""
    tiles = -(-num_tokens // tile)
    if window is not None:
        tiles = min(tiles, -(-sinks // tile) + (window + tile - 2) // tile + 1)
    return max(1, -(-tiles // SPLIT_TILES))
