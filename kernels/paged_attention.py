"""Attention of a flat batch over paged keys and values, as the pages store them.

out[t] = softmax(q[t] Kᵀ · scale + mask) V over the positions that token t sees: p ≤ position[t], and with a window W
p > position[t] - W. Query head h reads KV head h // (H / Hk). Softmax in fp32.
Shapes: query [T, H, D] fp32; out the same; pages as in append_pages, which has stored the batch's own tokens already.

Compiled, a row's bits depend on its position and the pages alone: not on its batch, its chunk, or the threads.

For torch, a batch is a list of segments: sequences that have equally many rows, padded to equally many pages. One
decode step's sequences make few segments, a prefill chunk is one of its own. Query heads are folded into rows, so that
each KV head's pages are read once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pageferry.kernels import cpu_library
from pageferry.kernels.append_pages import LayerPages, SidePages
from pageferry.kernels.cpu_library import CpuKernels, byref
from pageferry.kernels.quantise import numbers
from pageferry.kernels.sequences import Sequences

# Scores of a bf16 chunk that are held at once: 8 MB, more is computed one KV head after the other.
_MAX_SCORES = 1 << 22
_ROW_STEP = 32


@dataclass(frozen=True, slots=True)
class Segment:
    """S sequences of R rows and n pages each; a shorter one is padded with pages of its own, which `mask` hides."""

    rows: Tensor  # [S * R] of the batch, ascending: sequence after sequence
    pages: Tensor  # [S * n]
    num_seqs: int
    mask: Tensor  # [S, R, n * B] fp32: 0 where visible, else -inf
    masked_from: int  # the first of the n * B columns that is hidden from any row
    unused: tuple[Tensor, Tensor]  # (page of the segment, slot) pairs of all slots that hold no token yet

    @property
    def num_rows(self) -> int:
        return self.mask.shape[1]


def paged_attention(
    query: Tensor, layer: LayerPages, segments: list[Segment], scale: float, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The query is fp32; several rows of a sequence are multiplied in `dtype`, single rows always in fp32."""
    query = query * scale
    out = torch.empty_like(query)
    for segment in segments:
        whole = len(segment.rows) == len(query)
        rows = query if whole else query.index_select(0, segment.rows)
        if segment.num_rows == 1:
            result = _attend_single(rows, layer, segment)
        else:
            result = _attend_chunk(rows.to(dtype), layer, segment).float()
        if whole:
            return result
        out.index_copy_(0, segment.rows, result)
    return out


def _attend_single(query: Tensor, layer: LayerPages, segment: Segment) -> Tensor:
    """One row a sequence: elements are multiplied as they are; scales and zero points go onto scores and weights."""
    num_seqs, (num_rows, num_heads, dim) = segment.num_seqs, query.shape
    keys = _gather(layer.keys, segment, torch.float32)
    num_kv_heads = keys.numbers.shape[1]
    folded = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, dim)
    scores = torch.matmul(folded, keys.numbers.transpose(-1, -2))  # [S, Hk, G, n * B]
    if keys.scales is not None:
        scores.mul_(keys.scales.unsqueeze(2))
    if keys.zeros is not None:
        scores.add_(folded.sum(-1, keepdim=True) * keys.zeros.unsqueeze(2))
    weights = torch.softmax(scores.add_(segment.mask.unsqueeze(1)), dim=-1)
    values = _gather(layer.values, segment, torch.float32)
    offset = None if values.zeros is None else torch.matmul(weights, values.zeros.unsqueeze(-1))
    if values.scales is not None:
        weights.mul_(values.scales.unsqueeze(2))
    out = torch.matmul(weights, values.numbers)
    return (out if offset is None else out.add_(offset)).view(num_rows, num_heads, dim)


def _attend_chunk(query: Tensor, layer: LayerPages, segment: Segment) -> Tensor:
    """Many rows of one sequence: the pages are dequantised once."""
    keys = _gather(layer.keys, segment, query.dtype).dequantised()  # [Hk, n * B, D]
    values = _gather(layer.values, segment, query.dtype).dequantised()
    heads = query.transpose(0, 1)  # [H, R, D]
    if query.dtype == torch.bfloat16:
        out = _attend_bf16(heads, keys, values, segment)
    else:
        out = functional.scaled_dot_product_attention(
            heads[None], keys[None], values[None], segment.mask[None], scale=1.0, enable_gqa=True
        )[0]
    return out.transpose(0, 1)


