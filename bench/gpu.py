"""Tests and times every Triton kernel on a GPU, and serves a model there; writes one table. Takes under 8 minutes.

Kernels are timed against what their memory traffic or arithmetic allows, and attention against torch's own. Bandwidth
and bf16 arithmetic are measured in the same run. Shapes are of one layer of Llama 3 8B: 32 query and 8 KV heads of 128.
`--dry-run` calls each kernel once at small sizes, also in the interpreter, serves a tiny model from the processor, and
times nothing that counts.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from gpu_serving import Load, one_engine, two_workers
from tiny_model import TinyShape, write_tiny_model
from torch import Tensor
from torch.nn import functional

from pageferry.core.formats import PageFormat
from pageferry.core.gguf import GgufType
from pageferry.core.groups import full_group
from pageferry.core.layout import CacheLayout
from pageferry.engine.gpu_pages import DevicePages
from pageferry.kernels.gpu.append_pages import append_pages
from pageferry.kernels.gpu.append_tails import TouchedPages, append_tails
from pageferry.kernels.gpu.linear import GroupedWeight, linear
from pageferry.kernels.gpu.move_pages import gather_pages, scatter_pages
from pageferry.kernels.gpu.page_arguments import SequencePages
from pageferry.kernels.gpu.paged_attention import decode_attention
from pageferry.kernels.gpu.paged_prefill import Chunks, prefill_attention
from pageferry.kernels.gpu.rms_norm import add_rms_norm
from pageferry.kernels.gpu.rotary import rotary
from pageferry.kernels.gpu.silu_mul import silu_mul

ROOT = Path(__file__).parents[1]
FORMATS = ("bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int4", "int4:asym", "k=int8,v=int4:asym")
TAILED = ("int8:channel", "k=int4:channel:asym,v=int4")
TESTS_S, LIMIT_S = 240, 420  # most that the kernels' tests, and all that has begun, may take
FAILED = "FAILED:"
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
    for text in (*FORMATS, *TAILED):
        yield from over_pages(sizes, text, flops, half)


def over_pages(sizes: Sizes, text: str, decode_flops: int, prefill_flops: int) -> Iterator[Work]:
    batch, context, device = sizes.batch, sizes.context, torch.device(sizes.device)
    layout = CacheLayout("bench", PageFormat.parse(text), PAGE_SIZE, KV_HEADS, DIM, (full_group(1),))
    pages = DevicePages(layout, [batch * context // PAGE_SIZE], batch, device)
    memory, layer = pages.pools[0].memory, pages.layers[0]
    tables = torch.randperm(len(memory), device=device).int().view(batch, -1)
    lengths = torch.full((batch,), context, device=device, dtype=torch.int32)
    tails = torch.arange(batch, device=device).int() if pages.tails else None
    held = SequencePages(tables, lengths, tails)
    keys, values = sizes.randn(2, batch * context, KV_HEADS, DIM)
    starts = torch.arange(0, batch * context + 1, context, device=device, dtype=torch.int32)
    touched = TouchedPages.of([context] * batch, starts, [context] * batch, PAGE_SIZE)
    places, slots = tables.flatten().repeat_interleave(PAGE_SIZE), torch.arange(PAGE_SIZE, device=device)

    def append() -> None:
        if pages.tails:
            append_tails(layer, keys, values, held, (starts, touched.full))
        else:
            append_pages(layer, keys, values, places, slots.repeat(len(memory)))

    append()
    yield Work(f"append {text}", append, 2 * keys.numel() * 4 + memory.numel())
    query = sizes.randn(batch, HEADS, DIM)

    def decode() -> Tensor:
        return decode_attention(query, layer, held, SCALE, dtype=sizes.dtype)

    yield Work(f"decode {text}", decode, memory.numel(), decode_flops)
    chunk, new = sizes.randn(context, HEADS, DIM), (keys[:context], values[:context])
    one = SequencePages(tables[:1], lengths[:1], None if tails is None else tails[:1])
    chunks = Chunks.of([context], HEADS, layer, sizes.dtype)

    def prefill() -> Tensor:
        return prefill_attention(chunk, layer, one, chunks, SCALE, new=new, dtype=sizes.dtype)

    yield Work(f"prefill {text}", prefill, 0, prefill_flops)
    ranges, taken = layout.pages[0].ranges(0, 1), tables.flatten()[: len(memory) // 2]
    buffer = gather_pages(memory, taken, ranges)
    yield Work(f"gather {text}", lambda: gather_pages(memory, taken, ranges), 2 * buffer.numel())
    yield Work(f"scatter {text}", lambda: scatter_pages(memory, taken, ranges, buffer), 2 * buffer.numel())


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


def timed(device: str, until: float) -> Iterator[str]:
    """Works that would begin later than `until` are left out."""
    from triton.testing import do_bench

    sizes, left_out = Sizes(32, 2048, 4096, device, torch.bfloat16), []
    bandwidth, arithmetic = limits(device)
    name = torch.cuda.get_device_name()
    yield f"\n{name}: {bandwidth / 1e9:.0f} GB/s copied, {arithmetic / 1e12:.0f} TFLOP/s in bf16\n"
    yield "| kernel | µs | GB/s | TFLOP/s | of the roofline |\n|---|---:|---:|---:|---:|"
    for work in chain(others(sizes), attention(sizes)):
        if time.perf_counter() > until:
            left_out.append(work.name)
            continue
        seconds = do_bench(work.call, return_mode="median") / 1e3
        least = max(work.num_bytes / bandwidth, work.num_flops / arithmetic)
        figures = f"{work.num_bytes / seconds / 1e9:.0f} | {work.num_flops / seconds / 1e12:.1f}"
        yield f"| {work.name} | {seconds * 1e6:.1f} | {figures} | {100 * least / seconds:.0f} % |"
    if left_out:
        yield f"\nleft out for lack of time: {', '.join(left_out)}"


def served(load: Load) -> Iterator[str]:
    yield f"\n{load.model}, {load.page_format} pages, {load.device}\n\n| | | |\n|---|---:|---:|"
    yield from one_engine(load)
    yield from two_workers(load)


def tested() -> Iterator[str]:
    """The kernels' tests, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "tests/kernels/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S, check=False)
    print(done.stdout[-8000:], file=sys.stderr)
    last = done.stdout.strip().splitlines()[-1].strip("= ")
    yield f"kernels' tests: {last}" if done.returncode == 0 else f"{FAILED} kernels' tests: {last}"


