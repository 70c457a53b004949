"""What the kernels over pages share: tiles of stored keys and values as numbers, and attention over such tiles.

Formats are those of `quantise`. Elements are multiplied as they are, integers exactly; scales and zero points of tokens
go onto scores and weights: q·k = (q·n) s + (Σ q) z, and Σ p v = Σ (p s) n + Σ p z. Those of channels, which change from
page to page, go onto the elements. Where a side has channels, the tokens behind a row's last full page are its *open*
ones, which are read in fp16: from the sequence's tail, and those of its chunk from the rows themselves.
Softmax is kept in base 2 over tiles (arXiv:2205.14135): the query comes scaled by log2(e).
"""

import triton
import triton.language as tl


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
def load_vectors(
    payload, scales, zeros, stride, factor_stride, page, head, slot, reads,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ELEMENT: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """[N, DP] in DOT: elements of one head in slots [N] of pages [N], times their factors where these are channels'."""
    WIDTH: tl.constexpr = D // 2 if ELEMENT == "int4" else D
    bases = page * stride + (head * PAGE + slot) * WIDTH
    if CHANNEL:
        dim = tl.arange(0, DP)
        place = (page * factor_stride + head * D)[:, None] + dim[None, :]
        mask = reads[:, None] & (dim < D)[None, :]
        numbers = load_numbers(payload, bases, reads, D, DP, ELEMENT, zeros is None, tl.float32)
        numbers *= tl.load(scales + place, mask=mask, other=0).to(tl.float32)
        if zeros is not None:
            numbers += tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
        vectors = numbers.to(DOT)
    else:
        vectors = load_numbers(payload, bases, reads, D, DP, ELEMENT, zeros is None, DOT)
    return vectors


@triton.jit
def rounded_vectors(x):
    """[N, DP] as fp16; a vector that is not finite there is NaN throughout, as `quantise` has it."""
    halves = x.to(tl.float16)
    fits = tl.min((tl.abs(halves.to(tl.float32)) < float("inf")).to(tl.int32), 1) == 1
    return tl.where(fits[:, None], halves.to(tl.float32), float("nan")).to(tl.float16)


@triton.jit
def load_open(
    tail, rows, token_stride, token, before, reads, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """[N, DP] fp16 of one head of tokens [N]: those below `before` from the tail's slots, others from their rows.

    `tail` and `rows` point at the head, in the sequence's tail and in its first row; there may be no rows.
    """
    dim = tl.arange(0, DP)
    live, slot = (dim < D)[None, :], token % PAGE
    mask = (reads & (token < before))[:, None] & live
    vectors = tl.load(tail + slot[:, None] * D + dim[None, :], mask=mask, other=0)
    if rows is not None:
        is_new = (reads & (token >= before))[:, None]
        place = (token - before).to(tl.int64)[:, None] * token_stride + dim[None, :]
        new = rounded_vectors(tl.load(rows + place, mask=is_new & live, other=0).to(tl.float32))
        vectors = tl.where(is_new, new, vectors)
    return vectors


@triton.jit
def tile_range(first_position, stored, window, sinks, TILE: tl.constexpr):
    """Tiles with tokens below `stored` that rows from `first_position` on see: the first `sink_tiles`, then from
    `first_tile` on; and how many.
    """
    low = tl.maximum(first_position - window + 1, 0)
    tiles = (stored + TILE - 1) // TILE
    first_tile = tl.where(low < stored, low // TILE, tiles)
    sink_tiles = tl.minimum((sinks + TILE - 1) // TILE, first_tile)
    return low, first_tile, sink_tiles, sink_tiles + tiles - first_tile


@triton.jit
def _fold(scores, out, largest, total):
    """The weights of a tile's scores; and sum, maximum and total of weights, rescaled to hold them."""
    reached = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(reached == -float("inf"), 0.0, reached)  # of a row that has seen nothing yet
    shrink = tl.exp2(largest - base)
    weights = tl.exp2(scores - base[:, None])
    return weights, out * shrink[:, None], reached, total * shrink + tl.sum(weights, 1)


@triton.jit
def _sees(token, positions, reads, window, sinks):
    """[ROWS, TILE]: whether the row's window or the sinks hold the token."""
    row = positions[:, None]
    return reads[None, :] & (token[None, :] <= row) & ((token[None, :] > row - window) | (token < sinks)[None, :])


@triton.jit
def attend_tiles(
    query, positions, begin, end, low, first_tile, sink_tiles, stored, window, sinks, table, head,
    k_payload, k_scales, k_zeros, k_stride, k_factor_stride, v_payload, v_scales, v_zeros, v_stride, v_factor_stride,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, OPEN: tl.constexpr, TILE: tl.constexpr,
    K_ELEMENT: tl.constexpr, K_CHANNEL: tl.constexpr, V_ELEMENT: tl.constexpr, V_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Rows `query` [ROWS, DP] at `positions` over the tiles begin … end of `tile_range`: (weighted sum, max, sum).

    Reads only tokens below `stored` that some row may see: others' slots may hold anything, and their pages be freed.
    A row sees whole runs of OPEN tokens, the page size or 1.
    """
    DOT: tl.constexpr = query.dtype
    query_sum = tl.sum(query.to(tl.float32), 1)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DP], tl.float32)
    for step in range(begin, end):
        tile = tl.where(step < sink_tiles, step, step - sink_tiles + first_tile)
        token = tile * TILE + tl.arange(0, TILE)
        reads = (token < stored) & ((token >= low) | (token < sinks))
        page = tl.load(table + token // PAGE, mask=reads, other=0).to(tl.int64)
        slot = token % PAGE
        keys = load_vectors(
            k_payload, k_scales, k_zeros, k_stride, k_factor_stride, page, head, slot, reads,
            D, DP, PAGE, K_ELEMENT, K_CHANNEL, DOT,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
        if k_scales is not None and not K_CHANNEL:
            factor = page * k_factor_stride + head * PAGE + slot
            scores *= tl.load(k_scales + factor, mask=reads, other=0).to(tl.float32)[None, :]
            if k_zeros is not None:
                zeros = tl.load(k_zeros + factor, mask=reads, other=0).to(tl.float32)
                scores += query_sum[:, None] * zeros[None, :]
        sees = _sees(token, positions, reads, window, sinks)
        if OPEN > 1:
            sees &= token[None, :] < ((positions + 1) // OPEN * OPEN)[:, None]
        weights, out, largest, total = _fold(tl.where(sees, scores, -float("inf")), out, largest, total)
        values = load_vectors(
            v_payload, v_scales, v_zeros, v_stride, v_factor_stride, page, head, slot, reads,
            D, DP, PAGE, V_ELEMENT, V_CHANNEL, DOT,
        )  # fmt: skip
        if v_scales is not None and not V_CHANNEL:
            factor = page * v_factor_stride + head * PAGE + slot
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


@triton.jit
def attend_open(
    query, positions, out, largest, total, last, before, low, window, sinks,
    k_tail, v_tail, k_rows, k_token_stride, v_rows, v_token_stride,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What `attend_tiles` gave, and the rows' open tokens up to `last` besides; pointers as of `load_open`."""
    DOT: tl.constexpr = query.dtype
    opens = (positions + 1) // PAGE * PAGE
    for begin in range(tl.min(opens, 0), last + 1, TILE):
        token = begin + tl.arange(0, TILE)
        reads = (token <= last) & ((token >= low) | (token < sinks))
        keys = load_open(k_tail, k_rows, k_token_stride, token, before, reads, D, DP, PAGE).to(DOT)
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
        sees = _sees(token, positions, reads, window, sinks) & (token[None, :] >= opens[:, None])
        weights, out, largest, total = _fold(tl.where(sees, scores, -float("inf")), out, largest, total)
        values = load_open(v_tail, v_rows, v_token_stride, token, before, reads, D, DP, PAGE).to(DOT)
        out += tl.dot(weights.to(DOT), values, input_precision="tf32x3")
    return out, largest, total
