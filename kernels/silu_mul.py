"""SiLU-gated product of the feed-forward: y = silu(g) * u, silu(g) = g / (1 + exp(-g)) (arXiv:2002.05202).

Shapes: gate_up [T, 2 N], the gate's half first; y [T, N], the input's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up
