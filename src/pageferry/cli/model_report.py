"""What is understood of a model, and what it needs, told from its files without loading weights."""

import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import PageferryError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.layout import HEAD_DIM_MULTIPLE, CacheLayout
from pageferry.core.memory import context_limit, is_mixed, mixed_bytes, plan_memory, unpacked_bytes
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, load_config_of, sampling_defaults
from pageferry.core.model_shapes import EMBEDDING, HEAD, check_shapes, expected_shapes
from pageferry.core.model_tensors import StoredTensor, stored_tensors
from pageferry.text.chat_template import ChatTemplate
from pageferry.text.tokenizer import Tokenizer, load_tokenizer

FORMATS = ("fp32", "bf16", "fp8_e4m3", "int8", "int8:channel:asym", "int4", "int4:channel:asym")
_SYSTEM, _TOOL = "Say only the word ferry.", "ferry_times"
_USER = {"role": "user", "content": "Hello"}
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": "Times.", "parameters": {"type": "object"}}}]
Values = dict[str, Any]


@dataclass(slots=True)
class ModelReport:
    """Sections of values as JSON has them; those that could not be told are empty, and `problems` say why."""

    name: str
    path: str
    kind: str
    model: Values = field(default_factory=dict)
    weights: Values = field(default_factory=dict)
    tokenizer: Values = field(default_factory=dict)
    chat: Values = field(default_factory=dict)
    sampling: Values = field(default_factory=dict)
    memory: Values = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be told: of texts of how many tokens (0: the model's own), and of how much memory."""

    max_model_tokens: int
    available_bytes: int
    template_file: Path | None = None


def inspect(files: ModelFiles, asked: Asked) -> ModelReport:
    report = ModelReport(files.name, str(files.path), files.kind)
    with _noting(report):
        config = load_config_of(files).served(asked.max_model_tokens)
        report.model = _model(load_config_of(files), config)
        with _noting(report):
            tensors = stored_tensors(files)
            check_shapes(expected_shapes(config), {name: tensor.shape for name, tensor in tensors.items()})
            report.weights = _weights(config, tensors)
            report.memory = _memory(config, report.weights, asked)
            report.problems += [text for text in [report.memory["largest_pool"].get("problem")] if text]
        with _noting(report):
            report.sampling = sampling_defaults(files)
        with _noting(report):
            tokenizer = load_tokenizer(files, asked.template_file)
            report.tokenizer = _tokenizer(tokenizer, config)
            report.chat = _chat(tokenizer.template)
    return report


@contextmanager
def _noting(report: ModelReport) -> Iterator[None]:
    try:
        yield
    except PageferryError as error:
        report.problems.append(error.message)


def _model(config: ModelConfig, served: ModelConfig) -> Values:
    values = asdict(config)
    num_parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return {key: value for key, value in values.items() if key not in ("name", "eos_ids", "bos_id")} | {
        "num_parameters": num_parameters,
        "served_tokens": served.max_positions,
        "most_tokens": config.most_positions,
    }


def _kind(name: str) -> str:
    """Of a tensor, as people call it."""
    if "norm" in name:
        return "norms"
    parts = {EMBEDDING: "embedding", HEAD: "head", ".self_attn.": "attention", ".mlp.": "feed-forward"}
    return next((kind for part, kind in parts.items() if part in name), "other")


def _weights(config: ModelConfig, tensors: dict[str, StoredTensor]) -> Values:
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name, tensor in tensors.items():
        groups[_kind(name), tensor.type].append(tensor.num_bytes)
    grouped = {name: tensor.multiplied_bytes for name, tensor in tensors.items() if len(tensor.shape) == 2}
    in_groups = None not in grouped.values()
    packed = sum(tensor.multiplied_bytes or tensor.num_bytes for tensor in tensors.values()) if in_groups else None
    computed, element_bytes = ("bf16", 2) if _has_bf16() else ("fp32", 4)
    mixed = mixed_bytes(config, grouped, element_bytes) if is_mixed(config, grouped) else None
    if (packed or mixed) and config.head_dim % HEAD_DIM_MULTIPLE == 0 and _has_kernels():
        computed = "in_groups" if packed else "partly_in_groups"
    return {
        "stored": [
            {"tensors": kind, "type": type_, "count": len(sizes), "bytes": sum(sizes)}
            for (kind, type_), sizes in sorted(groups.items())
        ],
        "stored_bytes": sum(tensor.num_bytes for tensor in tensors.values()),
        # Bytes in memory, by what computes.
        "in_groups_bytes": packed,
        "partly_in_groups_bytes": mixed,
        "bf16_bytes": unpacked_bytes(config, 2),
        "fp32_bytes": unpacked_bytes(config, 4),
        "computed": computed,  # here, where the configuration leaves it open
    }


def _has_kernels() -> bool:
    """Whether the compiled kernels are there, and faster here than torch."""
    found = importlib.util.find_spec("pageferry.kernels")
    places = (found.submodule_search_locations or []) if found else []
    return "avx2" in _processor() and any((Path(place) / "_cpu.so").exists() for place in places)


def _has_bf16() -> bool:
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_processor())


