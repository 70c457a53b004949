"""Linear, norm, rotary and gate against their references, at odd sizes."""

import pytest
import torch

from pageferry.kernels.linear import Linear, linear_ref
from pageferry.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_ref
from pageferry.kernels.rotary import rotary, rotary_ref, rotary_table
from pageferry.kernels.silu_mul import silu_mul, silu_mul_ref

SIZES = (1, 63, 257)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_linear(rows: int, has_bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    """bf16 rounds the result to 8 bits; fp32 sums in another order."""
    x, weight = torch.randn(rows, 63).to(dtype), torch.randn(257, 63).to(dtype)
    bias = torch.randn(257).to(dtype) if has_bias else None
    expected = linear_ref(x, weight, bias)
    result = Linear(weight, bias)(x)
    assert result.dtype == dtype
    assert (result.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 63).to(dtype) * 3, torch.randn(63)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5))
    residual = torch.randn(rows, 63)
    total = residual + x.float()
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-5), rms_norm_ref(total, weight, 1e-5))
    torch.testing.assert_close(residual, total)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("dim", [2, 64, 80])
def test_rotary(rows: int, dim: int) -> None:
    cos, sin = rotary_table(torch.rand(dim // 2), 300)
    positions = torch.randint(0, 300, (rows,))
    x = torch.randn(rows, 3, dim)
    torch.testing.assert_close(
        rotary(x, cos[positions], sin[positions]), rotary_ref(x, cos[positions], sin[positions]), atol=1e-6, rtol=0
    )


def test_rotary_keeps_position_zero_and_lengths() -> None:
    cos, sin = rotary_table(torch.rand(16), 10)
    x = torch.randn(10, 2, 32)
    turned = rotary(x, cos, sin)
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_silu_mul(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    """bf16 rounds twice: after the gate's silu and after the product."""
    gate_up = torch.randn(rows, 2 * 63).to(dtype)
    torch.testing.assert_close(
        silu_mul(gate_up).float(), silu_mul_ref(gate_up), atol=tolerance, rtol=tolerance, check_dtype=False
    )
