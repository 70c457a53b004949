"""Attention of a flat batch over paged keys and values, as the pages store them.

out[t] = softmax(q[t] Kᵀ · scale + mask) V over the positions that token t sees: p ≤ position[t], and with a window W
p > position[t] - W. Query head h reads KV head h // (H / Hk). Softmax in fp32.
Shapes: query [T, H, D]; out [T, H, D] fp32; pages as in append_pages, which has stored the batch's own tokens already.

A batch is a list of segments: sequences that have equally many rows, padded to equally many pages. One decode step's
sequences make few segments, a prefill chunk is one of its own. Query heads are folded into rows, so that each KV head's
pages are read once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pageferry.kernels.append_pages import LayerPages


@dataclass(frozen=True, slots=True)
class Segment:
    """S sequences of R rows and n pages each; a shorter one is padded with pages of its own, which `mask` hides."""

    rows: Tensor  # [S * R] of the batch, sequence after sequence
    pages: Tensor  # [S * n]
    num_seqs: int
    mask: Tensor  # [S, R, n * B] fp32: 0 where visible, else -inf
    unused: tuple[Tensor, Tensor]  # (page of the segment, slot) pairs of all slots that hold no token yet

    @property
    def num_rows(self) -> int:
        return self.mask.shape[1]


def paged_attention(query: Tensor, layer: LayerPages, segments: list[Segment], scale: float) -> Tensor:
    """The query's dtype is what a prefill chunk is computed in; single rows always take fp32."""
    out = torch.empty(query.shape, dtype=torch.float32)
    for segment in segments:
        whole = len(segment.rows) == len(query)
        rows = query if whole else query.index_select(0, segment.rows)
        result = (_attend_single if segment.num_rows == 1 else _attend_chunk)(rows, layer, segment, scale)
        if whole:
            return result
        out.index_copy_(0, segment.rows, result)
    return out


def _attend_single(query: Tensor, layer: LayerPages, segment: Segment, scale: float) -> Tensor:
    """One row a sequence: int8 is multiplied as it is, and the scales go onto scores and weights."""
    num_seqs, (num_rows, num_heads, dim) = segment.num_seqs, query.shape
    both, scales = _gather(layer, segment, torch.float32)
    num_kv_heads = both.shape[2]
    folded = query.float().mul(scale).view(num_seqs, num_kv_heads, num_heads // num_kv_heads, dim)
    scores = torch.matmul(folded, both[0].transpose(-1, -2))  # [S, Hk, G, n * B]
    if scales is not None:
        scores.mul_(scales[0].unsqueeze(2))
    weights = torch.softmax(scores.add_(segment.mask.unsqueeze(1)), dim=-1)
    if scales is not None:
        weights.mul_(scales[1].unsqueeze(2))
    return torch.matmul(weights, both[1]).view(num_rows, num_heads, dim)


def _attend_chunk(query: Tensor, layer: LayerPages, segment: Segment, scale: float) -> Tensor:
    """Many rows of one sequence: the pages are dequantised once."""
    both, scales = _gather(layer, segment, query.dtype)
    if scales is not None:
        both.mul_(scales.unsqueeze(-1))
    num_seqs, num_rows = segment.num_seqs, segment.num_rows
    heads = query.view(num_seqs, num_rows, *query.shape[1:]).transpose(1, 2)  # [S, H, R, D]
    mask = segment.mask.unsqueeze(1).to(query.dtype)
    out = functional.scaled_dot_product_attention(heads, both[0], both[1], mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(query.shape).float()


def _gather(layer: LayerPages, segment: Segment, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Payload [2, S, Hk, n * B, D] as numbers of `dtype`, scales [2, S, Hk, n * B]; slots without a token read as 0."""
    raw = layer.payload.index_select(0, segment.pages)
    _, _, num_kv_heads, page_size, dim = raw.shape
    num_seqs, num_slots = segment.num_seqs, segment.mask.shape[2]
    page, slot = segment.unused
    if layer.scales is None:
        raw[page, :, :, slot] = 0
    ordered = raw.view(num_seqs, -1, 2, num_kv_heads, page_size, dim).permute(2, 0, 3, 1, 4, 5)
    both = ordered.to(dtype, memory_format=torch.contiguous_format).reshape(2, num_seqs, num_kv_heads, num_slots, dim)
    if layer.scales is None:
        return both, None
    scales = layer.scales.index_select(0, segment.pages)
    scales[page, :, :, slot] = 0
    ordered = scales.view(num_seqs, -1, 2, num_kv_heads, page_size).permute(2, 0, 3, 1, 4)
    return both, ordered.to(dtype, memory_format=torch.contiguous_format).reshape(2, num_seqs, num_kv_heads, num_slots)


def paged_attention_ref(
    query: Tensor,
    layer: LayerPages,
    page_table: list[int],
    positions: list[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """One sequence, one row and one head after the other; `positions` are the rows'."""
    page_size, num_kv_heads = layer.payload.shape[3], layer.payload.shape[2]
    group = query.shape[1] // num_kv_heads
    stored = layer.payload.float() if layer.scales is None else layer.payload.float() * layer.scales.float()[..., None]
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
