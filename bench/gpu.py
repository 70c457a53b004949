"""Times every Triton kernel on a GPU against what its memory traffic or arithmetic allows, and attention against torch.

Bandwidth and bf16 arithmetic are measured in the same run. Shapes are of one layer of Llama 3 8B: 32 query and 8 KV
heads of 128. Takes a few minutes, most of them compiling; run `make test-gpu` before. `--dry-run` calls each kernel
once at small sizes, also in the interpreter, and times nothing.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pageferry.core.formats import PageFormat
from pageferry.core.gguf import GgufType
from pageferry.core.layout import PageLayout
from pageferry.engine.pages import PageTensors
from pageferry.kernels.append_pages import LayerPages, SidePages
from pageferry.kernels.gpu.append_pages import append_pages
from pageferry.kernels.gpu.linear import GroupedWeight, linear
from pageferry.kernels.gpu.move_pages import gather_pages, scatter_pages
from pageferry.kernels.gpu.paged_attention import decode_attention
from pageferry.kernels.gpu.paged_prefill import Chunks, prefill_attention
from pageferry.kernels.gpu.rms_norm import add_rms_norm
from pageferry.kernels.gpu.rotary import rotary
from pageferry.kernels.gpu.silu_mul import silu_mul

FORMATS = ("bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int4", "int4:asym", "k=int8,v=int4:asym")
HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Work:
    """A call, and the least that it must move and compute."""

    name: str
    call: Callable[[], object]
    num_bytes: int
    num_flops: int = 0


@dataclass(frozen=True)
class Sizes:
    batch: int
    context: int
    width: int
    device: str
    dtype: torch.dtype

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32)


def attention(sizes: Sizes) -> Iterator[Work]:
    """Torch's own over contiguous bf16, then ours over pages of each format."""
    batch, context = sizes.batch, sizes.context
    keys, values = sizes.randn(2, batch, KV_HEADS, context, DIM).to(sizes.dtype)
    query = sizes.randn(batch, HEADS, 1, DIM).to(sizes.dtype)
    flops = 4 * batch * HEADS * DIM * context

    def sdpa() -> Tensor:
        return functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    yield Work("decode, torch over contiguous", sdpa, 2 * keys.numel() * keys.element_size(), flops)
    chunk = sizes.randn(1, HEADS, context, DIM).to(sizes.dtype)

    def causal() -> Tensor:
        return functional.scaled_dot_product_attention(chunk, keys[:1], values[:1], is_causal=True, enable_gqa=True)

    half = 2 * HEADS * DIM * context * context
    yield Work("prefill, torch over contiguous", causal, 0, half)
    for text in FORMATS:
        yield from over_pages(sizes, text, flops, half)


