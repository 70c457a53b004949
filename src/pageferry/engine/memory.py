"""How many pages fit, and the sum that says so."""

import math
from dataclasses import dataclass
from pathlib import Path

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.layout import PageLayout
from pageferry.core.model_config import ModelConfig
from pageferry.engine.batch import MAX_GATHERED
from pageferry.engine.weights import expected_shapes

_MB = 10**6


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_pages: int
    report: dict[str, int]  # bytes; "total" is the sum of the others but "available"


def plan_memory(
    config: ModelConfig, layout: PageLayout, engine: EngineConfig, scheduler: SchedulerConfig, weight_bytes: int
) -> MemoryPlan:
    """Size the pool from `num_pages` or `kv_memory_mb`.

    Raises InvalidArgumentError for a pool too small for one request, ResourceExhaustedError when the machine lacks the
    memory; both name every term and the smallest value that works.
    """
    num_pages = engine.num_pages or engine.kv_memory_mb * _MB // layout.page_bytes
    smallest = 1 + scheduler.headroom_pages
    if engine.max_model_tokens:
        smallest = max(smallest, layout.num_pages(engine.max_model_tokens))
    if num_pages < smallest:
        megabytes = math.ceil(smallest * layout.page_bytes / _MB)
        raise InvalidArgumentError(
            f"the pool has {num_pages} pages of {layout.page_bytes} bytes, one request needs {smallest}: set "
            f"kv_memory_mb to at least {megabytes}, or num_pages to at least {smallest}",
            reason="POOL_TOO_SMALL",
        )
    context = min(config.max_positions, num_pages * layout.page_size)
    report = _terms(config, scheduler, weight_bytes, context)
    report["pages"] = num_pages * layout.page_bytes
    total, available = sum(report.values()), available_bytes()
    if total > available:
        terms = " + ".join(f"{name} {value / _MB:.0f} MB" for name, value in report.items())
        least = math.ceil(smallest * layout.page_bytes / _MB)
        raise ResourceExhaustedError(
            f"memory needed: {terms} = {total / _MB:.0f} MB, available: {available / _MB:.0f} MB; the smallest "
            f"workable kv_memory_mb is {least}",
            reason="OUT_OF_MEMORY",
        )
    return MemoryPlan(num_pages, report | {"total": total, "available": available})


def unpacked_bytes(config: ModelConfig, element_bytes: int) -> int:
    """What the weights take as numbers of `element_bytes`."""
    embedding = config.vocab_size * config.hidden_size * element_bytes
    all_weights = sum(math.prod(shape) for shape in expected_shapes(config).values()) * element_bytes
    return all_weights + (embedding if config.tied_embeddings else 0)  # the head is repacked apart from the table


def _terms(config: ModelConfig, scheduler: SchedulerConfig, weight_bytes: int, context: int) -> dict[str, int]:
    rows = max(scheduler.chunk_tokens, scheduler.local_chunk_tokens) + scheduler.max_num_seqs
    widest = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    gathered = max(MAX_GATHERED, context * 2 * config.num_kv_heads * config.head_dim)
    workspace = 4 * (
        rows * (2 * widest + 4 * config.hidden_size)
        + scheduler.max_num_seqs * config.vocab_size
        + 2 * gathered
        + scheduler.chunk_tokens * context
    )
    return {
        "weights": weight_bytes,
        "rotary": context * config.head_dim * 4,
        "workspace": workspace,
    }


def available_bytes() -> int:
    """What the machine can still give, or this process's control group where that is less."""
    available = 2**63
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
