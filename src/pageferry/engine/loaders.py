"""What loads a model's weights and lays out its pages, on the processor or on a device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pageferry.core.available import available_bytes
from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import invalid
from pageferry.core.layout import HEAD_DIM_MULTIPLE, CacheLayout
from pageferry.core.memory import MemoryPlan, is_mixed, mixed_bytes, unpacked_bytes
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, safetensors_paths
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.gpu_load import DeviceLoader, open_device
from pageferry.engine.hf_tensors import HfTensors
from pageferry.engine.mixed_weights import load_mixed_weights
from pageferry.engine.model import Model
from pageferry.engine.native import NativeModel
from pageferry.engine.pages import PageTensors
from pageferry.engine.quantised_weights import (
    is_quantised,
    load_quantised_weights,
    multiplied_sizes,
    quantised_bytes,
)
from pageferry.engine.runner import ForwardPass
from pageferry.engine.tensors import TensorFiles
from pageferry.engine.weights import load_weights
from pageferry.kernels.cpu_library import CpuKernels, Isa, load_kernels

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ProcessorLoader:
    """As `DeviceLoader`, of a model that the processor computes."""

    config: ModelConfig
    tensors: TensorFiles
    dtype: torch.dtype
    kernels: CpuKernels | None
    quantised: GgufTensors | None  # the tensors, where the kernels multiply them as they are in the file
    mixed: GgufTensors | None = None  # the same, where they do so with some

    @property
    def for_torch(self) -> bool:
        return self.kernels is None

    @property
    def how(self) -> str:
        numbers = "the file's groups" if self.quantised else str(self.dtype).removeprefix("torch.")
        numbers = f"the file's groups and {numbers}" if self.mixed else numbers
        return numbers + (f" ({self.kernels.isa.name.lower()} kernels)" if self.kernels else "")

    @property
    def weight_bytes(self) -> int:
        if self.mixed:
            return mixed_bytes(self.config, multiplied_sizes(self.config, self.mixed), self.dtype.itemsize)
        return quantised_bytes(self.quantised) if self.quantised else unpacked_bytes(self.config, self.dtype.itemsize)

    def available_bytes(self) -> int:
        return available_bytes()

    def load(self, frequencies: Tensor, max_positions: int, progress: Callable[[str], None]) -> ForwardPass:
        if self.quantised and self.kernels:
            packed = load_quantised_weights(self.config, self.quantised, progress=progress)
            return NativeModel(self.config, packed, frequencies, max_positions, self.kernels)
        if self.mixed and self.kernels:
            weights = load_mixed_weights(self.config, self.mixed, self.dtype, self.kernels, progress=progress)
        else:
            weights = load_weights(self.config, self.tensors, self.dtype, progress=progress)
        return Model(self.config, weights, frequencies, max_positions, self.kernels)

    def pages(self, layout: CacheLayout, memory: MemoryPlan) -> PageTensors:
        return PageTensors(layout, memory.num_pages, memory.num_tails)


def make_loader(
    config: EngineConfig, scheduler: SchedulerConfig, model: ModelConfig, layout: CacheLayout, tensors: TensorFiles
) -> ProcessorLoader | DeviceLoader:
    if config.device != "cpu":
        device = open_device(config.device)
        return DeviceLoader(model, tensors, config.compute_dtype, device, scheduler.max_num_seqs)
    kernels = _kernels(config, layout)
    dtype, grouped = compute_dtype(config.compute_dtype), _grouped(tensors, config, kernels)
    quantised = grouped if grouped and is_quantised(grouped) else None
    mixed = grouped if grouped and is_mixed(model, multiplied_sizes(model, grouped)) else None
    return ProcessorLoader(model, tensors, dtype, kernels, quantised, mixed)


def compute_dtype(name: str) -> torch.dtype:
    """`fp32`, `bf16`, or `auto`: bf16 where the processor multiplies it natively."""
    if name in _DTYPES:
        return _DTYPES[name]
    capabilities = torch.cpu.get_capabilities()
    return torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else torch.float32


def _kernels(config: EngineConfig, layout: CacheLayout) -> CpuKernels | None:
    """The compiled kernels; None where torch is to compute.

    Raises InvalidArgumentError where they are asked for and can't be had.
    """
    if config.kernels == "torch":
        return None
    kernels = load_kernels(torch.get_num_threads())
    problem = ""
    if kernels is None:
        problem = "the package was installed without a C++ compiler"
    elif layout.head_dim % HEAD_DIM_MULTIPLE:
        problem = f"the model's heads have {layout.head_dim} numbers, no multiple of {HEAD_DIM_MULTIPLE}"
    elif kernels.isa is Isa.PORTABLE and config.kernels == "auto":
        return None  # torch has code for this processor, which is faster
    if problem and config.kernels == "cpu":
        raise invalid("kernels", config.kernels, f"can't be cpu: {problem}; auto computes by torch then")
    return None if problem else kernels


def _grouped(tensors: TensorFiles, config: EngineConfig, kernels: CpuKernels | None) -> GgufTensors | None:
    """The tensors, where the kernels are to multiply those that they can as they are in the file."""
    if kernels is None or config.compute_dtype != "auto" or not isinstance(tensors, GgufTensors):
        return None
    return tensors


def open_tensors(files: ModelFiles, config: ModelConfig) -> TensorFiles:
    return GgufTensors(files.path, config) if files.kind == "gguf" else HfTensors(safetensors_paths(files))