def guarded(lines: Iterator[str]) -> Iterator[str]:
    """What goes wrong in one part must not cost the others: time on a GPU is dear."""
    try:
        yield from lines
    except Exception as error:
        traceback.print_exc()
        yield f"\n{FAILED} {type(error).__name__}: {str(error)[:500]}"


def dry_run() -> Iterator[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = Sizes(2, 32, 128, device, torch.float16)
    works = [work for work in (*attention(small), *others(small)) if "bf16" not in work.name]
    for work in works:
        work.call()
    yield f"{len(works)} calls made on {device}, none timed"
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder, "tiny"), TinyShape(num_hidden_layers=2))
        load = Load(str(model), "cuda:0" if device == "cuda" else "cpu", "int8", 40, 32, 32, 3, (1, 2))
        yield from served(load)


def report(model: str) -> Iterator[str]:
    until = time.perf_counter() + LIMIT_S
    yield from guarded(tested())
    yield from guarded(served(Load(model, "cuda:0", "int8", 2048, 512, 512, 64)))
    torch.cuda.empty_cache()
    yield from guarded(timed("cuda", until))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="call each kernel once at small sizes")
    parser.add_argument("--model", default="smollm2", help="what is served")
    parser.add_argument("--out", type=Path, help="where the table is written, too")
    options = parser.parse_args()
    if not (options.dry_run or torch.cuda.is_available()):
        print("gpu: no GPU is visible to torch here; nothing was timed")
        return 0
    started, lines = time.perf_counter(), []
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    for line in dry_run() if options.dry_run else report(options.model):
        print(line, flush=True)
        lines.append(line)
        if options.out:  # after each line, so that what was measured stays where the run is cut off
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"gpu: took {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return int(any(FAILED in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
