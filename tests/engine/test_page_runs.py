"""Runs of pages to and from buffers: the same bytes, checksums and judgements, compiled or not."""

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from crc32c import crc32c
from page_pools import FORMATS, TAIL_FORMATS, layout, poisoned

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageKey, Place
from pageferry.core.page_io import PageRun
from pageferry.core.pool import PageId
from pageferry.engine.pages import PageTensors
from pageferry.kernels import copy_pages, cpu_library

LEVELS = range(3)  # 0: without the library


@pytest.fixture(params=LEVELS, ids=["python", "128-bit", "512-bit"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    found = cpu_library.copy_functions()
    if request.param > (found.level if found else 0):
        pytest.skip("the library is not built, or this machine has no such vectors")
    chosen = found._replace(level=request.param) if found and request.param else None
    monkeypatch.setattr(copy_pages, "copy_functions", lambda: chosen)
    yield request.param


def run_of(first: int, count: int, pages: list[int], offsets: list[int], *, is_tail: bool = False) -> PageRun:
    return PageRun(0, is_tail, is_tail, first, count, [PageId(page) for page in pages], offsets)


def filled(page_format: PageFormat, *, dim: int = 8, num_layers: int = 5) -> PageTensors:
    """Any bytes, of which as scales and zero points all are finite and positive."""
    pages = PageTensors(layout(page_format, num_layers=num_layers, heads=3, dim=dim), [4], num_tails=4)
    torch.manual_seed(1)
    for pool in (*pages.pools, *pages.tails):
        pool.memory.copy_(torch.randint(1, 0x7B, pool.memory.shape, dtype=torch.uint8))
    return pages


@pytest.mark.parametrize("page_format", (*FORMATS, *TAIL_FORMATS), ids=str)
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_runs_travel_through_a_buffer_at_any_offset(page_format: PageFormat, dim: int, level: int) -> None:
    source, target = filled(page_format, dim=dim), poisoned(layout(page_format, num_layers=5, heads=3, dim=dim), 4)
    for is_tail in (False, True) if source.tails else (False,):
        shape = (source.layout.tails if is_tail else source.layout.pages)[0]
        for first, count in ((0, 2), (2, 1), (3, 2)):
            num_bytes = count * shape.layer_bytes
            buffer = bytearray(3 + 2 * num_bytes + 7)
            out = run_of(first, count, [2, 0], [3 + num_bytes, 3], is_tail=is_tail)
            checksums = source.read_into(out, memoryview(buffer))
            key = PageKey(0, 0, is_tail)
            payloads = [source.read(key, Place(0, PageId(page), is_tail), first, count) for page in (0, 2)]
            assert bytes(buffer) == bytes(3) + b"".join(payloads) + bytes(7)
            assert checksums == [crc32c(payload) for payload in reversed(payloads)]
            back = out._replace(pages=[PageId(1), PageId(3)])
            assert target.write_from(back, bytes(buffer)) == (checksums, None)
            written = [target.read(key, Place(0, PageId(page), is_tail), first, count) for page in (3, 1)]
            assert written == payloads


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 255, 256, 257, 511, 1000, 4099])
def test_checksums_at_odd_sizes(size: int, level: int) -> None:
    memory = bytearray(np.random.default_rng(size).integers(0, 256, size + 9, dtype=np.uint8).tobytes())
    buffer = bytearray(size + 5)
    checksums = copy_pages.read_pages(memoryview(memory), [9], [(0, size)], memoryview(buffer), [2])
    assert checksums == [crc32c(memory[9:])]
    assert bytes(buffer) == bytes(2) + memory[9:] + bytes(3)


FIRST_LAYER, NUM_LAYERS = 2, 3


def fault(text: str, part: int = 0, index: int = 0, value: float = 0.0) -> str:
    """What is said of a page whose scales are 1 and zero points 0, but for one of its `part` (1: scales, 2: zeros)."""
    pages = PageTensors(layout(PageFormat.parse(text), num_layers=6), [2], num_tails=2)
    lengths = [length for _, length in pages.layout.pages[0].ranges(FIRST_LAYER, NUM_LAYERS)]
    parts = [bytearray(length) for length in lengths]
    if len(parts) > 1:
        parts[1][:] = struct.pack("<e", 1.0) * (lengths[1] // 2)
    good = b"".join(parts)
    if part:
        struct.pack_into("<e", parts[part], index * 2, value)
    run = run_of(FIRST_LAYER, NUM_LAYERS, [0, 1], [0, len(good)])
    written = pages.write_from(run, good + b"".join(parts))
    assert written.checksums == [crc32c(good), crc32c(b"".join(parts))]
    if written.bad_factor is None:
        return ""
    assert written.bad_factor.position == 1
    return written.bad_factor.describe(pages.layout, run)


@pytest.mark.parametrize(
    "text", ["fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int4", "k=bf16,v=int4:asym", "int4:channel:asym"]
)
def test_good_pages_pass(text: str, level: int) -> None:
    assert fault(text) == ""


@pytest.mark.parametrize("value", [6e-8, 1.0, 65504.0])
def test_any_finite_positive_scale_passes(value: float, level: int) -> None:
    assert fault("int8", 1, 5, value) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, -0.0])
@pytest.mark.parametrize(
    ("text", "in_layer"),
    [("int8", 64), ("fp8_e4m3", 64), ("int4:asym", 64), ("k=int4,v=bf16", 32), ("int8:channel", 32)],
)
def test_a_scale_that_is_not_finite_and_positive_is_found(text: str, in_layer: int, value: float, level: int) -> None:
    for index, layer in ((0, 2), (in_layer - 1, 2), (in_layer, 3), (3 * in_layer - 1, 4)):
        assert fault(text, 1, index, value) == f"layer {layer}: a scale is {value}, must be finite and positive"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_zero_point_that_is_not_finite_is_found(value: float, level: int) -> None:
    assert fault("int8:asym", 2, 64, value) == f"layer 3: a zero point is {value}, must be finite"
    assert fault("int8:asym", 2, 64, -65504.0) == ""


def test_what_lies_outside_is_refused(level: int) -> None:
    pages = filled(PageFormat.parse("int8"))
    whole = 5 * pages.layout.pages[0].layer_bytes
    buffer = bytearray(whole)
    for run, message in (
        (run_of(0, 5, [4], [0]), "page 4 is outside the pool of 4"),
        (run_of(0, 5, [-1], [0]), "page -1 is outside the pool"),
        (run_of(3, 3, [0], [0]), "layers 3 to 6 are outside the page's 5"),
        (run_of(0, 5, [0], [1]), f"outside the buffer of {whole} bytes"),
        (run_of(0, 5, [0], [-1]), "outside the buffer"),
        (run_of(0, 5, [0, 1], [0]), "outside the buffer"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            pages.read_into(run, memoryview(buffer))
        with pytest.raises(InvalidArgumentError, match=message):
            pages.write_from(run, bytes(buffer))
