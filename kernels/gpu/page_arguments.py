"""What the kernels over pages are called with: pointers, strides and constants of a layer's pages; and checks."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.append_pages import LayerPages, SidePages

NO_WINDOW = 1 << 30  # wider than any sequence
MAX_REGISTERS = 255  # told so, the assembler spills none to fit more programs
DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class SequencePages:
    """Where the tokens of S sequences lie, in one cache group's pools, on the device; int32."""

    tables: Tensor  # [S, n] pages of positions 0, B, 2 B …; those that no row sees, or that are open, are not read
    lengths: Tensor  # [S], the step's own tokens included; 0 is a sequence that there is not
    tails: Tensor | None = None  # [S], where the page format has tails


def side_arguments(prefix: str, side: SidePages) -> dict[str, object]:
    """A side's pointers and strides, as kernels name them; what it lacks is None, and so compiled away."""
    return {
        f"{prefix}_payload": side.payload,
        f"{prefix}_scales": side.scales,
        f"{prefix}_zeros": side.zeros,
        f"{prefix}_stride": side.payload.stride(0),
        f"{prefix}_factor_stride": 0 if side.scales is None else side.scales.stride(0),
    }


def tail_arguments(layer: LayerPages) -> dict[str, object]:
    """Pointers and strides of the tails; None and 0 where there are none."""
    return {
        f"{prefix}_{name}": value
        for prefix, tails in (("k", layer.keys.tails), ("v", layer.values.tails))
        for name, value in (("tails", tails), ("tail_stride", 0 if tails is None else tails.stride(0)))
    }


def row_arguments(new: tuple[Tensor, Tensor] | None) -> dict[str, object]:
    """Pointers and strides of keys and values [T, Hk, D]; ValueError unless a head's numbers lie side by side."""
    if new is None:
        strides = ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")
        return {"keys": None, "values": None} | dict.fromkeys(strides, 0)
    keys, values = new
    if keys.stride(2) != 1 or values.stride(2) != 1:
        raise ValueError("the numbers of a head must lie side by side")
    return {
        "keys": keys,
        "k_token_stride": keys.stride(0),
        "k_head_stride": keys.stride(1),
        "values": values,
        "v_token_stride": values.stride(0),
        "v_head_stride": values.stride(1),
    }


def attention_arguments(layer: LayerPages, sequences: SequencePages, dtype: torch.dtype) -> dict[str, object]:
    """What decode and prefill attention have in common."""
    head_dim = dim_of(layer)
    return {
        "tables": sequences.tables,
        "table_stride": sequences.tables.stride(0),
        "lengths": sequences.lengths,
        "tails": sequences.tails,
        **side_arguments("k", layer.keys),
        **side_arguments("v", layer.values),
        **tail_arguments(layer),
        "window": NO_WINDOW if layer.window is None else layer.window,
        "sinks": 0 if layer.window is None else layer.sinks,
        "D": head_dim,
        "DP": padded_dim(head_dim),
        "PAGE": layer.keys.payload.shape[2],
        "OPEN": open_tokens(layer),
        "DOT": DOT_DTYPES[dtype],
        "num_stages": 2,
        "maxnreg": MAX_REGISTERS,
        "K_ELEMENT": layer.keys.format.element.value,
        "K_CHANNEL": layer.keys.format.is_per_channel,
        "V_ELEMENT": layer.values.format.element.value,
        "V_CHANNEL": layer.values.format.is_per_channel,
    }


def dim_of(layer: LayerPages) -> int:
    """The size of a head."""
    keys = layer.keys
    return keys.payload.shape[3] * keys.payload.element_size() * 8 // keys.format.element.bits


def open_tokens(layer: LayerPages) -> int:
    """Tokens of a run that is read from pages only as a whole."""
    return 1 if layer.keys.tails is None else layer.keys.payload.shape[2]


def padded_dim(head_dim: int) -> int:
    """Tiles are powers of two, and products need 16."""
    return max(16, triton.next_power_of_2(head_dim))


def check_attention(query: Tensor, layer: LayerPages, sequences: SequencePages, dtype: torch.dtype) -> None:
    """Raise ValueError for what the kernels can't compute rightly."""
    num_heads, head_dim = query.shape[1:]
    for side in (layer.keys, layer.values):
        if num_heads % side.payload.shape[1]:
            raise ValueError(f"{num_heads} query heads must be a multiple of {side.payload.shape[1]} KV heads")
        width = head_dim * side.format.element.bits // 8 // side.payload.element_size()
        if side.payload.shape[3] != width:
            raise ValueError(f"payload's rows are {side.payload.shape[3]} elements wide, must be {width}")
        if dtype == torch.float16 and side.format.element.value in ("fp32", "bf16") and side.tails is None:
            raise ValueError(f"{side.format} pages can exceed fp16; compute in bf16 or fp32")
        if (side.tails is None) != (sequences.tails is None):
            raise ValueError(f"{side.format} pages and their sequences must both have tails, or neither")
    if query.stride(2) != 1:
        raise ValueError("query's numbers of a head must lie side by side")
    tables, num_seqs = sequences.tables, len(sequences.tables)
    shapes = [list(part.shape) for part in (sequences.lengths, sequences.tails) if part is not None]
    if any(shape != [num_seqs] for shape in shapes) or tables.stride(1) != 1:
        raise ValueError(f"tables {list(tables.shape)} and lengths or tails {shapes} must be of as many sequences")
