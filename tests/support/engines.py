"""Engines driven without a scheduler: sequences on pages of their own, and all logits of a step."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.plan import Chunk, Plan, SampledToken
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem
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
) -> Engine:
    config = EngineConfig(
        model=str(model),
        page_format=page_format,
        num_pages=num_pages,
        threads=threads,
        compute_dtype=compute_dtype,
        kernels=kernels,
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
    work = WorkItem("tested", tuple(token_ids), sampling, stop or StopParams(max_tokens=1000))
    return Sequence(work, 0.0, pages=[PageId(first_page + page) for page in range(num_pages)])


def logits_of(engine: Engine, target: Sequence, ends: Iterable[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of the sequence's tokens, computed in chunks that end where `ends` says."""
    runner, parts = runner_of(engine), []
    runner.pages.blank(target.pages)
    start = 0
    with torch.inference_mode():
        for end in ends:
            batch = runner.builder.build((Chunk(target, start, end - start, samples=True),))
            every_row = torch.arange(end - start, dtype=torch.int32)
            parts.append(runner.model.forward(replace(batch, sampled_rows=every_row), runner.pages).clone())
            start = end
    return torch.cat(parts)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((result - expected).abs().max() / expected.abs().max())


@dataclass
class Generation:
    """One batch of sequences stepped together: whole prompts first, then a token each."""

    engine: Engine
    sequences: list[Sequence]
    results: list[list[object]] = field(default_factory=list)

    def prefill(self, *, chunk_tokens: int = 1000) -> None:
        for target in self.sequences:
            self.engine.runner.run(Plan((), fresh=tuple(target.pages)))
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

    def _take(self, running: list[Sequence], samples: list[object]) -> None:
        self.results.append(samples)
        for target, sample in zip(running, samples, strict=True):
            if isinstance(sample, SampledToken):
                target.append(sample.token_id)
