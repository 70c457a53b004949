"""Compiled norm and gate against their references, at odd sizes and on two threads, and row by row."""

import pytest
import torch
from compiled import each_isa, kernels, needs_library

from pageferry.kernels.cpu_library import Isa
from pageferry.kernels.rms_norm import compiled_rms_norm, rms_norm_ref
from pageferry.kernels.silu_mul import compiled_silu_mul, silu_mul_ref

pytestmark = needs_library
each_size = pytest.mark.parametrize(("rows", "columns"), [(1, 63), (63, 257), (257, 576), (5, 16)])


@each_isa
@each_size
def test_rms_norm(isa: Isa, rows: int, columns: int) -> None:
    torch.manual_seed(rows)
    x, residual, weight = torch.randn(rows, columns) * 3, torch.randn(rows, columns), torch.randn(columns)
    expected = residual + x
    alone = residual[-1:].clone()
    y = compiled_rms_norm(kernels(isa), residual, weight, 1e-5)
    torch.testing.assert_close(y, rms_norm_ref(residual, weight, 1e-5))
    y = compiled_rms_norm(kernels(isa, 2), residual, weight, 1e-5, x)
    torch.testing.assert_close(y, rms_norm_ref(expected, weight, 1e-5))
    assert torch.equal(residual, expected)
    assert torch.equal(compiled_rms_norm(kernels(isa), alone, weight, 1e-5, x[-1:].contiguous()), y[-1:])


@each_isa
@each_size
def test_silu_mul(isa: Isa, rows: int, columns: int) -> None:
    """From -1,000 to 1,000: the exponential's ends among them."""
    torch.manual_seed(rows)
    gate_up = torch.randn(rows, 2 * columns)
    gate_up[:, :columns] = torch.linspace(-1000, 1000, rows * columns).view(rows, columns)
    result = compiled_silu_mul(kernels(isa, 2), gate_up)
    torch.testing.assert_close(result, silu_mul_ref(gate_up), atol=1e-6, rtol=1e-6)
    assert torch.equal(compiled_silu_mul(kernels(isa), gate_up[-1:]), result[-1:])


@each_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(isa: Isa, bad: float) -> None:
    x = torch.ones(2, 40)
    x[0, 3] = bad
    normed = compiled_rms_norm(kernels(isa), x, torch.ones(40), 1e-5)
    assert normed[0].isnan().any()
    assert torch.isfinite(normed[1]).all()
    assert compiled_silu_mul(kernels(isa), torch.tensor([[float("nan"), 1.0]])).isnan().all()
