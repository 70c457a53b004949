"""Tokens quantised by the kernel into poisoned pages, bit for bit what `kernels.quantise` stores."""

import pytest
import torch
from gpu_pages import on_device
from page_pools import FORMATS, layout, poisoned

from pageferry.core.formats import PageFormat
from pageferry.kernels.append_pages import append_pages as append_on_cpu
from pageferry.kernels.gpu.append_pages import append_pages
from pageferry.kernels.quantise import largest

NUM_PAGES = 40


def parts(pages: object, index: int) -> list[torch.Tensor]:
    layer = pages.layers[index]  # type: ignore[attr-defined]
    return [
        part.contiguous().cpu()
        for side in (layer.keys, layer.values)
        for part in (side.payload, side.scales, side.zeros)
        if part is not None
    ]


def same_bits(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Of floats, NaN may differ in its bits."""
    if result.is_floating_point():
        return bool(((result == expected) | (result.isnan() & expected.isnan())).all())
    return torch.equal(result, expected)


def check(page_format: PageFormat, num_tokens: int, dim: int, device: str, x: torch.Tensor) -> None:
    expected, tested = (poisoned(layout(page_format, dim=dim), NUM_PAGES) for _ in range(2))
    places = torch.randperm(NUM_PAGES * 16)[:num_tokens]
    append_on_cpu(expected.layers[1], x[0], x[1], places // 16, places % 16)
    moved = on_device(tested, device)
    keys, values = (side.to(device) for side in x)
    append_pages(moved.layers[1], keys, values, (places // 16).to(device), (places % 16).to(device))
    for layer in (0, 1):
        for result, reference in zip(parts(moved, layer), parts(expected, layer), strict=True):
            assert same_bits(result, reference)


def vectors(num_tokens: int, dim: int) -> torch.Tensor:
    """Of sizes from 1e-4 to 1e4, off zero, as views into wider rows of NaN."""
    wide = torch.full((2, num_tokens, 3, dim + 3), float("nan"))
    sizes = torch.logspace(-4, 4, num_tokens)[:, None, None]
    wide[:, :, :2, :dim] = (torch.randn(2, num_tokens, 2, dim) + 0.5) * sizes
    return wide[:, :, :2, :dim]


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_tokens_are_stored_as_by_the_reference(page_format: PageFormat, device: str) -> None:
    check(page_format, 31, 80, device, vectors(31, 80))


@pytest.mark.slow
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 63, 257])
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_every_format_and_size(page_format: PageFormat, num_tokens: int, dim: int, device: str) -> None:
    check(page_format, num_tokens, dim, device, vectors(num_tokens, dim))


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_the_edges_of_what_can_be_stored(page_format: PageFormat, device: str) -> None:
    """Zeros, constants, one outlier, what is too small or too large for fp16, and what is not finite."""
    rows = torch.randn(9, 2, 8)
    rows[0], rows[1], rows[2, :, 3], rows[3], rows[4] = 0, 5, 1e4, 1e-9, rows[4] * 1e7
    rows[5, 0, 1], rows[6, 0, 7], rows[7, 1, 0], rows[8] = float("nan"), float("inf"), -float("inf"), -7e4
    expected, tested = (poisoned(layout(page_format), NUM_PAGES) for _ in range(2))
    pages, slots = torch.arange(9), torch.arange(9)
    append_on_cpu(expected.layers[0], rows, -rows, pages, slots)
    moved = on_device(tested, device)
    append_pages(moved.layers[0], rows.to(device), -rows.to(device), pages.to(device), slots.to(device))
    for kind in ("keys", "values"):
        result, reference = (getattr(pool.layers[0], kind).read().cpu() for pool in (moved, expected))
        finite = reference.isfinite().all(-1)
        assert torch.equal(result[finite], reference[finite])
        assert (result[~finite].isnan().any(-1) | result[~finite].isinf().any(-1)).all()


@pytest.mark.parametrize("text", ["fp8_e4m3", "int8", "int8:asym", "int4", "int4:asym"])
def test_halves_go_to_even(text: str, device: str) -> None:
    """Vectors whose scale is 1 and zero point 0, of numbers halfway between what the format holds."""
    page_format = PageFormat.parse(text)
    codes = torch.arange(127 if text == "fp8_e4m3" else largest(page_format.k) + 1)
    held = codes.to(torch.uint8).view(torch.float8_e4m3fn) if text == "fp8_e4m3" else codes
    halves = (held.float()[1:] + held.float()[:-1]) / 2
    rows = torch.zeros(-(-len(halves) // 62), 64)
    for row, part in zip(rows, halves.split(62), strict=True):
        row[: len(part)], row[63] = part, held.float()[-1]
    check(page_format, len(rows), 64, device, rows[:, None].expand(2, len(rows), 2, 64))
    if page_format.k.symmetric:
        check(page_format, len(rows), 64, device, -rows[:, None].expand(2, len(rows), 2, 64))


def test_what_goes_nowhere_is_not_written(device: str) -> None:
    """As in a CUDA graph whose batch isn't full."""
    page_format = PageFormat.parse("int8")
    tested = on_device(poisoned(layout(page_format), 4), device)
    pages, slots = torch.tensor([-1, 2, -1], device=device), torch.tensor([0, 3, 0], device=device)
    before = tested.pools[0].memory.clone()
    append_pages(tested.layers[0], *torch.ones(2, 3, 2, 8, device=device), pages, slots)
    assert (tested.layers[0].keys.payload[2, :, 3] == 127).all()
    before[2] = tested.pools[0].memory[2]
    assert torch.equal(tested.pools[0].memory, before)


def test_wrong_shapes_are_refused(device: str) -> None:
    pages = on_device(poisoned(layout(PageFormat.parse("int8")), 2), device)
    x, place = torch.zeros(1, 2, 8, device=device), torch.zeros(1, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match="must be alike, of 2 heads"):
        append_pages(pages.layers[0], x[:, :1], x[:, :1], place, place)
    with pytest.raises(ValueError, match=r"must be \[1\]"):
        append_pages(pages.layers[0], x, x, place[:0], place)
