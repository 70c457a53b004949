"""Compiles every Triton kernel ahead of time, without a GPU, and prints what the compiler says of it.

Run it as a process of its own, without TRITON_INTERPRET. Models' shapes: heads of 64 (3 query heads to a KV head, as
SmolLM2 has) and of 128 (4, as Llama 3 and Mistral have); pages of 16 tokens; products in bf16. Exits with 1 if a
kernel spills registers.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from pageferry.core.formats import Element, PageFormat, TensorFormat
from pageferry.kernels.gpu import (
    append_pages,
    append_tails,
    linear,
    move_pages,
    page_arguments,
    paged_attention,
    paged_prefill,
    rms_norm,
    rotary,
    silu_mul,
)

TARGETS = (80, 90)
PAGE_SIZE = 16
FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int4", "int4:asym")
APART = ("k=int8,v=int4:asym", "k=int4:asym,v=bf16", "k=fp32,v=fp8_e4m3")
TAILED = (
    "int8:channel",
    "int4:channel:asym",
    "fp8_e4m3:channel",
    "k=int8:channel,v=int4",
    "k=int4:channel:asym,v=bf16",
)
QUICK = ("k=fp8_e4m3,v=int4:asym", "k=int8:channel,v=int4:asym")
_POINTERS = {Element.FP32: "*fp32", Element.BF16: "*bf16", Element.FP16: "*fp16"}


@dataclass(frozen=True)
class Variant:
    """A kernel as one call compiles it. Arguments without a type are int32, of which strides are multiples of 16."""

    name: str
    kernel: triton.JITFunction
    types: dict[str, str]
    constants: dict[str, object]
    num_warps: int = 4
    max_registers: int | None = None


@dataclass(frozen=True)
class Row:
    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int


def compiled(variant: Variant, arch: int) -> Row:
    names = variant.kernel.arg_names
    kinds = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if kinds[name].startswith("*") or (kinds[name] == "i32" and name.endswith("stride"))
    }
    source = ASTSource(fn=variant.kernel, signature=kinds, constexprs=variant.constants, attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": 2, "enable_fp_fusion": True}
    options["maxnreg"] = variant.max_registers
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spills = assembled(result.asm["ptx"], arch)
    return Row(variant.name, f"sm_{arch}", registers, spills, result.metadata.shared)


def assembled(ptx: str, arch: int) -> tuple[int, int]:
    """(registers, bytes spilled) by the assembler's own account, of the code that Triton gave it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", str(path), "-o", str(path.with_suffix(".o"))]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"the assembler doesn't say how many registers it used:\n{log}")
    return int(registers[1]), int(spills[1]) + int(spills[2])


def side(prefix: str, format_: TensorFormat) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of a side's arguments."""
    signed = format_.element is Element.INT8 and format_.symmetric
    types = {f"{prefix}_payload": _POINTERS.get(format_.element, "*i8" if signed else "*u8")}
    constants: dict[str, object] = {
        f"{prefix.upper()}_ELEMENT": format_.element.value,
        f"{prefix.upper()}_CHANNEL": format_.is_per_channel,
    }
    for part, is_there in (("scales", format_.element.is_scaled), ("zeros", not format_.symmetric)):
        if is_there:
            types[f"{prefix}_{part}"] = "*fp16"
        else:
            constants[f"{prefix}_{part}"] = None
    return types, constants