def _attend_bf16(heads: Tensor, keys: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """Three plain products: oneDNN multiplies bf16 at more than twice the speed of torch's fused attention.

    Scores and weights are rounded to bf16 between them, sums are fp32. Over 1,536 tokens of text, SmolLM2's mean KL
    divergence from fp32 is the same to two digits as with fp32 scores. Rows and slots are padded to few sizes, since
    oneDNN keeps up to a megabyte of code and buffers for each shape that it has met.
    """
    (num_heads, num_rows, dim), num_kv_heads, num_seen = heads.shape, keys.shape[0], keys.shape[1]
    more_rows, more_slots = -num_rows % _ROW_STEP, _padded_slots(num_seen) - num_seen
    folded = functional.pad(heads, (0, 0, 0, more_rows)).reshape(num_kv_heads, -1, dim)  # [Hk, G * R, D]
    keys, values = (functional.pad(numbers, (0, 0, 0, more_slots)) for numbers in (keys, values))
    hidden = functional.pad(segment.mask[0, :, segment.masked_from :], (0, more_slots), value=float("-inf"))
    hidden = functional.pad(hidden, (0, 0, 0, more_rows)).to(heads.dtype)
    num_slots = num_seen + more_slots
    step = max(1, _MAX_SCORES // (folded.shape[1] * num_slots))
    out = torch.empty_like(folded)
    for head in range(0, num_kv_heads, step):
        part = slice(head, head + step)
        scores = torch.bmm(folded[part], keys[part].transpose(1, 2))
        scores.view(-1, num_rows + more_rows, num_slots)[:, :, segment.masked_from :].add_(hidden)
        torch.bmm(torch.softmax(scores, dim=-1), values[part], out=out[part])
    return out.view(num_heads, -1, dim)[:, :num_rows]


def _padded_slots(num_slots: int) -> int:
    """The next of the few sizes that are multiplied: four to each power of two, at least 64 apart."""
    step = max(64, 1 << max(0, num_slots.bit_length() - 3))
    return -(-num_slots // step) * step


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A segment's keys or values; slots without a token read as 0. Scales and zero points are fp32."""

    numbers: Tensor  # [S, Hk, n * B, D] of the dtype that was asked for
    scales: Tensor | None  # [S, Hk, n * B]
    zeros: Tensor | None  # [S, Hk, n * B]

    def dequantised(self) -> Tensor:
        """[Hk, n * B, D] of a segment of one sequence; overwrites the numbers."""
        numbers = self.numbers[0]
        if self.scales is None:
            return numbers
        scales = self.scales[0].unsqueeze(-1)
        if self.zeros is None:
            return numbers.mul_(scales.to(numbers.dtype))
        # A zero point takes most of a large product away again: rounding before that would cost what quantising did.
        return torch.addcmul(self.zeros[0].unsqueeze(-1), numbers.float(), scales).to(numbers.dtype)


def _gather(side: SidePages, segment: Segment, dtype: torch.dtype) -> _Gathered:
    raw = side.payload.index_select(0, segment.pages)
    _, num_kv_heads, page_size, width = raw.shape
    num_seqs, num_slots = segment.num_seqs, segment.mask.shape[2]
    page, slot = segment.unused
    if not side.format.element.is_scaled:  # what was left there may be NaN
        raw[page, :, slot] = 0
    ordered = raw.view(num_seqs, -1, num_kv_heads, page_size, width).transpose(1, 2)
    decoded = numbers(ordered, side.format, dtype).reshape(num_seqs, num_kv_heads, num_slots, -1)
    factors: list[Tensor | None] = []
    for stored in (side.scales, side.zeros):
        if stored is None:
            factors.append(None)
            continue
        raw = stored.index_select(0, segment.pages)
        raw[page, :, slot] = 0
        ordered = raw.view(num_seqs, -1, num_kv_heads, page_size).transpose(1, 2)
        factors.append(ordered.float().reshape(num_seqs, num_kv_heads, num_slots))
    return _Gathered(decoded, *factors)


def compiled_attention(
    kernels: CpuKernels, query: Tensor, layer: LayerPages, sequences: Sequences, scale: float, window: int | None = None
) -> Tensor:
    """`query` [T, H, D] fp32 may be a slice of wider rows; D is a multiple of 16. The result is contiguous."""
    assert query.dtype == torch.float32
    assert query.stride()[1:] == (query.shape[2], 1)
    out = torch.empty(query.shape)
    attention = cpu_library.Attention(
        query=query.data_ptr(),
        out=out.data_ptr(),
        query_stride=query.stride(0),
        num_heads=query.shape[1],
        window=window or 0,
        scale=scale,
    )
    structs = (byref(attention), byref(layer.struct()), byref(sequences.struct()))
    kernels.call_in_workspace("attention", structs)
    return out


def paged_attention_ref(
    query: Tensor,
    layer: LayerPages,
    page_table: list[int],
    positions: list[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """One sequence, one row and one head after the other; `positions` are the rows'."""
    _, num_kv_heads, page_size, _ = layer.keys.payload.shape
    group = query.shape[1] // num_kv_heads
    stored = torch.stack((layer.keys.read(), layer.values.read()), dim=1)
    out = torch.empty(query.shape, dtype=torch.float32)
    for row, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        seen = [(page_table[p // page_size], p % page_size) for p in range(first, position + 1)]
        for head in range(query.shape[1]):
            keys, values = (
                torch.stack([stored[page, kv, head // group, slot] for page, slot in seen]) for kv in (0, 1)
            )
            weights = torch.softmax(keys @ query[row, head].float() * scale, dim=0)
            out[row, head] = weights @ values
    return out
