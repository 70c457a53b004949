"""Attention of a flat batch over paged keys and values, as the pages store them.

out[t] = softmax(q[t] Kᵀ · scale + mask) V over the positions that token t sees: p ≤ position[t], and with a window W
and S sinks p > position[t] - W or p < S. Query head h reads KV head h // (H / Hk). Softmax in fp32.
Shapes: query [T, H, D] fp32; out the same; pages as in append_pages, which has stored the batch's own tokens already;
where the format has tails, the tokens of open pages are read in fp16 (see `tails`).

Compiled, a row's bits depend on its position and the pages alone: not on its batch, its chunk, or the threads.
Torch computes it segment by segment (see `segment`), query heads folded into rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pageferry.core.formats import PageFormat, TensorFormat
from pageferry.core.layout import TAIL_FORMAT
from pageferry.kernels import cpu_library
from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.cpu_library import CpuKernels, byref
from pageferry.kernels.quantise import dequantise, quantise
from pageferry.kernels.segment import Segment, gather_keys, gather_values
from pageferry.kernels.sequences import Sequences
from pageferry.kernels.tails import OpenTokens

# Scores of a bf16 chunk that are held at once: 8 MB, more is computed one KV head after the other.
_MAX_SCORES = 1 << 22
_ROW_STEP = 32


def paged_attention(
    query: Tensor,
    layer: LayerPages,
    segments: list[Segment],
    scale: float,
    *,
    open_tokens: OpenTokens | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The query is fp32; several rows of a sequence are multiplied in `dtype`, single rows always in fp32."""
    query = query * scale
    out = torch.empty_like(query)
    for segment in segments:
        whole = len(segment.rows) == len(query)
        rows = query if whole else query.index_select(0, segment.rows)
        if segment.num_rows == 1:
            result = _attend_single(rows, layer, segment, open_tokens)
        else:
            result = _attend_chunk(rows.to(dtype), layer, segment, open_tokens)
        if whole:
            return result
        out.index_copy_(0, segment.rows, result)
    return out


def _attend_single(query: Tensor, layer: LayerPages, segment: Segment, open_tokens: OpenTokens | None) -> Tensor:
    """One row a sequence: elements are multiplied as they are; scales and zero points go onto scores and weights."""
    num_seqs, (num_rows, num_heads, dim) = segment.num_seqs, query.shape
    keys = gather_keys(layer, segment, open_tokens, torch.float32)
    num_kv_heads, num_stored = keys.numbers.shape[1:3]
    folded = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, dim)
    scores = torch.matmul(folded, keys.numbers.transpose(-1, -2))  # [S, Hk, G, n * B]
    if keys.scales is not None:
        scores.mul_(keys.scales.unsqueeze(2))
    if keys.zeros is not None:
        scores.add_(folded.sum(-1, keepdim=True) * keys.zeros.unsqueeze(2))
    if keys.open is not None:
        scores = torch.cat((scores, torch.matmul(folded, keys.open.transpose(-1, -2))), dim=-1)
    weights = torch.softmax(scores.add_(segment.mask.unsqueeze(1)), dim=-1)
    values = gather_values(layer, segment, open_tokens, torch.float32)  # after the keys have left the cache
    stored, opened = weights[..., :num_stored], weights[..., num_stored:]
    offset = None if values.zeros is None else torch.matmul(stored, values.zeros.unsqueeze(-1))
    if values.scales is not None:
        stored.mul_(values.scales.unsqueeze(2))
    out = torch.matmul(stored, values.numbers)
    if offset is not None:
        out.add_(offset)
    if values.open is not None:
        out.add_(torch.matmul(opened, values.open))
    return out.view(num_rows, num_heads, dim)


def _attend_chunk(query: Tensor, layer: LayerPages, segment: Segment, open_tokens: OpenTokens | None) -> Tensor:
    """Many rows of one sequence: the pages are dequantised once."""
    keys = gather_keys(layer, segment, open_tokens, query.dtype).dequantised()  # [Hk, n * B + m, D]
    values = gather_values(layer, segment, open_tokens, query.dtype).dequantised()
    heads = query.transpose(0, 1)  # [H, R, D]
    if query.dtype == torch.bfloat16:
        out = _attend_bf16(heads, keys, values, segment)
    else:
        out = functional.scaled_dot_product_attention(
            heads[None], keys[None], values[None], segment.mask[None], scale=1.0, enable_gqa=True
        )[0]
    return out.transpose(0, 1).float()


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


def compiled_attention(
    kernels: CpuKernels, query: Tensor, layer: LayerPages, sequences: Sequences, scale: float
) -> Tensor:
    """`query` [T, H, D] fp32 may be a slice of wider rows; D is a multiple of 16. The result is contiguous.

    With tails it must be a slice of the rows that `rotate_append` has turned, with keys and values behind the queries;
    their open tokens are in the tails afterwards.
    """
    num_heads, head_dim = query.shape[1:]
    assert query.dtype == torch.float32
    assert query.stride()[1:] == (head_dim, 1)
    if layer.keys.tails is not None:
        assert query.stride(0) == (num_heads + 2 * layer.keys.payload.shape[1]) * head_dim
        assert sequences.tails is not None
    out = torch.empty(query.shape)
    attention = cpu_library.Attention(
        query=query.data_ptr(),
        out=out.data_ptr(),
        query_stride=query.stride(0),
        num_heads=num_heads,
        scale=scale,
    )
    structs = (byref(attention), byref(layer.struct), byref(sequences.struct))
    kernels.call_in_workspace("attention", structs)
    return out


@dataclass(frozen=True, slots=True)
class History:
    """All tokens of a sequence, as they were before any page was written, and what becomes of them there."""

    keys: Tensor  # [tokens, Hk, D] fp32
    values: Tensor
    format: PageFormat
    page_size: int
    window: int | None = None
    sinks: int = 0

    def read(self, position: int) -> tuple[Tensor, Tensor]:
        """[seen, Hk, D] fp32 each: keys and values that a query at `position` sees, as it reads them."""
        kept = [t for t in range(position + 1) if self.window is None or t > position - self.window or t < self.sinks]
        keys, values = self.keys[: position + 1], self.values[: position + 1]
        return self._read(keys, self.format.k)[kept], self._read(values, self.format.v)[kept]

    def _read(self, x: Tensor, side: TensorFormat) -> Tensor:
        if not self.format.has_tails:
            return dequantise(quantise(x.float(), side), side)
        rounded = quantise(x.float(), TAIL_FORMAT.k).elements.float()
        num_pages = len(x) // self.page_size
        pages = rounded[: num_pages * self.page_size].view(num_pages, self.page_size, *x.shape[1:]).transpose(1, 2)
        stored = dequantise(quantise(pages, side), side).transpose(1, 2).reshape(-1, *x.shape[1:])
        return torch.cat((stored, rounded[len(stored) :]))


def paged_attention_ref(query: Tensor, history: History, positions: list[int], scale: float) -> Tensor:
    """One sequence, one row after the other; `positions` are the rows'. Knows no pools, tails or chunks."""
    out = torch.empty(query.shape, dtype=torch.float32)
    for row, position in enumerate(positions):
        sides = history.read(position)
        keys, values = (
            side.repeat_interleave(query.shape[1] // side.shape[1], dim=1) for side in sides
        )  # [seen, H, D]
        scores = (keys * query[row].float()).sum(-1) * scale
        out[row] = (torch.softmax(scores, dim=0)[..., None] * values).sum(0)
    return out