def of_tails(*, there: bool) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of what is there for tails."""
    pointers = {"tails": "*i32", "k_tails": "*fp16", "v_tails": "*fp16"}
    rows = {"keys": "*fp32", "values": "*fp32"}
    return (pointers | rows, {}) if there else ({}, dict.fromkeys((*pointers, *rows)))


def named(kernel: triton.JITFunction, values: dict[str, object]) -> dict[str, object]:
    """Those that the kernel has."""
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def of_pages(text: str, dim: int, group: int, dtype: torch.dtype) -> Iterator[Variant]:
    """Append, decode and prefill over pages of a format."""
    page_format = PageFormat.parse(text)
    has_tails = page_format.has_tails
    (k_types, k_constants), (v_types, v_constants) = side("k", page_format.k), side("v", page_format.v)
    tail_types, tail_constants = of_tails(there=has_tails)
    types = k_types | v_types | tail_types | {"query": "*fp32", "tables": "*i32", "lengths": "*i32", "scale": "fp32"}
    types |= {"partial": "*fp32", "logs": "*fp32", "starts": "*i32", "blocks": "*i32", "out": "*fp32"}
    shape = {"D": dim, "DP": page_arguments.padded_dim(dim), "PAGE": PAGE_SIZE} | k_constants | v_constants
    suffix = f"{text} {dim}" if dtype == torch.bfloat16 else f"{text} {dim} in fp32"

    def variant(
        name: str, kernel: triton.JITFunction, constants: dict[str, object], warps: int = 4, most: int | None = None
    ) -> Variant:
        constants = named(kernel, shape | constants)
        return Variant(f"{name} {suffix}", kernel, named(kernel, types), constants, warps, most)

    if dtype == torch.bfloat16:
        tops = {"K_TOP": append_pages.top(page_format.k), "V_TOP": append_pages.top(page_format.v)}
        types |= {"keys": "*fp32", "values": "*fp32", "pages": "*i64", "slots": "*i64"}
        if has_tails:
            constants = tops | {"SLOTS": PAGE_SIZE}
            yield variant(
                "append one", append_tails._append_tails_kernel, constants | {"touched": None, "starts": None}
            )
            types["touched"] = "*i32"
            yield variant("append chunk", append_tails._append_tails_kernel, constants)
        else:
            yield variant("append", append_pages._append_kernel, tops | {"TOKENS": append_pages.TOKENS})
    shape |= {
        "GROUP": group,
        "DOT": page_arguments.DOT_DTYPES[dtype],
        "OPEN": PAGE_SIZE if has_tails else 1,
    } | tail_constants
    constants = {"TILE": paged_attention.tile_tokens(dtype), "OPEN_TILE": paged_attention.open_tile(PAGE_SIZE)}
    constants |= {"ROWS": 16, "SPLIT_TILES": paged_attention.SPLIT_TILES}
    most = page_arguments.MAX_REGISTERS
    yield variant("decode", paged_attention._decode_kernel, constants, paged_attention.num_warps(dim), most)
    constants = {"TILE": paged_prefill.TILE, "PAIRS": paged_prefill.num_pairs(dim, has_tails, dtype)}
    warps = paged_prefill.num_warps(dim, has_tails, dtype)
    yield variant("prefill", paged_prefill._prefill_kernel, constants, warps, most)


def others() -> Iterator[Variant]:
    for dim in (64, 128):
        types = {"partial": "*fp32", "logs": "*fp32", "lengths": "*i32", "out": "*fp32"}
        constants = {"D": dim, "DP": dim, "OPEN": 1, "TILE": 64, "SPLIT_TILES": paged_attention.SPLIT_TILES}
        yield Variant(f"combine {dim}", paged_attention._combine_kernel, types, constants, num_warps=1)
        types = {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*fp32"}
        constants = {"HEADS": rotary.HEADS, "HALF": dim // 2, "HALF_P": dim // 2}
        yield Variant(f"rotary {dim}", rotary._rotary_kernel, types, constants, num_warps=2)
    for scatters in (False, True):
        types = {"memory": "*i64", "pages": "*i64", "buffer": "*i64"}
        constants = {"BLOCK": move_pages.BLOCK, "SCATTERS": scatters}
        yield Variant("scatter pages" if scatters else "gather pages", move_pages._move_kernel, types, constants)
    for width in (576, 4096):
        padded = triton.next_power_of_2(width)
        types = {"x": "*bf16", "residual": "*fp32", "weight": "*fp32", "out": "*bf16", "eps": "fp32"}
        constants = {"N": width, "NP": padded}
        warps = rms_norm.num_warps(padded)
        yield Variant(f"add rms norm {width}", rms_norm._rms_norm_kernel, types, constants, num_warps=warps)
        constants = constants | {"residual": None}
        yield Variant(f"rms norm {width}", rms_norm._rms_norm_kernel, types, constants, num_warps=warps)
    for width in (1536, 14336):
        constants = {"N": width, "BLOCK": silu_mul.BLOCK}
        yield Variant(f"silu mul {width}", silu_mul._silu_mul_kernel, {"gate_up": "*bf16", "out": "*bf16"}, constants)
    yield from matmuls()


def matmuls() -> Iterator[Variant]:
    kinds = (("Q4_0", 8, True), ("Q4_1", 0, True), ("Q8_0", 0, False))
    sizes = [
        (dtype, rows) for dtype in (torch.bfloat16, torch.float32) for rows in sorted({16, linear.most_rows(dtype)})
    ]
    for name, offset, is_packed in kinds:
        for dtype, rows in sizes:
            of_x = "*bf16" if dtype == torch.bfloat16 else "*fp32"
            types = {"x": of_x, "scales": "*fp16", "out": of_x, "elements": "*u8" if is_packed else "*i8"}
            constants: dict[str, object] = {"ROWS": rows, "COLUMNS": linear.COLUMNS, "STEP": linear.STEP}
            constants |= {"OFFSET": offset, "PACKED": is_packed, "DOT": page_arguments.DOT_DTYPES[dtype], "bias": None}
            if name == "Q4_1":
                types["minima"] = "*fp16"
            else:
                constants["minima"] = None
            suffix = "" if dtype == torch.bfloat16 else " in fp32"
            yield Variant(f"linear {name} {rows} rows{suffix}", linear._linear_kernel, types, constants)


def variants(*, quick: bool) -> Iterator[Variant]:
    if quick:
        for text in QUICK:
            yield from of_pages(text, 64, 3, torch.bfloat16)
        return
    for text in (*FORMATS, *APART, *TAILED):
        yield from of_pages(text, 64, 3, torch.bfloat16)
    for text in (*FORMATS, *TAILED):
        yield from of_pages(text, 128, 4, torch.bfloat16)
    for text in ("fp32", "int4:asym", "int4:channel:asym"):
        yield from of_pages(text, 64, 3, torch.float32)
        yield from of_pages(text, 128, 4, torch.float32)
    yield from others()


def table(rows: Iterable[Row]) -> str:
    lines = ["| kernel | target | registers | spilled bytes | shared bytes |", "|---|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(map(str, dataclasses.astuple(row)))} |" for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="append, decode and prefill of one format instead of all")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    options = parser.parse_args()
    rows = [compiled(variant, arch) for variant in variants(quick=options.quick) for arch in TARGETS]
    print(json.dumps([dataclasses.asdict(row) for row in rows]) if options.json else table(rows))
    spilled = [row for row in rows if row.spill_bytes]
    print(f"kernels-report: {len(rows)} kernels, {len(spilled)} of them spill registers", file=sys.stderr)
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
