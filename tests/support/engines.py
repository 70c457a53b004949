"""Engines driven without a scheduler: sequences on pages of their own, and all logits of a step."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.layout import PageKey, Place
from pageferry.core.plan import Chunk, Plan, SampleFailure, Samples
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import NO_PAGE, Sequence, WorkItem, page_table
from pageferry.engine.load import Engine, load_engine
from pageferry.engine.runner import TorchRunner

GREEDY = SamplingParams(temperature=0)


def load(
    model: Path | str,
    page_format: str = "fp32",
    *,
    num_pages: int = 64,
    compute_dtype: str = "fp32",
    kernels: str = "auto",
    threads: int = 1,
    page_size: int = 16,
    cache_layers: str = "",
    max_model_tokens: int = 0,
    speculation: str = "off",
) -> Engine:
    config = EngineConfig(
        model=str(model),
        page_format=page_format,
        num_pages=num_pages,
        threads=threads,
        compute_dtype=compute_dtype,
        kernels=kernels,
        page_size=page_size,
        cache_layers=cache_layers,
        max_model_tokens=max_model_tokens,
        speculation=speculation,
    )
    return load_engine(config, SchedulerConfig(), progress=lambda _: None)


def runner_of(engine: Engine) -> TorchRunner:
    assert isinstance(engine.runner, TorchRunner)
    return engine.runner


def sequence(
    token_ids: Iterable[int],
    first_page: int,
    num_pages: int,
    *,
    sampling: SamplingParams = GREEDY,
    stop: StopParams | None = None,
) -> Sequence:
    """On pages of its own, as many in the engine's one group; its tail has its first page's number."""
    work = WorkItem("tested", tuple(token_ids), sampling, stop or StopParams(max_tokens=1000))
    pages = [PageId(first_page + page) for page in range(num_pages)]
    return Sequence(work, 0.0, tables=[pages], tail=PageId(first_page))


def places(target: Sequence) -> tuple[Place, ...]:
    """All pages that it holds."""
    pairs = ((group, page) for group, table in enumerate(target.tables) for page in table)
    return tuple(Place(group, page) for group, page in pairs if page != NO_PAGE)


def content(engine: Engine, target: Sequence) -> bytes:
    """Of its pages, without the tail."""
    layouts, keys = engine.layout.pages, places(target)
    return b"".join(
        engine.pages.read(PageKey(place.group, 0), place, 0, layouts[place.group].num_layers) for place in keys
    )


def logits_of(engine: Engine, target: Sequence, ends: Iterable[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of the sequence's tokens, computed in chunks that end where `ends` says."""
    engine.pages.blank(places(target))
    parts, start = [], 0
    for end in ends:
        parts.append(_every_row(engine, Chunk(target, start, end - start, samples=True)))
        start = end
    return torch.cat(parts)


def windowed_logits_of(engine: Engine, token_ids: Iterable[int], ends: Iterable[int]) -> torch.Tensor:
    """As `logits_of`, but each chunk holds the pages that it needs and no other; all else is poison."""
    target = sequence(token_ids, 0, 0)
    num_pages = engine.layout.num_pages(len(target.token_ids))
    target.tables = [page_table([NO_PAGE] * num_pages) for _ in engine.layout.groups]
    free = [[PageId(page) for page in range(num)] for num in engine.num_pages]
    for pool in (*engine.pages.pools, *engine.pages.tails):
        pool.memory.fill_(0xFF)
    parts, start = [], 0
    for end in ends:
        for group, table in enumerate(target.tables):
            needed = set(engine.layout.groups[group].live_pages(start, end, engine.layout.page_size))
            for index, page in enumerate(table):
                if index in needed and page == NO_PAGE:
                    table[index] = free[group].pop()
                    engine.pages.blank([Place(group, table[index])])
                elif index not in needed and page != NO_PAGE:
                    engine.pages.pools[group].memory[page] = 0xFF
                    free[group].append(page)
                    table[index] = NO_PAGE
        parts.append(_every_row(engine, Chunk(target, start, end - start, samples=True)))
        start = end
    return torch.cat(parts)


def _every_row(engine: Engine, chunk: Chunk) -> torch.Tensor:
    runner = runner_of(engine)
    with torch.inference_mode():
        batch = runner.builder.build((chunk,))
        rows = torch.arange(chunk.num_tokens, dtype=torch.int32)
        return runner.model.forward(replace(batch, sampled_rows=rows), runner.pages).clone()


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((result - expected).abs().max() / expected.abs().max())


@dataclass
class Generation:
    """One batch of sequences stepped together: whole prompts first, then a token each."""

    engine: Engine
    sequences: list[Sequence]
    results: list[list[Samples]] = field(default_factory=list)

    def prefill(self, *, chunk_tokens: int = 1000) -> None:
        for target in self.sequences:
            self.engine.runner.run(Plan((), fresh=places(target)))
            while target.num_computed < len(target.token_ids):
                end = min(len(target.token_ids), target.num_computed + chunk_tokens)
                samples = end == len(target.token_ids)
                chunk = Chunk(target, target.num_computed, end - target.num_computed, samples)
                result = self.engine.runner.run(Plan((chunk,)))
                target.num_computed = end
                if samples:
                    self._take([target], list(result.samples))
                    break

    def decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            running = [target for target in self.sequences if target.num_remaining == 1]
            plan = Plan(tuple(Chunk(target, len(target.token_ids) - 1, 1, samples=True) for target in running))
            result = self.engine.runner.run(plan)
            for target in running:
                target.num_computed += 1
            self._take(running, list(result.samples))

    def _take(self, running: list[Sequence], samples: list[Samples]) -> None:
        self.results.append(samples)
        for target, sampled in zip(running, samples, strict=True):
            if not isinstance(sampled, SampleFailure):
                for token in sampled:
                    target.append(token.token_id)
