"""Split equals colocated: the same pages byte for byte, and the same tokens (for equal chunk boundaries)."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import load

from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.layout import PageKey, Place
from pageferry.core.plan import Output, SampledToken
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import NO_PAGE, Sequence, WorkItem
from pageferry.engine.load import Engine

SCHEDULER = SchedulerConfig(chunk_tokens=32, local_chunk_tokens=32)
FORMATS = (
    *("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int4", "int4:asym", "k=int8,v=int4:asym"),
    *("fp8_e4m3:channel", "int8:channel", "int8:channel:asym", "int4:channel", "int4:channel:asym"),
    *("k=int8:channel,v=int4:asym", "k=fp16,v=int8:channel"),
)
WINDOWS = "0,2=window:37,sinks:4;1,3=full"
Pages = dict[PageKey, bytes]


@dataclass
class Worker:
    """An engine with pools and one of the schedulers, driven step by step."""

    engine: Engine
    pools: PagePools
    scheduler: PrefillScheduler | DecodeScheduler

    def step(self, sequence: Sequence) -> tuple[Pages, Output]:
        """Run one step; the bytes of what the sequence holds right after it, and what the scheduler made of it."""
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        result = self.engine.runner.run(plan)
        ends = [chunk.start + chunk.num_tokens for chunk in plan.chunks if chunk.sequence is sequence]
        pages = {key: self.read(key, place) for key, place in self.held(sequence, ends[0] if ends else 0)}
        return pages, self.scheduler.apply(plan, result, 0.0)

    def held(self, sequence: Sequence, num_tokens: int) -> list[tuple[PageKey, Place]]:
        """Where its pages lie when so many tokens are computed."""
        size, layout = self.engine.layout.page_size, self.engine.layout
        held = []
        for group, table in enumerate(sequence.tables):
            for index, page in enumerate(table[: layout.num_pages(num_tokens)]):
                if sequence.tail is not None and index == num_tokens // size:
                    held.append((PageKey(group, index, is_tail=True), Place(group, sequence.tail, is_tail=True)))
                elif page != NO_PAGE:
                    held.append((PageKey(group, index), Place(group, page)))
        return held

    def read(self, key: PageKey, place: Place) -> bytes:
        return self.engine.pages.read(key, place, 0, self.engine.layout.of(key).num_layers)

    def decode(self, sequence: Sequence, output: Output) -> tuple[list[int], Pages]:
        """Step to the end; the tokens emitted, those of `output` first, and the pages after the last step."""
        tokens: list[int] = []
        pages: Pages = {}
        while True:
            tokens += [emitted.token.token_id for emitted in output.emitted]
            if output.ended:
                assert not output.ended[0].failure
                self.check_idle()
                return tokens, pages
            pages, output = self.step(sequence)

    def check_idle(self) -> None:
        self.pools.check_integrity()
        assert self.pools.num_free + self.pools.num_cached == self.pools.num_pages


def worker(
    engine: Engine, kind: type[PrefillScheduler] | type[DecodeScheduler], *, pool_pages: int | None = None
) -> Worker:
    """With the engine to itself: whatever it does not write first is not a number."""
    for pool in (*engine.pages.pools, *engine.pages.tails):
        pool.memory.fill_(0xFF)
    num_pages = engine.num_pages if pool_pages is None else [pool_pages] * len(engine.num_pages)
    pools = PagePools(engine.layout, num_pages, engine.num_tails)
    return Worker(engine, pools, kind(SCHEDULER, pools, engine.layout))


def request(num_prompt: int) -> Sequence:
    prompt = tuple(4 + (index * 29 + num_prompt) % 300 for index in range(num_prompt))
    work = WorkItem("same", prompt, SamplingParams(temperature=1.0, seed=5), StopParams(max_tokens=24))
    return Sequence(work, arrival=0.0)


def prefill(prefiller: Worker, num_prompt: int) -> tuple[Pages, SampledToken]:
    """The prompt's pages, as they are shipped chunk by chunk, and the first token."""
    sequence, shipped, has_tails = request(num_prompt), Pages(), prefiller.engine.layout.format.has_tails
    prefiller.scheduler.add(sequence, 0.0)
    while True:
        plan = prefiller.scheduler.schedule(0.0)
        assert plan is not None
        result, (chunk,) = prefiller.engine.runner.run(plan), plan.chunks
        end = chunk.start + chunk.num_tokens
        for key, place in prefiller.scheduler.tables.shippable(sequence, 0, chunk.start, end, as_tails=has_tails):
            assert key not in shipped
            shipped[key] = prefiller.read(key, place)
        output = prefiller.scheduler.apply(plan, result, 0.0)
        if output.emitted:
            prefiller.check_idle()
            return shipped, output.emitted[0].token


def check_equal(engine: Engine, num_prompt: int) -> None:
    shipped, first = prefill(worker(engine, PrefillScheduler), num_prompt)

    colocated = worker(engine, DecodeScheduler)
    sequence = request(num_prompt)
    colocated.scheduler.add(sequence, 0.0)
    output = Output()
    while not output.emitted:
        computed, output = colocated.step(sequence)
    assert shipped == {key: computed[key] for key in shipped}
    tokens_alone, pages_alone = colocated.decode(sequence, output)

    split = worker(engine, DecodeScheduler)
    assert isinstance(split.scheduler, DecodeScheduler)
    sequence = request(num_prompt)
    assert split.scheduler.reserve(sequence, 0.0)
    places = split.scheduler.tables.expected(sequence)
    assert places.keys() == shipped.keys()
    for key, place in places.items():
        engine.pages.write(place, 0, engine.layout.of(key).num_layers, shipped[key])
    tokens, pages = split.decode(sequence, split.scheduler.activate(sequence, first, 0.0))
    assert tokens == tokens_alone
    assert len(tokens) == 24
    assert pages == pages_alone


