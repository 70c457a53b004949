"""How many pages fit, and the sum that says so."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_shapes import EMBEDDING, expected_shapes

_MB = 10**6
# Numbers (K and V of one layer, fp32) that attention of several sequences gathers at most: 8 MB stay near the cache,
# and buffers of up to 32 MB are reused by the allocator instead of being mapped anew each time.
MAX_GATHERED = 1 << 21
_TAILS_PER_SEQUENCE = 2  # one while it runs, one for the last one's push
_TAKEN = 0.9  # of what is there: the rest is for what no plan knows, such as messages, and for the machine
_WINDOW_SLACK = 0.25  # of a window's pages besides, for pushes in flight and cached prefixes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_pages: tuple[int, ...]  # of each cache group
    num_tails: int
    report: dict[str, int]  # bytes; "total" is the sum of the others but "available"


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a draft model takes, where there is one: a page of its own beside each of a full group's."""

    config: ModelConfig | None = None
    weight_bytes: int = 0
    page_bytes: int = 0


NO_DRAFTER = DrafterNeeds()


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

    @property
    def most(self) -> tuple[int, ...]:
        """Pages of each group that all sequences at once can hold, of the longest text; windows' with some to spare."""
        live = [self.most_live(group, self.max_positions) * self.scheduler.max_num_seqs for group in self.layout.groups]
        return tuple(
            most if group.window is None else math.ceil(most * (1 + _WINDOW_SLACK))
            for group, most in zip(self.layout.groups, live, strict=True)
        )

    def num_pages(self, of_full: int) -> tuple[int, ...]:
        """A window needs no more than all sequences can hold at once."""
        return tuple(
            of_full if group.window is None else min(of_full, most)
            for group, most in zip(self.layout.groups, self.most, strict=True)
        )

    def page_bytes(self, of_full: int) -> int:
        pairs = zip(self.num_pages(of_full), self.layout.pages, strict=True)
        return sum(num * layout.page_bytes for num, layout in pairs)

    def largest(self, num_bytes: int) -> int:
        """The largest N whose pages and tails fit."""
        most = num_bytes // min(layout.page_bytes for layout in self.layout.pages)
        return bisect_right(range(1, most + 1), num_bytes - self.tail_bytes, key=self.page_bytes)


@dataclass(frozen=True, slots=True)
class _Needs:
    """What all takes where full groups' pools have N pages."""

    config: ModelConfig
    pools: _Pools
    weight_bytes: int
    staging_bytes: int
    draft_rows: int  # logits of a step's drafts
    drafter: DrafterNeeds

    def report(self, of_full: int) -> dict[str, int]:
        """Bytes by name."""
        pools, layout = self.pools, self.pools.layout
        context = context_limit(self.config.max_positions, layout, pools.num_pages(of_full))
        most_read = [pools.most_read(group, context) for group in layout.groups]
        return {
            "weights": self.weight_bytes,
            "rotary": context * self.config.head_dim * 4,
            "workspace": _workspace(self.config, pools.scheduler, most_read),
            **({"staging": self.staging_bytes} if self.staging_bytes else {}),
            **({"drafts": self._draft_bytes(of_full, context)} if self.draft_rows else {}),
            "pages": pools.page_bytes(of_full),
            **({"tails": pools.tail_bytes} if layout.tails else {}),
        }

    def _draft_bytes(self, of_full: int, context: int) -> int:
        logits = 4 * self.draft_rows * self.config.vocab_size
        if self.drafter.config is None:
            return logits
        working = _workspace(self.drafter.config, self.pools.scheduler, [context])
        rotary = context * self.drafter.config.head_dim * 4
        return logits + working + rotary + self.drafter.weight_bytes + of_full * self.drafter.page_bytes

    def largest(self, num_bytes: int) -> int:
        """The largest N that fits, up to where all sequences at once have pages for the longest text."""
        return bisect_right(range(1, max(self.pools.most) + 1), num_bytes, key=lambda n: sum(self.report(n).values()))


def plan_memory(
    config: ModelConfig,
    layout: CacheLayout,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    weight_bytes: int,
    available: int,
    staging_bytes: int = 0,
    drafter: DrafterNeeds = NO_DRAFTER,
) -> MemoryPlan:
    """Size the pools from `num_pages` or `kv_memory_mb`, or where that is 0 from `memory_share` of what is available.

    Raises InvalidArgumentError for pools too small for one request, ResourceExhaustedError when all needs more than the
    `available` bytes; both name every term and the smallest value that works.
    """
    pools = _Pools(layout, scheduler, config.max_positions)
    draft_rows = min(scheduler.local_chunk_tokens, scheduler.max_num_seqs * engine.max_draft_tokens)
    if engine.speculation == "off":
        draft_rows = 0
    needs = _Needs(config, pools, weight_bytes, staging_bytes, draft_rows, drafter)
    headroom = scheduler.headroom_pages * any(group.window is None for group in layout.groups)
    needed = (pools.most_live(group, engine.max_model_tokens) for group in layout.groups)  # 0 where it isn't set
    smallest = max(1 + headroom, *needed)
    least_mb = math.ceil((pools.page_bytes(smallest) + pools.tail_bytes) / _MB)
    is_automatic = not (engine.num_pages or engine.kv_memory_mb)
    if is_automatic:
        available = int(available * engine.memory_share * _TAKEN)
        of_full = max(smallest, needs.largest(available))
    else:
        of_full = engine.num_pages or pools.largest(engine.kv_memory_mb * _MB)
    if of_full < smallest:
        per_page = sum(pages.page_bytes for pages in layout.pages)
        raise InvalidArgumentError(
            f"the pool has {of_full} pages of {per_page} bytes, one request needs {smallest}: set "
            f"kv_memory_mb to at least {least_mb}, or num_pages to at least {smallest}",
            reason="POOL_TOO_SMALL",
        )
    report = needs.report(of_full)
    share = f" (engine.memory_share {engine.memory_share:g} of what is there)" if is_automatic else ""
    totals = _totals(report, available, f"available: {available / _MB:.0f} MB{share}", least_mb)
    return MemoryPlan(pools.num_pages(of_full), pools.num_tails, report | totals)


def _totals(report: dict[str, int], available: int, limit: str, least_mb: int) -> dict[str, int]:
    total = sum(report.values())
    if total > available:
        terms = " + ".join(f"{name} {value / _MB:.0f} MB" for name, value in report.items())
        raise ResourceExhaustedError(
            f"memory needed: {terms} = {total / _MB:.0f} MB, {limit}; the smallest workable kv_memory_mb is {least_mb}",
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


def mixed_bytes(config: ModelConfig, multiplied: Mapping[str, int | None], element_bytes: int) -> int:
    """What the weights take where some matrices stay in groups of so many bytes; None are those of numbers."""
    sizes = {name: math.prod(shape) * element_bytes for name, shape in expected_shapes(config).items()}
    total = sum(multiplied.get(name) or size for name, size in sizes.items())
    # The table that tokens are looked up in has numbers; a tied head is another form of it.
    table = sizes[EMBEDDING] if config.tied_embeddings or multiplied.get(EMBEDDING) else 0
    grouped_head = 0 if config.tied_embeddings else multiplied.get(EMBEDDING) or 0
    return total + table - grouped_head


def is_mixed(config: ModelConfig, multiplied: Mapping[str, int | None]) -> bool:
    """Whether some matrices that are multiplied stay in groups, and others become numbers."""
    is_grouped = [bool(size) for name, size in multiplied.items() if name != EMBEDDING or config.tied_embeddings]
    return any(is_grouped) and not all(multiplied.values())


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
