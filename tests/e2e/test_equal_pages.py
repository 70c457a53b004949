"""Split equals colocated: the same pages byte for byte, and the same tokens (for equal chunk boundaries)."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.plan import Output, SampledToken
from pageferry.core.pool import PagePool
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem
from pageferry.engine.load import Engine, load_engine

SCHEDULER = SchedulerConfig(chunk_tokens=32, local_chunk_tokens=32)


@dataclass
class Worker:
    """An engine with a pool and one of the schedulers, driven step by step."""

    engine: Engine
    pool: PagePool
    scheduler: PrefillScheduler | DecodeScheduler

    def step(self, sequence: Sequence) -> tuple[list[bytes], Output]:
        """Run one step; the bytes of the sequence's pages right after it, and what the scheduler made of it."""
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        result = self.engine.runner.run(plan)
        num_layers = self.engine.layout.num_layers
        page_bytes = [self.engine.pages.read(page, 0, num_layers) for page in sequence.pages]
        return page_bytes, self.scheduler.apply(plan, result, 0.0)

    def decode(self, sequence: Sequence, output: Output) -> tuple[list[int], list[bytes]]:
        """Step to the end; the tokens emitted, those of `output` first, and the pages after the last step."""
        tokens: list[int] = []
        page_bytes: list[bytes] = []
        while True:
            tokens += [emitted.token.token_id for emitted in output.emitted]
            if output.ended:
                assert not output.ended[0].failure
                self.pool.check_integrity()
                return tokens, page_bytes
            page_bytes, output = self.step(sequence)


def worker(model: Path, page_format: str, kind: type[PrefillScheduler] | type[DecodeScheduler]) -> Worker:
    config = EngineConfig(model=str(model), page_format=page_format, num_pages=300, threads=1, compute_dtype="fp32")
    engine = load_engine(config, SCHEDULER, progress=lambda _: None)
    pool = PagePool(engine.num_pages)
    return Worker(engine, pool, kind(SCHEDULER, pool, engine.layout))


def request(num_prompt: int) -> Sequence:
    prompt = tuple(4 + (index * 29 + num_prompt) % 300 for index in range(num_prompt))
    work = WorkItem("same", prompt, SamplingParams(temperature=1.0, seed=5), StopParams(max_tokens=24))
    return Sequence(work, arrival=0.0)


def prefill(prefiller: Worker, num_prompt: int) -> tuple[list[bytes], SampledToken]:
    """The prompt's pages, as they would be shipped, and the first token."""
    sequence = request(num_prompt)
    prefiller.scheduler.add(sequence, 0.0)
    while True:
        page_bytes, output = prefiller.step(sequence)
        if output.emitted:
            return page_bytes, output.emitted[0].token


@pytest.mark.parametrize("page_format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("num_prompt", [15, 16, 17, 32, 100])
def test_pages_and_tokens_are_equal(tiny_model: Path, page_format: str, num_prompt: int) -> None:
    shipped, first = prefill(worker(tiny_model, page_format, PrefillScheduler), num_prompt)

    colocated = worker(tiny_model, page_format, DecodeScheduler)
    sequence = request(num_prompt)
    colocated.scheduler.add(sequence, 0.0)
    output = Output()
    while not output.emitted:
        computed, output = colocated.step(sequence)
    num_pages = colocated.engine.layout.num_pages(num_prompt)
    assert shipped[:num_pages] == computed[:num_pages]
    tokens_alone, pages_alone = colocated.decode(sequence, output)

    split = worker(tiny_model, page_format, DecodeScheduler)
    assert isinstance(split.scheduler, DecodeScheduler)
    sequence = request(num_prompt)
    assert split.scheduler.reserve(sequence, 0.0)
    for page, payload in zip(sequence.pages, shipped[:num_pages], strict=False):
        split.engine.pages.write(page, 0, split.engine.layout.num_layers, payload)
    tokens, pages = split.decode(sequence, split.scheduler.activate(sequence, first, 0.0))
    assert tokens == tokens_alone
    assert len(tokens) == 24
    assert pages == pages_alone
