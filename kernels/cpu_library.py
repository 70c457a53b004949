"""The compiled CPU kernels in kernels/cpu, through ctypes: loading, the structures of cpu/abi.h, and calls on tensors.

Calls drop the GIL, take pointers, and check nothing that their callers in the operations' own files have not checked.
Torch is imported first, so that the library shares its OpenMP run-time and with it the threads of the calling thread.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

_ABI_VERSION = 2
_PATH = Path(__file__).with_name("_cpu.so")


class Isa(IntEnum):
    """Instruction sets that the library holds code for."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


class Matrix(Structure):
    _fields_ = (
        ("blocks", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("reserved", c_int32),
    )


class Projection(Structure):
    _fields_ = (("parts", Matrix * 3), ("num_parts", c_int32), ("num_rows", c_int32))


class Side(Structure):
    _fields_ = (
        ("payload", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("tails", c_void_p),
        ("row_bytes", c_int64),
        ("element", c_int32),
        ("is_per_channel", c_int32),
    )


class Pages(Structure):
    _fields_ = (
        ("sides", Side * 2),
        ("page_bytes", c_int64),
        ("tail_bytes", c_int64),
        ("page_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("group", c_int32),
        ("window", c_int32),
        ("sinks", c_int32),
    )


class Tables(Structure):
    _fields_ = (("starts", c_void_p), ("pages", c_void_p))


class Batch(Structure):
    _fields_ = (
        ("positions", c_void_p),
        ("row_starts", c_void_p),
        ("tables", POINTER(Tables)),
        ("tails", c_void_p),
        ("num_rows", c_int32),
        ("num_seqs", c_int32),
    )


class Rotary(Structure):
    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("reserved", c_int32),
    )


class Attention(Structure):
    _fields_ = (
        ("query", c_void_p),
        ("out", c_void_p),
        ("query_stride", c_int64),
        ("num_heads", c_int32),
        ("scale", c_float),
    )


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Projection),
        ("output", Projection),
        ("gate_up", Projection),
        ("down", Projection),
    )


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("embedding", Matrix),
        ("head", Matrix),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("eps", c_float),
        ("reserved", c_int32),
    )


class Tokens(Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("sampled_rows", c_void_p),
        ("logits", c_void_p),
        ("num_sampled", c_int32),
        ("reserved", c_int32),
    )


class Pool(Structure):
    _fields_ = (
        ("layers", POINTER(Pages)),
        ("first_layers", POINTER(c_int32)),
        ("num_groups", c_int32),
        ("reserved", c_int32),
    )


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


__all__ = ["CpuKernels", "Isa", "address", "available_isas", "byref", "load_kernels"]
