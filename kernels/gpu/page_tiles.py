"""What the kernels over pages share: tiles of stored keys and values as numbers, and attention over such tiles.

Formats are those of `quantise`. Elements are multiplied as they are, integers exactly; scales and zero points go onto
scores and weights: q·k = (q·n) s + (Σ q) z, and Σ p v = Σ (p s) n + Σ p z.
Softmax is kept in base 2 over tiles (arXiv:2205.14135): the query comes scaled by log2(e).
"""

import torch
import triton
import triton.language as tl

from pageferry.kernels.append_pages import LayerPages, SidePages

NO_WINDOW = 1 << 30  # wider than any sequence
DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def decode_fp8(codes):
    """Codes uint8 of e4m3 as fp16, exactly, by integer operations; NaN would be 480, but none is stored."""
    bits = codes.to(tl.int8, bitcast=True).to(tl.int16)
    return ((bits << 7) & -16385).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def load_numbers(
    payload,
    bases,
    reads,
    D: tl.constexpr,
    DP: tl.constexpr,
    ELEMENT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DOT: tl.constexpr,
):
    """[N, DP] in DOT: the vectors that begin at elements `bases` [N] of a side's payload; 0 where not `reads` [N]."""
    if ELEMENT == "int4":
        byte = tl.arange(0, DP // 2)
        mask = reads[:, None] & (byte < D // 2)[None, :]
        packed = tl.load(payload + bases[:, None] + byte[None, :], mask=mask, other=0)
        if SYMMETRIC:
            packed = packed.to(tl.int8, bitcast=True)  # shifts to the right fill with the sign
            low, high = (packed << 4) >> 4, packed >> 4
        else:
            low, high = packed & 15, packed >> 4
        return tl.interleave(low.to(DOT), high.to(DOT))
    dim = tl.arange(0, DP)
    mask = reads[:, None] & (dim < D)[None, :]
    stored = tl.load(payload + bases[:, None] + dim[None, :], mask=mask, other=0)
    if ELEMENT == "fp8_e4m3":
        return decode_fp8(stored).to(DOT)
    return stored.to(DOT)


@triton.jit
def tile_range(first_position, last_position, window, sinks, TILE: tl.constexpr):
    """Tiles that rows at these positions see: the first `sink_tiles`, then from `first_tile` on; and how many."""
    low = tl.maximum(first_position - window + 1, 0)
    first_tile = low // TILE
    sink_tiles = tl.minimum((sinks + TILE - 1) // TILE, first_tile)
    return low, first_tile, sink_tiles, sink_tiles + last_position // TILE + 1 - first_tile


@triton.jit
def attend_tiles(
    query, positions, begin, end, low, first_tile, sink_tiles, length, window, sinks, table, head,
    k_payload, k_scales, k_zeros, k_stride, k_factor_stride, v_payload, v_scales, v_zeros, v_stride, v_factor_stride,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    K_ELEMENT: tl.constexpr, V_ELEMENT: tl.constexpr,
):  # fmt: skip
    """Rows `query` [ROWS, DP] at `positions` over the tiles begin … end of `tile_range`: (weighted sum, max, sum).

    Reads only tokens below `length` that some row may see: others' slots may hold anything, and their pages be freed.
    """
    DOT: tl.constexpr = query.dtype
    K_WIDTH: tl.constexpr = D // 2 if K_ELEMENT == "int4" else D
    V_WIDTH: tl.constexpr = D // 2 if V_ELEMENT == "int4" else D
    query_sum = tl.sum(query.to(tl.float32), 1)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DP], tl.float32)
    for step in range(begin, end):
        tile = tl.where(step < sink_tiles, step, step - sink_tiles + first_tile)
        token = tile * TILE + tl.arange(0, TILE)
        reads = (token < length) & ((token >= low) | (token < sinks))
        page = tl.load(table + token // PAGE, mask=reads, other=0).to(tl.int64)
        vector = head * PAGE + token % PAGE
        keys = load_numbers(
            k_payload, page * k_stride + vector * K_WIDTH, reads, D, DP, K_ELEMENT, k_zeros is None, DOT
        )
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
        if k_scales is not None:
            factor = page * k_factor_stride + vector
            scores *= tl.load(k_scales + factor, mask=reads, other=0).to(tl.float32)[None, :]
            if k_zeros is not None:
                zeros = tl.load(k_zeros + factor, mask=reads, other=0).to(tl.float32)
                scores += query_sum[:, None] * zeros[None, :]
        row = positions[:, None]
        sees = reads[None, :] & (token[None, :] <= row) & ((token[None, :] > row - window) | (token < sinks)[None, :])
        scores = tl.where(sees, scores, -float("inf"))
        reached = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(reached == -float("inf"), 0.0, reached)  # of a row that has seen nothing yet
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        largest = reached
        total = total * shrink + tl.sum(weights, 1)
        out *= shrink[:, None]
        values = load_numbers(
            v_payload, page * v_stride + vector * V_WIDTH, reads, D, DP, V_ELEMENT, v_zeros is None, DOT
        )
        if v_scales is not None:
            factor = page * v_factor_stride + vector
            if v_zeros is not None:
                zeros = tl.load(v_zeros + factor, mask=reads, other=0).to(tl.float32)
                out += tl.sum(weights * zeros[None, :], 1)[:, None]
            # Relative to the tile's largest, so that small scales don't vanish in fp16.
            scales = tl.load(v_scales + factor, mask=reads, other=0).to(tl.float32)
            unit = tl.max(scales, 0)
            out += tl.dot((weights * (scales / unit)[None, :]).to(DOT), values, input_precision="tf32x3") * unit
        else:
            out += tl.dot(weights.to(DOT), values, input_precision="tf32x3")
    return out, largest, total


def side_arguments(prefix: str, side: SidePages) -> dict[str, object]:
    """A side's pointers and strides, as kernels name them; what it lacks is None, and so compiled away."""
    return {
        f"{prefix}_payload": side.payload,
        f"{prefix}_scales": side.scales,
        f"{prefix}_zeros": side.zeros,
        f"{prefix}_stride": side.payload.stride(0),
        f"{prefix}_factor_stride": 0 if side.scales is None else side.scales.stride(0),
    }


def attention_arguments(
    layer: LayerPages, head_dim: int, window: int | None, sinks: int, dtype: torch.dtype
) -> dict[str, object]:
    """What decode and prefill attention have in common."""
    return {
        **side_arguments("k", layer.keys),
        **side_arguments("v", layer.values),
        "window": NO_WINDOW if window is None else window,
        "sinks": 0 if window is None else sinks,
        "D": head_dim,
        "DP": padded_dim(head_dim),
        "PAGE": layer.keys.payload.shape[2],
        "DOT": DOT_DTYPES[dtype],
        "num_stages": 2,
        "K_ELEMENT": layer.keys.format.element.value,
        "V_ELEMENT": layer.values.format.element.value,
    }


def padded_dim(head_dim: int) -> int:
    """Tiles are powers of two, and products need 16."""
    return max(16, triton.next_power_of_2(head_dim))


def check_attention(query: torch.Tensor, layer: LayerPages, window: int | None, sinks: int, dtype: torch.dtype) -> None:
    """Raise ValueError for what the kernels can't compute rightly."""
    num_heads, head_dim = query.shape[1:]
    for side in (layer.keys, layer.values):
        if num_heads % side.payload.shape[1]:
            raise ValueError(f"{num_heads} query heads must be a multiple of {side.payload.shape[1]} KV heads")
        width = head_dim * side.format.element.bits // 8 // side.payload.element_size()
        if side.payload.shape[3] != width:
            raise ValueError(f"payload's rows are {side.payload.shape[3]} elements wide, must be {width}")
        if dtype == torch.float16 and side.format.element.value in ("fp32", "bf16"):
            raise ValueError(f"{side.format} pages can exceed fp16; compute in bf16 or fp32")
    if query.stride(2) != 1:
        raise ValueError("query's numbers of a head must lie side by side")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be at least 1")
    if sinks < 0:
        raise ValueError(f"sinks is {sinks}, must be at least 0")


def check_tables(tables: torch.Tensor, lengths: torch.Tensor, num_seqs: int) -> None:
    """Raise ValueError where page tables and lengths are not those of so many sequences."""
    if tables.shape[0] != num_seqs or lengths.shape != (num_seqs,) or tables.stride(1) != 1:
        raise ValueError(
            f"tables {list(tables.shape)} and lengths {list(lengths.shape)} must be of {num_seqs} sequences"
        )
