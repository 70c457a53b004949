"""Vectors in every format against slow references, and at the edges: zeros, constants, outliers, what is not finite."""

import math

import pytest
import torch
from page_pools import ALIKE, largest_error

from pageferry.core.formats import PageFormat, TensorFormat
from pageferry.kernels.quantise import (
    dequantise,
    fp8_decode_ref,
    fp8_encode_ref,
    largest,
    numbers,
    quantise,
    quantise_ref,
)

SCALED = ("fp8_e4m3", "int8", "int8:asym", "int4", "int4:asym")
CHANNEL = ("fp8_e4m3:channel", "int8:channel", "int8:channel:asym", "int4:channel", "int4:channel:asym")
NAN, INF = float("nan"), float("inf")


def side(text: str) -> TensorFormat:
    return PageFormat.parse(text).k


def read(text: str, x: list[list[float]]) -> torch.Tensor:
    return dequantise(quantise(torch.tensor(x), side(text)), side(text))


@pytest.mark.parametrize("text", SCALED)
@pytest.mark.parametrize(("num_vectors", "dim"), [(1, 64), (63, 6), (257, 80)])
def test_it_equals_the_reference(text: str, num_vectors: int, dim: int) -> None:
    torch.manual_seed(num_vectors)
    x = (torch.randn(num_vectors, dim) + 0.5) * torch.logspace(-9, 6, num_vectors)[:, None]
    result, expected = quantise(x, side(text)), quantise_ref(x, side(text))
    assert result.elements.dtype == expected.elements.dtype
    # Where fp32 and fp64 lie on both sides of a half, they round to neighbours; of scales hardly ever.
    same = (result.scales == expected.scales) | (result.scales.isnan() & expected.scales.isnan())
    assert same.float().mean() > 0.98
    assert torch.allclose(result.scales, expected.scales, rtol=2**-10, atol=2**-24, equal_nan=True)
    if expected.zeros is not None:
        assert torch.equal(result.zeros, expected.zeros)
    ours, theirs = (numbers(part.elements[same], side(text), torch.float32) for part in (result, expected))
    step = ours.abs() / 8 if text == "fp8_e4m3" else 1
    assert ((ours - theirs).abs() <= step).all()
    assert (ours != theirs).float().mean() < 2e-3


@pytest.mark.parametrize("text", CHANNEL)
@pytest.mark.parametrize(("num_pages", "page_size", "dim"), [(1, 1, 2), (3, 5, 6), (7, 16, 80), (2, 16, 96)])
def test_channels_equal_the_reference_and_vectors(text: str, num_pages: int, page_size: int, dim: int) -> None:
    """A page's channels are quantised as its transpose's vectors are: the same bits, but for how int4 are packed."""
    torch.manual_seed(num_pages)
    x = (torch.randn(num_pages, page_size, dim) + 0.5) * torch.logspace(-9, 4, dim)
    x[0, 0, 0], x[-1, :, 1] = NAN, INF
    result, expected = quantise(x, side(text)), quantise_ref(x, side(text))
    factors = torch.stack((result.scales, expected.scales)).float().nan_to_num()
    assert torch.allclose(factors[0], factors[1], rtol=2**-10, atol=2**-24)
    same = result.scales == expected.scales
    ours, theirs = (numbers(part.elements, side(text), torch.float32) for part in (result, expected))
    close = (ours - theirs).abs() <= (ours.abs() / 8 if "fp8" in text else 1)
    assert (close | ~same[:, None, :]).all()
    if "int4" not in text or page_size % 2 == 0:
        plain = side(text.replace(":channel", ""))
        vectors = quantise(x.transpose(1, 2), plain)
        assert torch.equal(numbers(vectors.elements, plain, torch.float32).transpose(1, 2), ours)
        assert torch.equal(vectors.scales.view(torch.int16), result.scales.view(torch.int16))
        assert vectors.zeros is None or torch.equal(vectors.zeros.view(torch.int16), result.zeros.view(torch.int16))


