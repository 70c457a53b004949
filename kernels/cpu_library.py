"""The compiled CPU kernels in kernels/cpu, through ctypes: loading, the structures of cpu/abi.h, and calls on tensors.

Calls drop the GIL, take pointers, and check nothing that their callers in the operations' own files have not checked.
Each calling thread works with a crew of threads of its own, which sleep between calls.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_ABI_VERSION = 3
_PATH = Path(__file__).with_name("_cpu.so")


class Isa(IntEnum):
    """Instruction sets that the library holds code for."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


def _of(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one kind that follow one another."""
    return [(name, kind) for name in names.split()]


class Matrix(Structure):
    _fields_ = (*_of(c_void_p, "blocks bias"), *_of(c_int32, "kind rows columns reserved"))


class Projection(Structure):
    _fields_ = (("parts", Matrix * 3), ("num_parts", c_int32), ("num_rows", c_int32))


class Side(Structure):
    _fields_ = (
        *_of(c_void_p, "payload scales zeros tails"),
        ("row_bytes", c_int64),
        *_of(c_int32, "element is_per_channel"),
    )


class Pages(Structure):
    _fields_ = (
        ("sides", Side * 2),
        *_of(c_int64, "page_bytes tail_bytes"),
        *_of(c_int32, "page_size num_kv_heads head_dim group window sinks"),
    )


class Tables(Structure):
    _fields_ = (("starts", c_void_p), ("pages", c_void_p))


class Batch(Structure):
    _fields_ = (
        *_of(c_void_p, "positions row_starts"),
        ("tables", POINTER(Tables)),
        ("tails", c_void_p),
        *_of(c_int32, "num_rows num_seqs"),
    )


class Rotary(Structure):
    _fields_ = (*_of(c_void_p, "cos sin q_norm k_norm"), ("eps", c_float), ("reserved", c_int32))


class Attention(Structure):
    _fields_ = (*_of(c_void_p, "query out"), ("query_stride", c_int64), ("num_heads", c_int32), ("scale", c_float))


class Layer(Structure):
    _fields_ = (*_of(c_void_p, "attention_norm q_norm k_norm mlp_norm"), *_of(Projection, "qkv output gate_up down"))


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        *_of(c_void_p, "norm cos sin"),
        *_of(Matrix, "embedding head"),
        *_of(c_int32, "num_layers hidden_size intermediate_size num_heads"),
        ("eps", c_float),
        ("reserved", c_int32),
    )


class Tokens(Structure):
    _fields_ = (*_of(c_void_p, "ids sampled_rows logits likeliest"), *_of(c_int32, "num_sampled reserved"))


class Pool(Structure):
    _fields_ = (("layers", POINTER(Pages)), ("first_layers", POINTER(c_int32)), *_of(c_int32, "num_groups reserved"))


_TEAM = (c_int32, c_int32)  # instruction set, threads
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "abi_version": (c_int32, ()),
    "best_isa": (c_int32, ()),
    "rms_norm": (None, (*_TEAM, c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_float)),
    "silu_mul": (None, (*_TEAM, c_void_p, c_void_p, c_int32, c_int32)),
    "linear_bytes": (c_int64, (*_TEAM, POINTER(Matrix), c_int32)),
    "linear": (None, (*_TEAM, POINTER(Matrix), c_int32, c_void_p, c_void_p, c_void_p)),
    "unpack": (None, (*_TEAM, POINTER(Matrix), c_void_p, c_void_p, c_int32)),
    "append": (None, (*_TEAM, c_void_p, POINTER(Rotary), POINTER(Pages), POINTER(Batch), c_int32)),
    "attention_bytes": (c_int64, (*_TEAM, POINTER(Attention), POINTER(Pages), POINTER(Batch))),
    "attention": (None, (*_TEAM, POINTER(Attention), POINTER(Pages), POINTER(Batch), c_void_p)),
    "copy_level": (c_int32, ()),
    "read_pages": (None, (c_int32, c_void_p, c_int32, c_void_p, c_void_p)),
    "write_pages": (None, (c_int32, c_void_p, c_int32, c_void_p, c_void_p)),
    "step_bytes": (c_int64, (*_TEAM, POINTER(Model), POINTER(Pool), POINTER(Batch))),
    "step": (None, (*_TEAM, POINTER(Model), POINTER(Pool), POINTER(Batch), POINTER(Tokens), c_void_p)),
}


class Workspace:
    """Memory that calls work in; grows to what the largest has needed and stays. One call at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Where `num_bytes` lie, aligned to 64; what an earlier call left there is lost."""
        if self._memory.numel() < num_bytes + 64:
            self._memory = torch.empty(num_bytes + num_bytes // 4 + 64, dtype=torch.uint8)
        return -(-self._memory.data_ptr() // 64) * 64


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The library for one instruction set and number of threads, with memory to work in: for one thread's use."""

    functions: dict[str, Callable[..., int]]
    isa: Isa
    num_threads: int
    workspace: Workspace = field(default_factory=Workspace)

    def call(self, name: str, *arguments: object) -> None:
        self.functions[name](self.isa, self.num_threads, *arguments)

    def call_in_workspace(self, name: str, arguments: tuple[object, ...], *more: object) -> None:
        """Call `name` with its `arguments`, from which the library counts the bytes, `more`, and a workspace."""
        num_bytes = self.functions[name + "_bytes"](self.isa, self.num_threads, *arguments)
        self.call(name, *arguments, *more, self.workspace.address(num_bytes))


@functools.cache
def _functions() -> dict[str, Callable[..., int]] | None:
    try:
        library = ctypes.CDLL(str(_PATH))
    except OSError:  # not built: no compiler, or a source tree as it was cloned
        return None
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, "pf_" + name, None)
        if function is None:
            return None
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions if functions["abi_version"]() == _ABI_VERSION else None


def load_kernels(num_threads: int, isa: Isa | None = None) -> CpuKernels | None:
    """None where the library was not built, or is another version's; `isa` is the best of the machine unless given."""
    functions = _functions()
    if functions is None:
        return None
    return CpuKernels(functions, Isa(functions["best_isa"]()) if isa is None else isa, num_threads)


class CopyFunctions(NamedTuple):
    """The copies of pages, and how wide the vectors are that this machine runs them with."""

    read: Callable[..., int]
    write: Callable[..., int]
    level: int


@functools.cache
def copy_functions() -> CopyFunctions | None:
    """None where the library was not built, or this machine can't run them."""
    functions = _functions()
    if functions is None or not (level := functions["copy_level"]()):
        return None
    return CopyFunctions(functions["read_pages"], functions["write_pages"], level)


def available_isas() -> tuple[Isa, ...]:
    """All instruction sets that this machine runs, the portable one first; none without the library."""
    best = load_kernels(1)
    return () if best is None else tuple(isa for isa in Isa if isa <= best.isa)


def address(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Of a contiguous tensor's first number; the caller keeps the tensor alive for as long as it is used."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()


__all__ = ["CpuKernels", "Isa", "address", "available_isas", "byref", "copy_functions", "load_kernels"]
