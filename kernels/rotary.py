"""Rotary position embedding, halves form (arXiv:2104.09864, as transformers' Llama has it).

y[:D/2] = x[:D/2] cos - x[D/2:] sin;  y[D/2:] = x[D/2:] cos + x[:D/2] sin.
Shapes: x [T, H, D]; cos, sin [T, D/2] fp32; y [T, H, D] fp32.
"""

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`cos` and `sin` are of the tokens' positions; see `rotary_table`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[:, None], sin[:, None]
    y = torch.empty(x.shape, dtype=torch.float32)
    torch.mul(first, cos, out=y[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=y[..., half:]).addcmul_(first, sin)
    return y


def rotary_table(inverse_frequencies: Tensor, num_positions: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Give cos and sin [num_positions, D/2] fp32 of position times frequency, for positions from 0, times `scale`."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies
    return angles.cos().mul_(scale), angles.sin().mul_(scale)


def rotary_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.float()
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * torch.cat((cos, cos), -1)[:, None] + rotated * torch.cat((sin, sin), -1)[:, None]