def _processor() -> set[str]:
    """What the processor says of itself, in words."""
    try:
        return set(Path("/proc/cpuinfo").read_text("ascii", errors="replace").split())
    except OSError:
        return set()


def _memory(config: ModelConfig, weights: Values, asked: Asked) -> Values:
    weight_bytes = weights[f"{weights['computed']}_bytes"]
    layouts = {name: _layout(config, name) for name in FORMATS}
    default = layouts[EngineConfig().page_format]

    def planned(engine: EngineConfig) -> Values:
        return _planned(config, default, engine, weight_bytes, asked.available_bytes)

    return {
        "available_bytes": asked.available_bytes,
        "token_bytes": {
            name: sum(pages.page_bytes for pages in layout.pages) // layout.page_size
            for name, layout in layouts.items()
        },
        "default_pool": planned(EngineConfig(max_model_tokens=asked.max_model_tokens)),
        "largest_pool": planned(EngineConfig(max_model_tokens=asked.max_model_tokens, kv_memory_mb=0)),
    }


def _layout(config: ModelConfig, page_format: str) -> CacheLayout:
    groups = parse_groups("", config.num_layers, config.sliding_window)
    page_size = EngineConfig().page_size
    return CacheLayout("", PageFormat.parse(page_format), page_size, config.num_kv_heads, config.head_dim, groups)


def _planned(
    config: ModelConfig, layout: CacheLayout, engine: EngineConfig, weight_bytes: int, available_bytes: int
) -> Values:
    """The pool that a worker with this configuration lays out, or why it can't."""
    try:
        plan = plan_memory(config, layout, engine, SchedulerConfig(), weight_bytes, available_bytes)
    except PageferryError as error:
        return {"problem": error.message}
    return {
        "page_format": str(layout.format),
        "pages": list(plan.num_pages),
        "tokens": min(plan.num_pages) * layout.page_size,
        "longest_text": context_limit(config.max_positions, layout, plan.num_pages),
        "bytes": {name: value for name, value in plan.report.items() if name != "available"},
    }


def _tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> Values:
    plain = tokenizer.encode("a", add_special=False)
    whole = tokenizer.encode("a")
    return {
        "tokens": tokenizer.vocab_size,
        "rows": config.vocab_size,
        "ends": {token_id: tokenizer.piece(token_id) for token_id in tokenizer.eos_ids},
        "begins": [tokenizer.piece(token_id) for token_id in whole[: len(whole) - len(plain)]],
        "special": len(tokenizer.pieces.special_ids),
    }


def _chat(template: ChatTemplate) -> Values:
    """Whether there is a template that works, and what it takes, as rendering short chats shows."""
    if template.problem:
        return {"template": False, "problem": template.problem}
    rendered = _attempt(lambda: template.render([{"role": "system", "content": _SYSTEM}, _USER]))
    with_tools = _attempt(lambda: template.render([_USER], {"tools": _TOOLS}))
    return {"template": True, "system": _SYSTEM in rendered, "tools": _TOOL in with_tools}


def _attempt(render: Callable[[], str]) -> str:
    try:
        return render()
    except PageferryError:
        return ""
