"""The matmul on a GGUF file's own groups: against dequantised weights, and against itself in other company."""

import numpy as np
import pytest
import torch
from compiled import each_isa, int32, kernels, needs_library
from gguf_writer import quantise

from pageferry.core.gguf import GgufType
from pageferry.engine.gguf_tensors import dequantise
from pageferry.kernels.cpu_library import Isa
from pageferry.kernels.quantised_linear import (
    QUANTISED_TYPES,
    PackedMatrix,
    pack,
    quantised_linear,
    quantised_linear_ref,
    unpack_rows,
)

pytestmark = needs_library
TOLERANCE = 2e-6  # of the largest result: fp32 sums over the groups, and fp32 scales of x
each_type = pytest.mark.parametrize("kind", QUANTISED_TYPES, ids=lambda kind: kind.name)


def matrix(
    kind: GgufType, rows: int, columns: int, bias: torch.Tensor | None = None
) -> tuple[PackedMatrix, torch.Tensor]:
    """Packed and dequantised; among the groups are zeros and large ones."""
    values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    values[0, :32] = 0
    values[-1, -32:] *= 1000
    data = np.frombuffer(quantise(values, kind), np.uint8)
    return pack(data.reshape(rows, columns // 32, -1), kind, bias), dequantise(data, kind).view(rows, columns)


@each_isa
@each_type
@pytest.mark.parametrize("num_rows", [1, 2, 5, 63, 257])
@pytest.mark.parametrize(("out", "columns"), [(1, 32), (63, 96), (257, 160)])
def test_equals_the_reference(isa: Isa, kind: GgufType, num_rows: int, out: int, columns: int) -> None:
    torch.manual_seed(num_rows)
    bias = torch.randn(out)
    packed, weight = matrix(kind, out, columns, bias)
    x = torch.randn(num_rows, columns) * torch.logspace(-3, 3, num_rows)[:, None]
    x[-1, :32] = 0
    result, expected = quantised_linear(kernels(isa, 2), x, packed), quantised_linear_ref(x, weight, bias)
    # A value halfway between two int8 may be rounded either way: one step of one activation.
    step = (x.abs().amax(1) / 127)[:, None] * weight.abs().amax(1)
    assert ((result - expected).abs() <= TOLERANCE * expected.abs().amax(1, keepdim=True) + step).all()
    assert ((result - expected).abs() > TOLERANCE * expected.abs().amax(1, keepdim=True)).float().mean() < 0.05


@each_isa
@each_type
def test_bits_do_not_depend_on_company(isa: Isa, kind: GgufType) -> None:
    packed, _ = matrix(kind, 113, 96)
    x = torch.randn(61, 96)
    whole = quantised_linear(kernels(isa), x, packed)
    assert torch.equal(whole, quantised_linear(kernels(isa, 2), x, packed))
    for start, end in ((0, 1), (17, 18), (3, 9), (40, 61)):
        assert torch.equal(whole[start:end], quantised_linear(kernels(isa), x[start:end], packed))


@each_isa
@each_type
def test_rows_unpack_to_what_the_file_means(isa: Isa, kind: GgufType) -> None:
    packed, weight = matrix(kind, 45, 64)
    ids = int32([44, 0, 13, 13, 16])
    assert torch.equal(unpack_rows(kernels(isa, 2), packed, ids), weight[ids.long()])


@each_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_fails_alone(isa: Isa, bad: float) -> None:
    packed, _ = matrix(GgufType.Q4_1, 33, 64)
    x = torch.randn(3, 64)
    before = quantised_linear(kernels(isa), x, packed)
    x[1, 40] = bad
    after = quantised_linear(kernels(isa), x, packed)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])
