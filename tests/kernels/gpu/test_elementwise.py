"""Norm, rotary and gate against their references, at odd sizes, in rows that poison surrounds."""

import pytest
import torch

from pageferry.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from pageferry.kernels.gpu.rotary import rotary
from pageferry.kernels.gpu.silu_mul import silu_mul
from pageferry.kernels.rms_norm import rms_norm_ref
from pageferry.kernels.rotary import rotary_ref
from pageferry.kernels.silu_mul import silu_mul_ref

SIZES = (1, 63, 257)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# fp32 sums and divides in another order; the others round the result to 11 and 8 bits.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def surrounded(x: torch.Tensor, device: str) -> torch.Tensor:
    """The same rows as a view, with NaN before, between and behind them."""
    wide = torch.full((len(x) + 2, x[0].numel() + 5), float("nan"), dtype=x.dtype, device=device)
    wide[1:-1, 3:-2] = x.flatten(1).to(device)
    return wide[1:-1, 3:-2].unflatten(1, x.shape[1:])


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.cpu().float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [63, pytest.param(576, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    x, weight = torch.randn(rows, width).to(dtype) * 3, torch.randn(width)
    result = rms_norm(surrounded(x, device), weight.to(device), 1e-5, dtype)
    assert result.dtype == dtype
    close(result, rms_norm_ref(x, weight, 1e-5))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_to_the_residual(rows: int, dtype: torch.dtype, device: str) -> None:
    x, residual, weight = torch.randn(rows, 63).to(dtype), torch.randn(rows, 63), torch.randn(63)
    total = residual + x.float()
    kept = residual.to(device, copy=True)
    close(add_rms_norm(surrounded(x, device), kept, weight.to(device), 1e-5), rms_norm_ref(total, weight, 1e-5))
    close(kept, total)


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("dim", [2, pytest.param(64, marks=pytest.mark.slow), pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(tokens: int, dim: int, dtype: torch.dtype, device: str) -> None:
    x, angles = torch.randn(tokens, 11, dim).to(dtype), torch.rand(tokens, dim // 2) * 300
    cos, sin = angles.cos(), angles.sin()
    close(rotary(surrounded(x, device), cos.to(device), sin.to(device)), rotary_ref(x, cos, sin))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [63, pytest.param(1536, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    gate_up = torch.randn(rows, 2 * width).to(dtype) * 4
    result = silu_mul(surrounded(gate_up, device))
    assert result.dtype == dtype
    close(result, silu_mul_ref(gate_up))


def test_wrong_shapes_are_refused(device: str) -> None:
    x = torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match=r"weight \[7\] must be \[8\]"):
        rms_norm(x, torch.zeros(7, device=device), 1e-5)
    with pytest.raises(ValueError, match=r"residual must be contiguous fp32 \[3, 8\]"):
        add_rms_norm(x, x.half(), torch.zeros(8, device=device), 1e-5)
    with pytest.raises(ValueError, match=r"cos and sin must be contiguous fp32 \[3, 4\]"):
        rotary(x[:, None], x[:, :4], x[:, :4])
    with pytest.raises(ValueError, match="7 columns, must have an even number"):
        silu_mul(x[:, :7])
