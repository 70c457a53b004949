"""How many pages fit, and the sum that says so."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout
from pageferry.core.model_config import ModelConfig
from pageferry.engine.segments import MAX_GATHERED
from pageferry.engine.weights import expected_shapes

_MB = 10**6
_TAILS_PER_SEQUENCE = 2  # one while it runs, one for the last one's push
_WINDOW_SLACK = 0.25  # of a window's pages besides, for pushes in flight and cached prefixes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_pages: tuple[int, ...]  # of each cache group
    num_tails: int
    report: dict[str, int]  # bytes; "total" is the sum of the others but "available"


@dataclass(frozen=True, slots=True)
class _Pools:
    """How many pages each cache group gets where a full one gets N."""

    layout: CacheLayout
    scheduler: SchedulerConfig
    max_positions: int

    @property
    def num_tails(self) -> int:
        return _TAILS_PER_SEQUENCE * self.scheduler.max_num_seqs if self.layout.tails else 0

    @property
    def tail_bytes(self) -> int:
        return self.num_tails * sum(layout.page_bytes for layout in self.layout.tails)

    def most_live(self, group: CacheGroup, num_tokens: int) -> int:
        chunk_tokens = max(self.scheduler.chunk_tokens, self.scheduler.local_chunk_tokens)
        return group.most_live(num_tokens, chunk_tokens, self.layout.page_size)

    def most_read(self, group: CacheGroup, num_tokens: int) -> int:
        """Most tokens that a chunk's rows read: the pages', and the chunk's own while they are open."""
        in_pages = self.most_live(group, num_tokens) * self.layout.page_size
        return in_pages + (self.scheduler.chunk_tokens if self.layout.tails else 0)

    def num_pages(self, of_full: int) -> tuple[int, ...]:
        """A window needs no more than all sequences can hold at once."""
        needed = [
            math.ceil(self.most_live(group, self.max_positions) * self.scheduler.max_num_seqs * (1 + _WINDOW_SLACK))
            for group in self.layout.groups
        ]
        return tuple(
            of_full if group.window is None else min(of_full, most)
            for group, most in zip(self.layout.groups, needed, strict=True)
        )

    def page_bytes(self, of_full: int) -> int:
        pairs = zip(self.num_pages(of_full), self.layout.pages, strict=True)
        return sum(num * layout.page_bytes for num, layout in pairs)

    def largest(self, num_bytes: int) -> int:
        """The largest N whose pages and tails fit."""
        most = num_bytes // min(layout.page_bytes for layout in self.layout.pages)
        return bisect_right(range(1, most + 1), num_bytes - self.tail_bytes, key=self.page_bytes)


def plan_memory(
    config: ModelConfig,
    layout: CacheLayout,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    weight_bytes: int,
    available: int,
) -> MemoryPlan:
    """Size the pools from `num_pages` or `kv_memory_mb`.

    Raises InvalidArgumentError for pools too small for one request, ResourceExhaustedError when all needs more than the
    `available` bytes; both name every term and the smallest value that works.
    """
    pools = _Pools(layout, scheduler, config.max_positions)
    of_full = engine.num_pages or pools.largest(engine.kv_memory_mb * _MB)
    headroom = scheduler.headroom_pages * any(group.window is None for group in layout.groups)
    needed = (pools.most_live(group, engine.max_model_tokens) for group in layout.groups)  # 0 where it isn't set
    smallest = max(1 + headroom, *needed)
    least_mb = math.ceil((pools.page_bytes(smallest) + pools.tail_bytes) / _MB)
    if of_full < smallest:
        per_page = sum(pages.page_bytes for pages in layout.pages)
        raise InvalidArgumentError(
            f"the pool has {of_full} pages of {per_page} bytes, one request needs {smallest}: set "
            f"kv_memory_mb to at least {least_mb}, or num_pages to at least {smallest}",
            reason="POOL_TOO_SMALL",
        )
    num_pages = pools.num_pages(of_full)
    context = context_limit(config.max_positions, layout, num_pages)
    report = {
        "weights": weight_bytes,
        "rotary": context * config.head_dim * 4,
        "workspace": _workspace(config, scheduler, [pools.most_read(group, context) for group in layout.groups]),
        "pages": pools.page_bytes(of_full),
        **({"tails": pools.tail_bytes} if layout.tails else {}),
    }
    return MemoryPlan(num_pages, pools.num_tails, report | _totals(report, available, least_mb))


def _totals(report: dict[str, int], available: int, least_mb: int) -> dict[str, int]:
    total = sum(report.values())
    if total > available:
        terms = " + ".join(f"{name} {value / _MB:.0f} MB" for name, value in report.items())
        raise ResourceExhaustedError(
            f"memory needed: {terms} = {total / _MB:.0f} MB, available: {available / _MB:.0f} MB; the smallest "
            f"workable kv_memory_mb is {least_mb}",
            reason="OUT_OF_MEMORY",
        )
    return {"total": total, "available": available}


def context_limit(max_positions: int, layout: CacheLayout, num_pages: tuple[int, ...]) -> int:
    """Most tokens of a sequence: what the groups that keep all of them have room for."""
    full = [num for group, num in zip(layout.groups, num_pages, strict=True) if group.window is None]
    return min(max_positions, *(num * layout.page_size for num in full)) if full else max_positions


def unpacked_bytes(config: ModelConfig, element_bytes: int) -> int:
    """What the weights take as numbers of `element_bytes`."""
    embedding = config.vocab_size * config.hidden_size * element_bytes
    all_weights = sum(math.prod(shape) for shape in expected_shapes(config).values()) * element_bytes
    return all_weights + (embedding if config.tied_embeddings else 0)  # the head is repacked apart from the table


def _workspace(config: ModelConfig, scheduler: SchedulerConfig, columns: list[int]) -> int:
    """Bytes; `columns` are the most tokens that are read at once, in each cache group."""
    rows = max(scheduler.chunk_tokens, scheduler.local_chunk_tokens) + scheduler.max_num_seqs
    widest = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    gathered = max(MAX_GATHERED, max(columns) * 2 * config.num_kv_heads * config.head_dim)
    return 4 * (
        rows * (2 * widest + 4 * config.hidden_size)
        + scheduler.max_num_seqs * config.vocab_size
        + 2 * gathered
        + scheduler.chunk_tokens * sum(columns)
    )


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
