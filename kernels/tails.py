"""Write tokens' keys and values where pages are quantised whole: into tails in fp16, and into the pages that fill.

A page is open until its last token is there. Its tokens, rounded to fp16, wait in the sequence's tail; then the page is
quantised from them, once (see `quantise`). A query at p reads tokens before ⌊(p + 1) / B⌋ · B from pages as they are
stored, and those from there to p in fp16: what it reads does not depend on where chunks begin.
Shapes: keys, values [T, Hk, D]; tails [num_tails, Hk, B, D] fp16; pages as in append_pages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pageferry.core.layout import TAIL_FORMAT
from pageferry.kernels.append_pages import LayerPages
from pageferry.kernels.quantise import quantise


@dataclass(frozen=True, slots=True)
class TailTargets:
    """Where a batch of S sequences and T rows goes in one cache group; int64.

    Sources number the S tails' slots, sequence after sequence, and then the T rows: see `OpenTokens`.
    """

    tails: Tensor  # [S] of the sequences
    filled: Tensor  # [n] pages that the batch fills
    sources: Tensor  # [n * B] of their tokens
    begun: Tensor  # tails whose first slot is written
    kept_rows: Tensor  # [m] rows that stay open
    kept_tails: Tensor  # [m] where they go
    kept_slots: Tensor  # [m]


@dataclass(frozen=True, slots=True)
class OpenTokens:
    """What attention may read in fp16: the tails' slots as they were before the batch, then the batch's rows."""

    keys: Tensor  # [S * B + T, Hk, D]
    values: Tensor


def append_to_tails(layer: LayerPages, keys: Tensor, values: Tensor, targets: TailTargets) -> OpenTokens:
    """Fill pages from the tails and the batch, and keep in the tails what stays open."""
    opened = []
    for side, new in ((layer.keys, keys), (layer.values, values)):
        assert side.tails is not None
        rows = quantise(new.float(), TAIL_FORMAT.k).elements
        before = side.tails.index_select(0, targets.tails)
        _, num_kv_heads, page_size, dim = before.shape
        tokens = torch.cat((before.transpose(1, 2).reshape(-1, num_kv_heads, dim), rows))
        if len(targets.filled):
            page_tokens = tokens.index_select(0, targets.sources).view(-1, page_size, num_kv_heads, dim)
            side.store(targets.filled, quantise(page_tokens.transpose(1, 2).float(), side.format))
        side.tails[targets.begun] = 0
        side.tails[targets.kept_tails, :, targets.kept_slots] = rows.index_select(0, targets.kept_rows)
        opened.append(tokens)
    return OpenTokens(*opened)
