"""Products with GGUF's groups against the dequantised matrix."""

import numpy as np
import pytest
import torch

from pageferry.core.gguf import GgufType
from pageferry.engine.gguf_tensors import dequantise
from pageferry.kernels.gpu.linear import GroupedWeight, linear
from pageferry.kernels.linear import linear_ref

KINDS = (GgufType.Q4_0, GgufType.Q4_1, GgufType.Q8_0)
# Of sums of up to 608 products: fp32 adds in another order; fp16 rounds inputs and weights to 11 bits.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def blocks(kind: GgufType, out_features: int, in_features: int) -> torch.Tensor:
    """Random bytes of a tensor, with scales and minima of a usual size."""
    count = out_features * in_features // 32
    data = torch.randint(0, 256, (count, kind.block[1]), dtype=torch.uint8)
    factors = 2 if kind is GgufType.Q4_1 else 1
    data[:, : 2 * factors] = (torch.randn(count, factors) / 10).half().view(torch.uint8)
    return data.flatten()


@pytest.mark.parametrize("kind", KINDS)
def test_taking_blocks_apart_loses_nothing(kind: GgufType) -> None:
    data = blocks(kind, 5, 96)
    expected = dequantise(data.numpy().astype(np.uint8), kind).view(5, 96)
    assert torch.equal(GroupedWeight.from_blocks(data, kind, 5).dequantise(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 63, 257])
@pytest.mark.parametrize(("out_features", "in_features"), [(63, 96), pytest.param(257, 608, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_linear(
    kind: GgufType, rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: str
) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter multiplies bf16 wrongly")
    weight = GroupedWeight.from_blocks(blocks(kind, out_features, in_features).to(device), kind, out_features)
    wide = torch.full((rows + 1, in_features + 7), float("nan"), dtype=dtype)
    wide[:rows, :in_features] = torch.randn(rows, in_features)
    x, bias = wide.to(device)[:rows, :in_features], torch.randn(out_features)
    result = linear(x, weight, bias.to(device))
    expected = linear_ref(x.cpu(), weight.dequantise().cpu(), bias)
    assert result.dtype == dtype
    assert (result.cpu().float() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


def test_wrong_shapes_are_refused(device: str) -> None:
    weight = GroupedWeight.from_blocks(blocks(GgufType.Q8_0, 4, 64).to(device), GgufType.Q8_0, 4)
    with pytest.raises(ValueError, match="must have 64 columns"):
        linear(torch.zeros(1, 32, device=device), weight)
    with pytest.raises(ValueError, match=r"bias \[3\] must be \[4\]"):
        linear(torch.zeros(1, 64, device=device), weight, torch.zeros(3, device=device))