def over_pages(sizes: Sizes, text: str, decode_flops: int, prefill_flops: int) -> Iterator[Work]:
    batch, context = sizes.batch, sizes.context
    pages = PageTensors(
        PageLayout("bench", PageFormat.parse(text), PAGE_SIZE, 1, KV_HEADS, DIM), batch * context // PAGE_SIZE
    )
    memory = pages._memory.to(sizes.device)
    layer = LayerPages(*(moved(side, pages._memory, memory) for side in (pages.layers[0].keys, pages.layers[0].values)))
    places = torch.randperm(batch * context, device=sizes.device)
    keys, values = sizes.randn(2, batch * context, KV_HEADS, DIM)

    def append() -> None:
        append_pages(layer, keys, values, places // PAGE_SIZE, places % PAGE_SIZE)

    append()
    yield Work(f"append {text}", append, 2 * keys.numel() * 4 + memory.numel())
    tables = torch.randperm(memory.shape[0], device=sizes.device, dtype=torch.int32).view(batch, -1)
    lengths = torch.full((batch,), context, device=sizes.device, dtype=torch.int32)
    query = sizes.randn(batch, HEADS, DIM)

    def decode() -> Tensor:
        return decode_attention(query, layer, tables, lengths, SCALE, dtype=sizes.dtype)

    yield Work(f"decode {text}", decode, memory.numel(), decode_flops)
    chunk = sizes.randn(context, HEADS, DIM)
    chunks = Chunks.of([context], HEADS // KV_HEADS, sizes.dtype, sizes.device)

    def prefill() -> Tensor:
        return prefill_attention(chunk, layer, tables[:1], lengths[:1], chunks, SCALE, dtype=sizes.dtype)

    yield Work(f"prefill {text}", prefill, 0, prefill_flops)
    ranges, taken = pages.layout.ranges(0, 1), tables.flatten()[: len(memory) // 2]
    buffer = gather_pages(memory, taken, ranges)
    yield Work(f"gather {text}", lambda: gather_pages(memory, taken, ranges), 2 * buffer.numel())
    yield Work(f"scatter {text}", lambda: scatter_pages(memory, taken, ranges, buffer), 2 * buffer.numel())


def moved(side: SidePages, old: Tensor, new: Tensor) -> SidePages:
    """The same views into memory on another device."""

    def view(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        return new.view(part.dtype).as_strided(part.shape, part.stride(), part.storage_offset())

    payload = view(side.payload)
    assert payload is not None and old.shape == new.shape
    return SidePages(side.format, payload, view(side.scales), view(side.zeros))


def others(sizes: Sizes) -> Iterator[Work]:
    rows, width = sizes.batch, sizes.width
    x = sizes.randn(rows, width).to(sizes.dtype)
    residual, weight = sizes.randn(rows, width), sizes.randn(width)
    yield Work(
        "add rms norm", lambda: add_rms_norm(x, residual, weight, 1e-5, sizes.dtype), rows * width * (2 + 4 + 4 + 2)
    )
    gate_up = sizes.randn(rows, 2 * width).to(sizes.dtype)
    yield Work("silu mul", lambda: silu_mul(gate_up), 3 * rows * width * 2)
    heads, angles = sizes.randn(rows, HEADS + KV_HEADS, DIM), sizes.randn(rows, DIM // 2)
    yield Work("rotary", lambda: rotary(heads, angles.cos(), angles.sin()), 2 * heads.numel() * 4)
    for kind in (GgufType.Q4_0, GgufType.Q4_1, GgufType.Q8_0):
        num_bytes = width * width // 32 * kind.block[1]
        blocks = torch.zeros(num_bytes, dtype=torch.uint8, device=sizes.device)
        grouped = GroupedWeight.from_blocks(blocks, kind, width)
        for count in (1, rows):
            work = 2 * count * width * width
            yield Work(
                f"linear {kind.name}, {count} rows", lambda g=grouped, n=count: linear(x[:n], g), num_bytes, work
            )


def limits(device: str) -> tuple[float, float]:
    """(bytes, bf16 operations) a second that this GPU reaches in plain copies and products."""
    from triton.testing import do_bench

    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    product_ms = do_bench(lambda: square @ square, return_mode="median")
    return 2 * source.numel() / copy_ms * 1e3, 2 * 8192**3 / product_ms * 1e3


def timed(works: Iterator[Work], device: str) -> None:
    from triton.testing import do_bench

    bandwidth, arithmetic = limits(device)
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e9:.0f} GB/s copied, {arithmetic / 1e12:.0f} TFLOP/s in bf16")
    print("| kernel | µs | GB/s | TFLOP/s | of the roofline |\n|---|---|---|---|---|")
    for work in works:
        seconds = do_bench(work.call, return_mode="median") / 1e3
        least = max(work.num_bytes / bandwidth, work.num_flops / arithmetic)
        figures = f"{work.num_bytes / seconds / 1e9:.0f} | {work.num_flops / seconds / 1e12:.1f}"
        print(f"| {work.name} | {seconds * 1e6:.1f} | {figures} | {100 * least / seconds:.0f} % |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="call each kernel once at small sizes")
    if parser.parse_args().dry_run:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        small = Sizes(2, 32, 128, device, torch.float16)
        works = [work for work in (*attention(small), *others(small)) if "bf16" not in work.name]
        for work in works:
            work.call()
        print(f"gpu: {len(works)} calls made on {device}, none timed")
        return 0
    if not torch.cuda.is_available():
        print("gpu: no GPU is visible to torch here; nothing was timed")
        return 0
    sizes = Sizes(32, 2048, 4096, "cuda", torch.bfloat16)
    for works in (attention(sizes), others(sizes)):
        timed(works, "cuda")
    return 0


if __name__ == "__main__":
    sys.exit(main())
