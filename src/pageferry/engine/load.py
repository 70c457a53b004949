"""From a configuration to an engine that can run."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import torch

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.cores import num_cores
from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.layout import CacheLayout
from pageferry.core.memory import NO_DRAFTER, MemoryPlan, context_limit, plan_memory
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, load_config_of, resolve_model
from pageferry.core.model_shapes import check_shapes, expected_shapes
from pageferry.core.plan import Runner
from pageferry.engine.batch import BatchBuilder
from pageferry.engine.draft_model import open_draft_model
from pageferry.engine.drafter import ModelDrafter, draft_source
from pageferry.engine.fingerprint import fingerprint
from pageferry.engine.gguf_tensors import ROPE_FACTORS
from pageferry.engine.loaders import make_loader, open_tensors
from pageferry.engine.native import NativeModel
from pageferry.engine.outliers import key_warning
from pageferry.engine.pages import PageTensors
from pageferry.engine.rope import inverse_frequencies
from pageferry.engine.runner import TorchRunner
from pageferry.engine.tensors import TensorFiles
from pageferry.engine.warm_up import warm_up_plans

_MODEL_REASONS = ("MODEL_FILE_INVALID", "MODEL_TENSORS")


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
    with _naming(files), closing(open_tensors(files, model_config)) as tensors:
        check_shapes(expected_shapes(model_config), tensors.shapes)
        limited = model_config.served(config.max_model_tokens)
        layout = _layout(model_config, limited, config, tensors)
        draft = open_draft_model(config, scheduler, files, limited.vocab_size, layout)
        loader = make_loader(config, scheduler, limited, layout, tensors)
        staged, needs = staging_bytes * (config.device == "cpu"), NO_DRAFTER if draft is None else draft.needs
        weight_bytes, available = loader.weight_bytes, loader.available_bytes()
        memory = plan_memory(limited, layout, config, scheduler, weight_bytes, available, staged, needs)
        if warning := key_warning(limited, tensors, layout.format):
            progress(warning)
        factors = tensors.load(ROPE_FACTORS) if ROPE_FACTORS in tensors.shapes else None
        rotary = inverse_frequencies(limited, factors), context_limit(limited.max_positions, layout, memory.num_pages)
        model = loader.load(*rotary, progress)
    pages = loader.pages(layout, memory)
    builder = BatchBuilder(layout, for_torch=loader.for_torch)
    progress(f"loaded {files.name} in {time.perf_counter() - started:.1f} s, {_summary(memory, layout, loader.how)}")
    drafter: ModelDrafter | None = None
    if draft is not None:
        drafter = draft.load(rotary[1], memory.num_pages[draft.group], progress)
    if source.kind == "layers":
        drafter = ModelDrafter(model.first_layers(source.num_layers), pages, builder)
    is_torch = not isinstance(model, NativeModel)
    runner = TorchRunner(model, pages, builder, torch.get_num_threads(), is_torch=is_torch, drafter=drafter)
    return Engine(layout, memory.num_pages, memory.num_tails, runner, limited, pages, memory.report, scheduler)


@contextmanager
def _naming(files: ModelFiles) -> Iterator[None]:
    """Errors about the model name where it lies."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.reason not in _MODEL_REASONS or str(files.path) in error.message:
            raise
        raise InvalidArgumentError(f"{files.path}: {error.message}", reason=error.reason) from error


def _layout(model: ModelConfig, served: ModelConfig, config: EngineConfig, tensors: TensorFiles) -> CacheLayout:
    # Workers of other lengths share pages, unless their frequencies differ for it.
    digest = fingerprint(replace(served, max_positions=model.max_positions), tensors)
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
