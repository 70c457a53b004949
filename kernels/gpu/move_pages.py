"""Gather pages' byte ranges into a transfer buffer, and scatter them back.

Shapes: memory [num_pages, page_bytes] uint8, all of a pool; pages [n] int32 or int64; buffer [n, bytes] uint8, a row as
`PageSource.read` orders it: the layer range's payload, its scales, its zero points. `ranges` come from PageLayout.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit
def _move_kernel(
    memory, page_stride, pages, buffer, start0, end0, start1, end1, start2, end2,
    BLOCK: tl.constexpr, SCATTERS: tl.constexpr,
):  # fmt: skip
    """A program is BLOCK words of one page; ends are the buffer's, starts the page's, less the buffer's begin."""
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + row).to(tl.int64)
    shift = tl.where(word < end0, start0, tl.where(word < end1, start1, start2))
    inside = memory + page * page_stride + word + shift
    outside = buffer + row * end2 + word
    mask = word < end2
    if SCATTERS:
        tl.store(inside, tl.load(outside, mask=mask), mask=mask)
    else:
        tl.store(outside, tl.load(inside, mask=mask), mask=mask)


def gather_pages(memory: Tensor, pages: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """A new buffer with the (offset, length) `ranges` of each page."""
    num_bytes = sum(length for _, length in ranges)
    buffer = memory.new_empty((len(pages), num_bytes))
    _move(memory, pages, ranges, buffer, scatters=False)
    return buffer


def scatter_pages(memory: Tensor, pages: Tensor, ranges: Sequence[tuple[int, int]], buffer: Tensor) -> None:
    """Writes a buffer, as `gather_pages` gives it, into the pages, of which none may come twice."""
    _move(memory, pages, ranges, buffer, scatters=True)


def _move(memory: Tensor, pages: Tensor, ranges: Sequence[tuple[int, int]], buffer: Tensor, *, scatters: bool) -> None:
    page_bytes, num_bytes = memory.shape[1], sum(length for _, length in ranges)
    if not 1 <= len(ranges) <= 3 or any(min(pair) < 0 or sum(pair) > page_bytes for pair in ranges):
        raise ValueError(f"ranges {list(ranges)} must be one to three, inside a page of {page_bytes} bytes")
    if buffer.shape != (len(pages), num_bytes) or not (buffer.is_contiguous() and memory.is_contiguous()):
        raise ValueError(f"buffer {list(buffer.shape)} must be contiguous [{len(pages)}, {num_bytes}], memory too")
    if not buffer.numel():
        return
    numbers = [page_bytes, buffer.data_ptr(), memory.data_ptr(), *(number for pair in ranges for number in pair)]
    size, dtype = next((size, dtype) for size, dtype in _WORDS if all(number % size == 0 for number in numbers))
    places, end = [], 0
    for offset, length in ranges:
        places += [(offset - end) // size, (end + length) // size]
        end += length
    places += places[-2:] * (3 - len(ranges))
    _move_kernel[(len(pages), triton.cdiv(num_bytes // size, BLOCK))](
        memory.view(dtype), page_bytes // size, pages, buffer.view(dtype), *places,
        BLOCK=BLOCK, SCATTERS=scatters, num_warps=4,
    )  # fmt: skip
