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


def worker(
    model: Path, page_format: str, kind: type[PrefillScheduler] | type[DecodeScheduler], *, pool_pages: int = 300
) -> Worker:
    config = EngineConfig(model=str(model), page_format=page_format, num_pages=300, threads=1, compute_dtype="fp32")
    engine = load_engine(config, SCHEDULER, progress=lambda _: None)
    pool = PagePool(pool_pages)
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


@pytest.mark.parametrize(
    ("page_format", "num_prompt"),
    [*((text, num_prompt) for text in ("fp32", "int8") for num_prompt in (15, 16, 17, 32, 100)),
     *((text, 37) for text in ("bf16", "fp16", "fp8_e4m3", "int8:asym", "int4", "int4:asym", "k=int8,v=int4:asym"))],
)  # fmt: skip
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


PENALISED = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)


def generate_preempted(model: Path, sampling: SamplingParams, positions: set[int]) -> list[int]:
    """80 tokens of a sequence that more urgent ones take the pages from at these positions."""
    decoder = worker(model, "fp32", DecodeScheduler, pool_pages=10)
    prompt = tuple(4 + (index * 29) % 300 for index in range(40))
    victim, tokens = Sequence(WorkItem("same", prompt, sampling, StopParams(max_tokens=80)), arrival=0.0), list[int]()
    decoder.scheduler.add(victim, 0.0)
    left = set(positions)
    while len(tokens) < 80:
        if len(tokens) in left:
            left.remove(len(tokens))
            taken = WorkItem(f"urgent-{len(tokens)}", (len(tokens),) * 150, sampling, StopParams(1), priority=-1)
            decoder.scheduler.add(Sequence(taken, arrival=0.0), 0.0)
        for emitted in decoder.step(victim)[1].emitted:
            if emitted.sequence is victim:
                assert emitted.position == len(tokens), "a token came twice, or one is missing"
                tokens.append(emitted.token.token_id)
    assert victim.num_preemptions == len(positions)
    decoder.pool.check_integrity()
    return tokens


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), PENALISED], ids=["greedy", "with penalties"])
def test_tokens_are_equal_whether_or_not_a_sequence_was_preempted(tiny_model: Path, sampling: SamplingParams) -> None:
    assert generate_preempted(tiny_model, sampling, {40, 60}) == generate_preempted(tiny_model, sampling, set())


@pytest.mark.parametrize("page_format", ["fp32", "bf16", "int8"])
def test_a_cached_prompt_has_the_same_first_token_and_logprobs(tiny_model: Path, page_format: str) -> None:
    prefiller = worker(tiny_model, page_format, PrefillScheduler)
    prompt = tuple(4 + (index * 29) % 300 for index in range(80))
    samples, num_cached = [], []
    for num_prompt in (64, 64, 80, 80):
        sampling = SamplingParams(temperature=0, num_logprobs=5)
        sequence = Sequence(WorkItem("same", prompt[:num_prompt], sampling, StopParams(max_tokens=2)), arrival=0.0)
        prefiller.scheduler.add(sequence, 0.0)
        output = Output()
        while not output.emitted:
            _, output = prefiller.step(sequence)
        samples.append(output.emitted[0].token)
        num_cached.append(sequence.num_cached)
    assert num_cached == [0, 63, 64, 79]
    for cold, warm in (samples[:2], samples[2:]):
        assert [token_id for token_id, _ in warm.top] == [token_id for token_id, _ in cold.top]
        assert [value for _, value in warm.top] == pytest.approx([value for _, value in cold.top], abs=1e-4)
