"""Tokens written into poisoned pages: values, tolerances, and nothing beside them."""

import pytest
import torch
from page_pools import FORMATS, TINY_SCALE_ERROR, TOLERANCE, layout, poisoned, stored

from pageferry.core.layout import PageFormat
from pageferry.core.pool import PageId
from pageferry.kernels.append_pages import append_pages, quantise_int8, quantise_int8_ref


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 63, 257])
@pytest.mark.parametrize("dim", [8, 80])
def test_tokens_round_trip(page_format: PageFormat, num_tokens: int, dim: int) -> None:
    torch.manual_seed(num_tokens)
    pages = poisoned(layout(page_format, dim=dim), 40)
    places = torch.randperm(40 * 16)[:num_tokens]
    page, slot = places // 16, places % 16
    keys, values = torch.randn(2, num_tokens, 2, dim) * torch.logspace(-4, 4, num_tokens)[:, None, None]
    append_pages(pages.layers[1], keys, values, page, slot)
    for expected, side in ((keys, 0), (values, 1)):
        error = (stored(pages, 1)[page, side, :, slot] - expected).abs().amax(-1)
        limit = TOLERANCE[page_format] * expected.abs().amax(-1)
        assert (error <= limit + (TINY_SCALE_ERROR if page_format is PageFormat.INT8 else 0)).all()


@pytest.mark.parametrize("page_format", FORMATS)
def test_nothing_else_is_touched(page_format: PageFormat) -> None:
    pages = poisoned(layout(page_format), 3)
    append_pages(pages.layers[0], torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.tensor([1]), torch.tensor([5]))
    everything = b"".join(pages.read(PageId(page), 0, 2) for page in range(3))
    # Keys and values of two heads; none of the bytes that 1.0 takes in any format is the poison's.
    num_bytes = 2 * 2 * (8 * page_format.element_bytes + page_format.scale_bytes)
    assert len(everything) - everything.count(b"\xff") == num_bytes


@pytest.mark.parametrize("num_vectors", [1, 63, 257])
def test_int8_equals_the_reference(num_vectors: int) -> None:
    torch.manual_seed(num_vectors)
    x = torch.randn(num_vectors, 64) * torch.logspace(-9, 8, num_vectors)[:, None]
    quantised, scales = quantise_int8(x)
    expected, expected_scales = quantise_int8_ref(x)
    assert torch.equal(scales, expected_scales)
    # Where x / s lies within rounding of a half, fp32 and fp64 may round to neighbours.
    assert (quantised.int() - expected.int()).abs().max() <= 1
    assert (quantised != expected).float().mean() < 1e-3


def test_int8_at_its_edges() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-9, 0.0], [127.0, -63.5], [1e-6, -1e-6], [8e6, 0.0]])
    quantised, scales = quantise_int8(x)
    assert scales[:3].tolist() == [1, 1, 1]
    assert quantised[:3].tolist() == [[0, 0], [0, 0], [127, -64]]
    assert torch.isfinite(scales).all()
    assert quantised.abs().max() <= 127


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_what_int8_cannot_hold_reads_back_as_not_a_number(bad: float) -> None:
    """1e9 / 127 overflows an fp16 scale. The neighbour is unharmed."""
    quantised, scales = quantise_int8(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    read = quantised.float() * scales.float()[:, None]
    assert read[0].isnan().any()
    assert torch.allclose(read[1], torch.tensor([1.0, 2.0]), atol=0.01)
