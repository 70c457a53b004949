"""Decode attention over pages: one row a sequence, which is the last of its tokens.

out[s] = softmax(q[s] Kᵀ · scale) V over positions p that are seen: all, or with a window W the last W and p < sinks.
Query head h reads KV head h // (H / Hk). Shapes: query [S, H, D]; tables [S, n] int32, pages of positions 0, B, 2 B …,
entries outside the window are not read; lengths [S] int32, 0 gives a row of zeros; out [S, H, D] fp32.

Each split of 4 tiles of tokens is one program and leaves its normalised sum and log-sum-exp; a second kernel joins them
(flash decoding). Splits are of one size, so that a row's result doesn't depend on the batch it is in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.gpu.page_tiles import (
    attend_tiles,
    attention_arguments,
    check_attention,
    check_tables,
    padded_dim,
    tile_range,
)

SPLIT_TILES = 4
_LOG2_E = 1.4426950408889634


@triton.jit
def _decode_kernel(
    query, query_stride, head_stride, tables, table_stride, lengths, partial, logs, num_splits, scale, window, sinks,
    k_payload, k_scales, k_zeros, k_stride, k_factor_stride, v_payload, v_scales, v_zeros, v_stride, v_factor_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SPLIT_TILES: tl.constexpr, K_ELEMENT: tl.constexpr, V_ELEMENT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A program is one (sequence, KV head, split) and has the head's GROUP query heads as rows."""
    sequence, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    low, first_tile, sink_tiles, num_tiles = tile_range(length - 1, length - 1, window, sinks, TILE)
    begin = split * SPLIT_TILES
    if (begin >= num_tiles) | (length == 0):
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
        rows, positions, begin, tl.minimum(begin + SPLIT_TILES, num_tiles), low, first_tile, sink_tiles, length,
        window, sinks, tables + sequence * table_stride, head, k_payload, k_scales, k_zeros, k_stride, k_factor_stride,
        v_payload, v_scales, v_zeros, v_stride, v_factor_stride,
        ROWS, D, DP, PAGE, TILE, K_ELEMENT, V_ELEMENT,
    )  # fmt: skip
    place = (sequence * tl.num_programs(1) * GROUP + query_head) * num_splits + split
    tl.store(partial + place[:, None] * D + dim[None, :], out / total[:, None], mask=mask)
    tl.store(logs + place, largest + tl.log2(total), mask=member < GROUP)


@triton.jit
def _combine_kernel(
    partial, logs, lengths, out, num_splits, window, sinks,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, SPLIT_TILES: tl.constexpr,
):  # fmt: skip
    """A program joins the splits of one (sequence, query head), in their order."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + sequence)
    _, _, _, num_tiles = tile_range(length - 1, length - 1, window, sinks, TILE)
    used = tl.where(length == 0, 0, (num_tiles + SPLIT_TILES - 1) // SPLIT_TILES)
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
    query: Tensor,
    layer: LayerPages,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Products are of `dtype`, all else is fp32. Nothing is read back: a CUDA graph can hold it."""
    check_attention(query, layer, window, sinks, dtype)
    num_seqs, num_heads, head_dim = query.shape
    check_tables(tables, lengths, num_seqs)
    num_kv_heads, page_size = layer.keys.payload.shape[1:3]
    tile = tile_tokens(dtype)
    num_splits = most_splits(tables.shape[1] * page_size, window, sinks, tile)
    shared = attention_arguments(layer, head_dim, window, sinks, dtype)
    partial = query.new_empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32)
    logs = query.new_empty((num_seqs, num_heads, num_splits), dtype=torch.float32)
    out = query.new_empty(query.shape, dtype=torch.float32)
    group = num_heads // num_kv_heads
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        query=query, query_stride=query.stride(0), head_stride=query.stride(1), tables=tables,
        table_stride=tables.stride(0), lengths=lengths, partial=partial, logs=logs, num_splits=num_splits,
        scale=scale * _LOG2_E, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        TILE=tile, SPLIT_TILES=SPLIT_TILES, num_warps=num_warps(head_dim), **shared,
    )  # fmt: skip
    _combine_kernel[(num_seqs, num_heads)](
        partial, logs, lengths, out, num_splits, shared["window"], shared["sinks"],
        D=head_dim, DP=padded_dim(head_dim), TILE=tile, SPLIT_TILES=SPLIT_TILES, num_warps=1,
    )  # fmt: skip
    return out


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


def attention_ref(
    query: Tensor,
    layer: LayerPages,
    table: list[int],
    positions: Tensor,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """One sequence under a full mask: rows at `positions`, of which the last is its last token."""
    length = int(positions[-1]) + 1
    group = query.shape[1] // layer.keys.payload.shape[1]
    keys, values = (
        side.read()[table].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0)
        for side in (layer.keys, layer.values)
    )  # [H, length, D]
    seen, row = torch.arange(length)[None, :], positions[:, None]
    hidden = seen > row
    if window is not None:
        hidden |= (seen <= row - window) & (seen >= sinks)
    scores = torch.einsum("rhd,htd->hrt", query.float(), keys).mul_(scale).masked_fill_(hidden, float("-inf"))
    # Hidden tokens' pages may be freed, and hold NaN.
    unseen = hidden.all(0)
    return torch.einsum("hrt,htd->rhd", scores.softmax(-1), values.masked_fill(unseen[None, :, None], 0))
