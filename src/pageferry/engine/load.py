"""From a configuration to an engine that can run."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pageferry.core.available import available_bytes
from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.cores import num_cores
from pageferry.core.errors import InvalidArgumentError, invalid
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.layout import HEAD_DIM_MULTIPLE, CacheLayout
from pageferry.core.memory import MemoryPlan, context_limit, is_mixed, mixed_bytes, plan_memory, unpacked_bytes
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, load_config_of, resolve_model, safetensors_paths
from pageferry.core.model_shapes import check_shapes, expected_shapes
from pageferry.core.plan import Runner
from pageferry.engine.batch import BatchBuilder
from pageferry.engine.drafter import ModelDrafter, draft_source
from pageferry.engine.fingerprint import fingerprint
from pageferry.engine.gguf_tensors import ROPE_FACTORS, GgufTensors
from pageferry.engine.gpu_load import DeviceLoader, open_device
from pageferry.engine.hf_tensors import HfTensors
from pageferry.engine.mixed_weights import load_mixed_weights
from pageferry.engine.model import Model
from pageferry.engine.native import NativeModel
from pageferry.engine.outliers import key_warning
from pageferry.engine.pages import PageTensors
from pageferry.engine.quantised_weights import (
    is_quantised,
    load_quantised_weights,
    multiplied_sizes,
    quantised_bytes,
)
from pageferry.engine.rope import inverse_frequencies
from pageferry.engine.runner import ForwardPass, TorchRunner
from pageferry.engine.tensors import TensorFiles
from pageferry.engine.warm_up import warm_up_plans
from pageferry.engine.weights import load_weights
from pageferry.kernels.cpu_library import CpuKernels, Isa, load_kernels

_MODEL_REASONS = ("MODEL_FILE_INVALID", "MODEL_TENSORS")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model with its pools; `model_config.max_positions` is the limit in force, at most the model's."""

    layout: CacheLayout
    num_pages: tuple[int, ...]  # of each cache group
    num_tails: int
    runner: Runner
    model_config: ModelConfig
    pages: PageTensors
    memory_report: dict[str, int]  # bytes
    scheduler: SchedulerConfig

    def warm_up(self) -> None:
        """Run representative steps, so that no request pays for a first use; writes to the pools' first pages."""
        for plan in warm_up_plans(self.scheduler, self.layout, self.num_pages, self.model_config.max_positions):
            self.runner.run(plan)


def load_engine(
    config: EngineConfig, scheduler: SchedulerConfig, *, progress: Callable[[str], None], staging_bytes: int = 0
) -> Engine:
    """Load the model and lay out its pool; sets torch's number of threads here and wherever the runner runs.

    `progress` gets short lines for people; `staging_bytes` are what the process will share with senders of pages.
    Raises the errors of core.errors for anything wrong with model or memory.
    """
    started = time.perf_counter()
    torch.set_num_threads(config.threads or num_cores())
    files = resolve_model(config.model)
    progress(f"reading {files.path.name}")
    model_config = load_config_of(files)
    source = draft_source(config, model_config)
    with _naming(files), closing(_open(files, model_config)) as tensors:
        check_shapes(expected_shapes(model_config), tensors.shapes)
        limited = model_config.served(config.max_model_tokens)
        # Workers of other lengths share pages, unless their frequencies differ for it.
        same = replace(limited, max_positions=model_config.max_positions)
        layout = _layout(model_config, config, fingerprint(same, tensors))
        loader = _loader(config, scheduler, limited, layout, tensors)
        on_processor = config.device == "cpu"
        memory = plan_memory(
            limited,
            layout,
            config,
            scheduler,
            loader.weight_bytes,
            loader.available_bytes(),
            staging_bytes if on_processor else 0,
        )
        if warning := key_warning(limited, tensors, layout.format):
            progress(warning)
        factors = tensors.load(ROPE_FACTORS) if ROPE_FACTORS in tensors.shapes else None
        rotary = inverse_frequencies(limited, factors), context_limit(limited.max_positions, layout, memory.num_pages)
        model = loader.load(*rotary, progress)
    pages = loader.pages(layout, memory)
    builder = BatchBuilder(layout, for_torch=loader.for_torch)
    progress(f"loaded {files.name} in {time.perf_counter() - started:.1f} s, {_summary(memory, layout, loader.how)}")
    is_torch = not isinstance(model, NativeModel)
    drafter = None
    if source.kind == "layers":
        drafter = ModelDrafter(model.first_layers(source.num_layers), pages, builder)
    runner = TorchRunner(model, pages, builder, torch.get_num_threads(), is_torch=is_torch, drafter=drafter)
    return Engine(layout, memory.num_pages, memory.num_tails, runner, limited, pages, memory.report, scheduler)


@dataclass(frozen=True, slots=True)
class _ProcessorLoader:
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


def _loader(
    config: EngineConfig, scheduler: SchedulerConfig, model: ModelConfig, layout: CacheLayout, tensors: TensorFiles
) -> _ProcessorLoader | DeviceLoader:
    if config.device != "cpu":
        device = open_device(config.device)
        return DeviceLoader(model, tensors, config.compute_dtype, device, scheduler.max_num_seqs)
    kernels = _kernels(config, layout)
    dtype, grouped = compute_dtype(config.compute_dtype), _grouped(tensors, config, kernels)
    quantised = grouped if grouped and is_quantised(grouped) else None
    mixed = grouped if grouped and is_mixed(model, multiplied_sizes(model, grouped)) else None
    return _ProcessorLoader(model, tensors, dtype, kernels, quantised, mixed)


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


def _open(files: ModelFiles, config: ModelConfig) -> TensorFiles:
    return GgufTensors(files.path, config) if files.kind == "gguf" else HfTensors(safetensors_paths(files))


@contextmanager
def _naming(files: ModelFiles) -> Iterator[None]:
    """Errors about the model name where it lies."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.reason not in _MODEL_REASONS or str(files.path) in error.message:
            raise
        raise InvalidArgumentError(f"{files.path}: {error.message}", reason=error.reason) from error


def _layout(model: ModelConfig, config: EngineConfig, digest: str) -> CacheLayout:
    groups = parse_groups(config.cache_layers, model.num_layers, model.sliding_window)
    page_format = PageFormat.parse(config.page_format)
    return CacheLayout(digest, page_format, config.page_size, model.num_kv_heads, model.head_dim, groups)


def _summary(memory: MemoryPlan, layout: CacheLayout, how: str) -> str:
    report = memory.report
    terms = " + ".join(f"{name} {report[name] / 10**6:.0f}" for name in report if name not in ("total", "available"))
    counts = [str(memory.num_pages[0])]
    if len(layout.groups) > 1:
        counts = [f"{num} ({group})" for num, group in zip(memory.num_pages, layout.groups, strict=True)]
    pages = f"{' + '.join(counts)} {layout.format} pages of {layout.page_size} tokens"
    total = f"{terms} = {report['total'] / 10**6:.0f} MB of {report['available'] / 10**6:.0f} available"
    return f"computes in {how}, {pages}, memory {total}"