@pytest.mark.parametrize("cache_layers", ["", WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize(
    ("page_format", "num_prompt"),
    [*((text, num_prompt) for text in ("fp32", "int8", "int8:channel") for num_prompt in (15, 16, 17, 32, 100)),
     *((text, 90) for text in FORMATS)],
)  # fmt: skip
def test_pages_and_tokens_are_equal(tiny_model: Path, page_format: str, num_prompt: int, cache_layers: str) -> None:
    check_equal(load(tiny_model, page_format, cache_layers=cache_layers), num_prompt)


@pytest.mark.slow
@pytest.mark.parametrize("cache_layers", ["", "0-14=window:64,sinks:4;15-29=full"], ids=["full", "windows"])
@pytest.mark.parametrize("page_format", FORMATS)
def test_pages_and_tokens_of_the_real_model_are_equal(page_format: str, cache_layers: str) -> None:
    engine = load("smollm2", page_format, compute_dtype="auto", cache_layers=cache_layers)
    for num_prompt in (16, 150):
        check_equal(engine, num_prompt)


PENALISED = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)


def generate_preempted(engine: Engine, sampling: SamplingParams, positions: set[int]) -> list[int]:
    """80 tokens of a sequence that more urgent ones take the pages from at these positions."""
    decoder = worker(engine, DecodeScheduler, pool_pages=10)
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
    decoder.check_idle()
    return tokens


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), PENALISED], ids=["greedy", "with penalties"])
@pytest.mark.parametrize(("page_format", "cache_layers"), [("fp32", ""), ("fp32", WINDOWS), ("int8:channel", WINDOWS)])
@pytest.mark.field("vllm-project/vllm-gaudi#524", "LMCache/LMCache#1361")
def test_tokens_are_equal_whether_or_not_a_sequence_was_preempted(
    tiny_model: Path, sampling: SamplingParams, page_format: str, cache_layers: str
) -> None:
    engine = load(tiny_model, page_format, cache_layers=cache_layers)
    assert generate_preempted(engine, sampling, {40, 60}) == generate_preempted(engine, sampling, set())


@pytest.mark.field("sgl-project/mini-sglang#52", "Avarok-Cybersecurity/atlas#158", "Avarok-Cybersecurity/atlas#373")
def test_a_prefix_in_use_outlives_a_flood_and_preemptions(tiny_model: Path) -> None:
    prefix, suffix = [4 + (index * 29) % 300 for index in range(160)], [9, 8, 7] * 30
    sampling = SamplingParams(temperature=0)

    def add(target: Worker, name: str, prompt: list[int], max_tokens: int, priority: int = 0) -> Sequence:
        work = WorkItem(name, tuple(prompt), sampling, StopParams(max_tokens=max_tokens), priority=priority)
        target.scheduler.add(sequence := Sequence(work, arrival=0.0), 0.0)
        return sequence

    alone = worker(load(tiny_model, "fp32"), DecodeScheduler)
    expected, _ = alone.decode(add(alone, "alone", prefix + suffix, 20), Output())

    flooded = worker(load(tiny_model, "fp32"), DecodeScheduler, pool_pages=24)
    flooded.decode(add(flooded, "first", prefix, 1), Output())
    reader, tokens = add(flooded, "reader", prefix + suffix, 20), list[int]()
    flooded.step(reader)
    assert (reader.num_cached, reader.num_computed) == (160, 192)  # in the middle of its prompt
    for number in range(100):
        length = 130 if number % 25 == 0 else 40  # the long ones don't fit beside the reader
        add(flooded, f"flood-{number}", [4 + number, *range(50, 49 + length)], 1, priority=-1)
    while len(tokens) < 20:
        _, output = flooded.step(reader)
        flooded.pools.check_integrity()
        tokens += [emitted.token.token_id for emitted in output.emitted if emitted.sequence is reader]
    assert reader.num_preemptions > 0
    assert tokens == expected


@pytest.mark.parametrize("cache_layers", ["", WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("page_format", ["fp32", "bf16", "int8", "int8:channel"])
@pytest.mark.field("vllm-project/vllm#11186", "vllm-project/vllm#17999")
def test_a_cached_prompt_has_the_same_first_token_and_logprobs(
    tiny_model: Path, page_format: str, cache_layers: str
) -> None:
    prefiller = worker(load(tiny_model, page_format, cache_layers=cache_layers), PrefillScheduler)
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
    # Scaled per channel, a full last page is computed anew as a whole.
    assert num_cached == ([0, 48, 64, 64] if prefiller.engine.layout.format.has_tails else [0, 63, 64, 79])
    for cold, warm in (samples[:2], samples[2:]):
        assert [token_id for token_id, _ in warm.top] == [token_id for token_id, _ in cold.top]
        assert [value for _, value in warm.top] == pytest.approx([value for _, value in cold.top], abs=1e-4)