@pytest.mark.parametrize("text", CHANNEL)
def test_a_bad_channel_is_bad_alone(text: str) -> None:
    """Not finite, or beyond fp16 where it is a zero point or a scale: NaN in all its tokens, and no other number."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    x[1, 0], x[2, 1], x[3, 2], x[:, 3], x[:, 4], x[:, 5], x[2, 6] = NAN, INF, -INF, 1e9, 0.0, 3.7, 60000.0
    result = dequantise(quantise(x, side(text)), side(text))
    assert result[:, :4].isnan().all()
    assert (result[:, 4] == 0).all()
    error = (result - x)[:, 4:].abs().amax(0)
    assert (error <= largest_error(side(text), x[:, 4:].T)).all()


@pytest.mark.parametrize("text", ALIKE)
def test_outliers_constants_and_zeros_stay_within_their_rounding(text: str) -> None:
    torch.manual_seed(5)
    x = torch.randn(9, 16)
    x[0] = 0
    x[1], x[2], x[3] = 1000.3, -0.007, 1e-9
    x[4, 3] = 600.0
    x[5, :] = 60000.0
    x[6] += 500
    x[7, ::2] *= 1e-4
    result = dequantise(quantise(x, side(text)), side(text))
    assert ((result - x).abs().amax(-1) <= largest_error(side(text), x)).all()
    assert (result[0] == 0).all()


@pytest.mark.parametrize("text", SCALED)
def test_a_vector_of_zeros_stores_scale_one(text: str) -> None:
    stored = quantise(torch.zeros(3, 8), side(text))
    assert (stored.scales == 1).all()
    assert not stored.elements.any()
    assert stored.zeros is None or not stored.zeros.any()


@pytest.mark.parametrize("text", ALIKE)
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e9, -1e9])
def test_what_a_format_cannot_hold_reads_back_as_not_a_number(text: str, bad: float) -> None:
    """1e9 overflows fp16 as a number, a scale and a zero point. The neighbour is unharmed."""
    result = read(text, [[1.0, bad], [1.0, 2.0]])
    holds = text in ("fp32", "bf16") and math.isfinite(bad)
    if text in ("fp32", "bf16"):
        assert torch.isfinite(result[0, 1]) == holds
    else:
        assert result[0].isnan().all()
    x = torch.tensor([1.0, 2.0])
    assert ((result[1] - x).abs() <= largest_error(side(text), x)).all()


def test_known_values() -> None:
    int8 = quantise(torch.tensor([[127.0, -63.5]]), side("int8"))
    assert (int8.elements.tolist(), int8.scales.tolist()) == ([[127, -64]], [1.0])
    int4 = quantise(torch.tensor([[7.0, -7.0, 1.0, -2.0]]), side("int4"))
    assert (int4.elements.tolist(), int4.scales.tolist()) == ([[0x97, 0xE1]], [1.0])  # the even index in the low half
    asymmetric = quantise(torch.tensor([[10.0, 25.0, 11.0, 12.0]]), side("int4:asym"))
    assert asymmetric.elements.tolist() == [[0xF0, 0x21]]
    assert (asymmetric.scales.tolist(), asymmetric.zeros.tolist()) == ([1.0], [10.0])
    fp8 = quantise(torch.tensor([[448.0, -1.0, 2**-9, 17.0]]), side("fp8_e4m3"))
    assert (fp8.elements.tolist(), fp8.scales.tolist()) == ([[0x7E, 0xB8, 0x01, 0x58]], [1.0])


@pytest.mark.parametrize("text", ["int8", "int8:asym", "int4", "int4:asym"])
def test_every_integer_comes_back(text: str) -> None:
    top = largest(side(text))
    every = torch.arange(-top if side(text).symmetric else 0, top + 1, dtype=torch.float32)
    x = every if len(every) % 2 == 0 else torch.cat((every, every[-1:]))
    stored = quantise(x[None], side(text))
    assert torch.equal(numbers(stored.elements, side(text), torch.bfloat16)[0].float(), x)


def test_fp8_decodes_as_by_integer_operations() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([fp8_decode_ref(code) for code in range(256)])
    assert torch.equal(expected.nan_to_num(1e9), codes.view(torch.float8_e4m3fn).float().nan_to_num(1e9))
    for dtype in (torch.float32, torch.bfloat16):
        found = numbers(codes, side("fp8_e4m3"), dtype).float()
        assert torch.equal(found[~expected.isnan()], expected[~expected.isnan()])


def test_fp8_encodes_as_by_integer_operations() -> None:
    """All values, their neighbours and midpoints: to nearest even, saturating, NaN kept."""
    values = torch.tensor([fp8_decode_ref(code) for code in range(127)])
    middles = (values[1:] + values[:-1]) / 2
    points = torch.cat((values, middles, torch.tensor([460.0, 464.0, 1e9, 2**-11, 1e-30])))
    up, down = (points.nextafter(torch.tensor(limit)) for limit in (INF, -INF))
    x = torch.cat((points, up, down))
    x = torch.cat((x, -x))
    # The largest of each vector makes its scale 1.
    vectors = torch.cat((torch.full((len(x), 1), 448.0), x.clamp(-448, 448)[:, None]), dim=1)
    stored = quantise(vectors, side("fp8_e4m3"))
    assert (stored.scales == 1).all()
    expected = [fp8_encode_ref(float(value)) for value in x]
    assert stored.elements[:, 1].tolist() == expected
    assert fp8_encode_ref(NAN) & 0x7F == 0x7F
