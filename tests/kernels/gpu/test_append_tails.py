"""Pages that fill are stored as `kernels.quantise` does, whatever the chunks; what is open stays in the tails."""

import itertools

import pytest
import torch
from gpu_pages import on_device
from page_pools import FORMATS, TAIL_FORMATS, layout, poisoned

from pageferry.core.formats import Element, PageFormat, TensorFormat
from pageferry.kernels.append_pages import SidePages
from pageferry.kernels.gpu.append_tails import TouchedPages, append_tails
from pageferry.kernels.gpu.page_arguments import SequencePages
from pageferry.kernels.quantise import quantise

NUM_PAGES, NUM_TAILS = 16, 4
# One of each element, K and V apart; `slow` has all.
QUICK = tuple(PageFormat.parse(text) for text in ("k=int8:channel:asym,v=fp8_e4m3:channel", "k=fp32,v=int4:channel"))
# Ends of chunks: within a page, at its end, over several; single tokens within, at the end, at the begin.
ENDS = (5, 6, 15, 16, 17, 40, 48)


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Of floats, NaN may differ in its bits."""
    if result.is_floating_point():
        return torch.equal(result.nan_to_num(7e4), expected.nan_to_num(7e4))
    return torch.equal(result, expected)


def check_side(side: SidePages, x: torch.Tensor, table: torch.Tensor, tail: int) -> None:
    """Of a sequence whose tokens are x [tokens, Hk, D]."""
    num_pages, page_size = len(x) // side.payload.shape[2], side.payload.shape[2]
    rounded = quantise(x, TensorFormat(Element.FP16)).elements
    full, rest = rounded[: num_pages * page_size], rounded[num_pages * page_size :]
    stored = quantise(full.float().unflatten(0, (-1, page_size)).transpose(1, 2), side.format)
    pages = table[:num_pages].long()
    assert same(side.payload.cpu()[pages], stored.elements)
    if side.scales is not None and stored.scales is not None:
        assert same(side.scales.cpu()[pages], stored.scales)
        if side.zeros is not None and stored.zeros is not None:  # those of what is not finite mean nothing
            finite = stored.scales.isfinite()
            assert same(side.zeros.cpu()[pages][finite], stored.zeros[finite])
    if len(rest):
        assert side.tails is not None
        assert same(side.tails[tail, :, : len(rest)].cpu(), rest.transpose(0, 1))
        assert not side.tails[tail, :, len(rest) :].any()


def check(
    page_format: PageFormat, x: torch.Tensor, device: str, *, ends: tuple[int, ...] = ENDS, page_size: int = 16
) -> None:
    """Tokens x [2, tokens, Hk, D] in chunks, those of a second sequence shifted by one page beside them."""
    dim = x.shape[3]
    pages = on_device(poisoned(layout(page_format, dim=dim, page_size=page_size), NUM_PAGES, NUM_TAILS), device)
    layer, untouched = pages.layers[1], pages.layers[0].keys.payload.clone()
    tables, tails = torch.randperm(NUM_PAGES).view(2, -1).int(), [3, 1]
    for start, end in itertools.pairwise((0, *ends)):
        count = end - start
        held = tables.clone()
        held[:, end // page_size :] = -1  # of an open page, only the tail is held
        lengths, starts = [end] * 2, torch.tensor([0, count, 2 * count], dtype=torch.int32, device=device)
        sequences = SequencePages(
            held.to(device), torch.tensor(lengths, device=device).int(), torch.tensor(tails, device=device).int()
        )
        keys, values = torch.cat((x[:, start:end], -x[:, start:end]), 1).to(device)
        if count == 1:
            append_tails(layer, keys, values, sequences)
        else:
            touched = TouchedPages.of(lengths, starts, [count] * 2, page_size)
            append_tails(layer, keys, values, sequences, (starts, touched.full))
            append_tails(layer, keys, values, sequences, (starts, touched.open))
        for sign, table, tail in zip((1, -1), tables, tails, strict=True):
            check_side(layer.keys, sign * x[0, :end], table, tail)
            check_side(layer.values, sign * x[1, :end], table, tail)
    assert same(pages.layers[0].keys.payload, untouched)


def vectors(num_tokens: int, dim: int) -> torch.Tensor:
    """Off zero, channels of sizes from 1e-3 to 1e3, as views into wider rows of NaN."""
    wide = torch.full((2, num_tokens, 3, dim + 3), float("nan"))
    wide[:, :, :2, :dim] = (torch.randn(2, num_tokens, 2, dim) + 0.5) * torch.logspace(-3, 3, dim)
    return wide[:, :, :2, :dim]


@pytest.mark.parametrize("page_format", QUICK, ids=str)
def test_pages_and_tails_are_as_the_reference_has_them(page_format: PageFormat, device: str) -> None:
    check(page_format, vectors(ENDS[-1], 8), device)


@pytest.mark.slow
@pytest.mark.parametrize("page_format", TAIL_FORMATS, ids=str)
@pytest.mark.parametrize(("dim", "page_size"), [(8, 16), (64, 16), (80, 12), (64, 48)])
def test_every_format_and_size(page_format: PageFormat, dim: int, page_size: int, device: str) -> None:
    check(page_format, vectors(ENDS[-1], dim), device, page_size=page_size)


@pytest.mark.parametrize("page_format", TAIL_FORMATS, ids=str)
def test_the_edges_of_what_can_be_stored(page_format: PageFormat, device: str) -> None:
    """Channels of zeros, constants and one outlier, and what is too small for fp16."""
    x = torch.randn(2, 32, 2, 8)
    x[..., 0], x[..., 1], x[:, 7, :, 2], x[..., 3], x[..., 4] = 0, 5, 1e4, 1e-9, -x[..., 4].abs()
    check(page_format, x, device, ends=(9, 32))


@pytest.mark.parametrize("page_format", QUICK, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -7e4])
def test_what_is_not_finite_in_fp16_spoils_its_page(page_format: PageFormat, value: float, device: str) -> None:
    x = torch.randn(2, 40, 2, 8)
    x[:, [3, 20], 1, 2] = value  # from the tail, and from the chunk's own rows
    check(page_format, x, device, ends=(9, 40))


def test_what_cannot_be_stored_is_refused(device: str) -> None:
    x, place = torch.zeros(2, 2, 2, 8, device=device), torch.zeros(2, 1, dtype=torch.int32, device=device)
    sequences = SequencePages(place, place[:, 0], place[:, 0])
    plain = on_device(poisoned(layout(FORMATS[0]), 2), device)
    with pytest.raises(ValueError, match="have no tails: use append_pages"):
        append_tails(plain.layers[0], *x, sequences)
    tailed = on_device(poisoned(layout(TAIL_FORMATS[0]), 2), device)
    with pytest.raises(ValueError, match="one row for each of 2 sequences"):
        append_tails(tailed.layers[0], *x[:, :1], sequences)
