"""Drives a scheduler with a model whose keys and values are a chain over the tokens, so that any mix-up shows.

The value of position p depends on all tokens up to p. A page that was evicted in use, shared in the wrong place or not
blanked fails an assertion in the model, or gives tokens other than `golden`'s.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageLayout
from pageferry.core.plan import Ended, Output, Plan, SampledToken, SampleFailure, StepResult
from pageferry.core.pool import PageId, PagePool, PageState
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, SequenceStatus, WorkItem

VOCABULARY = 50_000
_names = count()


def layout(page_size: int = 16) -> PageLayout:
    return PageLayout("test", PageFormat.parse("int8"), page_size, num_layers=1, num_kv_heads=1, head_dim=8)


def prompt(num_tokens: int, variant: int = 0) -> tuple[int, ...]:
    """A prompt that shares no page with one of another variant."""
    return tuple((31 * variant + 7 * index + variant * index * index) % VOCABULARY for index in range(num_tokens))


def sequence(
    prompt_ids: Iterable[int],
    max_tokens: int = 1,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    output_ids: tuple[int, ...] = (),
) -> Sequence:
    work = WorkItem(
        f"request-{next(_names)}",
        tuple(prompt_ids),
        SamplingParams(),
        StopParams(max_tokens),
        output_ids=output_ids,
        priority=priority,
    )
    return Sequence(work, arrival, deadline)


def _value(parent: int, token_id: int) -> int:
    return (parent * 1_000_003 + token_id * 97 + 1) % (2**61 - 1)


def _draw(value: int, num_output: int) -> int:
    """The next token depends on the context, and on how much of it is output, as it does with penalties."""
    return (value // 7 + num_output) % VOCABULARY


def golden(work: WorkItem) -> list[int]:
    """The output, without any scheduler."""
    value = 0
    for token_id in (*work.prompt_ids, *work.output_ids):
        value = _value(value, token_id)
    output = list(work.output_ids)
    while len(output) < work.stop.max_tokens and not (output and output[-1] in work.stop.stop_token_ids):
        output.append(_draw(value, len(output)))
        value = _value(value, output[-1])
    return output


class ChainModel:
    """A Runner that checks everything that it reads and writes."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self.pages: list[list[int | None]] = [[-1] * page_size for _ in range(pool.num_pages)]
        self._chains: dict[Sequence, list[int]] = {}
        self.failing: set[Sequence] = set()

    def chain(self, sequence: Sequence) -> list[int]:
        values = self._chains.setdefault(sequence, [])
        for token_id in sequence.token_ids[len(values) :]:
            values.append(_value(values[-1] if values else 0, token_id))
        return values

    def run(self, plan: Plan) -> StepResult:
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks) > 0
        assert len(set(plan.fresh)) == len(plan.fresh)
        for page in plan.fresh:
            self.pages[page] = [None] * self._page_size
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        samples: list[SampledToken | SampleFailure] = []
        for chunk in plan.chunks:
            self._compute(chunk.sequence, chunk.start, chunk.start + chunk.num_tokens)
            assert chunk.samples == (chunk.start + chunk.num_tokens == len(chunk.sequence.token_ids))
            if chunk.samples:
                samples.append(self.sample(chunk.sequence))
        return StepResult(tuple(samples))

    def sample(self, sequence: Sequence) -> SampledToken | SampleFailure:
        if sequence in self.failing:
            return SampleFailure("logits are not numbers")
        return SampledToken(_draw(self.chain(sequence)[-1], sequence.num_output))

    def receive(self, sequence: Sequence) -> None:
        """Fill a reserved sequence's pages as a sender would."""
        chain, size = self.chain(sequence), self._page_size
        for index in range(sequence.num_cached // size, -(-len(chain) // size)):
            page = sequence.pages[index]
            assert self._pool.state(page) is PageState.RESERVED
            values = chain[index * size : (index + 1) * size]
            self.pages[page] = [*values, *[None] * (size - len(values))]

    def _compute(self, sequence: Sequence, start: int, end: int) -> None:
        chain, size = self.chain(sequence), self._page_size
        assert sequence.num_computed == start < end <= len(chain)
        for index in range(-(-end // size)):
            page, first = sequence.pages[index], index * size
            assert self._pool.state(page) is PageState.RESIDENT
            num_known = min(max(start - first, 0), size)
            assert self.pages[page][:num_known] == chain[first : first + num_known], f"page {page} is another's"
            for slot in range(num_known, min(end - first, size)):
                value = chain[first + slot]
                assert self.pages[page][slot] in (None, value), f"page {page} is written over"
                self.pages[page][slot] = value


@dataclass
class Driver:
    """Steps a scheduler and keeps what came out of it."""

    scheduler: PrefillScheduler | DecodeScheduler
    pool: PagePool
    page_size: int = 16
    now: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    outputs: dict[Sequence, list[int]] = field(default_factory=dict)
    ended: dict[Sequence, Ended] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = ChainModel(self.pool, self.page_size)

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.scheduler.add(one, self.now)

    def receive(self, one: Sequence, *, with_first: bool = True) -> None:
        """Do what a push and its commit do."""
        assert isinstance(self.scheduler, DecodeScheduler)
        self.model.receive(one)
        first = self.model.sample(one) if with_first else None
        assert not isinstance(first, SampleFailure)
        self.record(self.scheduler.activate(one, first, self.now))

    def step(self, seconds: float = 0.0) -> Plan | None:
        self.now += seconds
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.record(self.scheduler.apply(plan, self.model.run(plan), self.now))
        self.pool.check_integrity()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def record(self, output: Output) -> None:
        for emitted in output.emitted:
            tokens = self.outputs.setdefault(emitted.sequence, [])
            assert emitted.position == len(emitted.sequence.work.output_ids) + len(tokens), "a gap or a repeat"
            assert emitted.sequence not in self.ended
            tokens.append(emitted.token.token_id)
        for ended in output.ended:
            self.end(ended)

    def end(self, ended: Ended) -> None:
        assert ended.sequence not in self.ended, "ended twice"
        assert ended.sequence.status is SequenceStatus.FINISHED
        assert not ended.sequence.pages
        self.ended[ended.sequence] = ended

    def check_golden(self, one: Sequence) -> None:
        """All of its tokens came out, each once, as without a scheduler."""
        expected = golden(one.work)
        assert self.outputs[one] == expected[len(one.work.output_ids) :]
        assert self.ended[one].failure == ""

    def check_idle(self) -> None:
        """Nothing waits or runs, and every page is free or cached."""
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.queued_prompt_tokens == 0
        assert self.pool.num_available == self.pool.num_pages
        assert self.scheduler.next_wakeup(self.now) is None


def hold(pool: PagePool, pages: Iterable[PageId]) -> list[PageId]:
    """Take references as a transfer does; release the result."""
    held = list(pages)
    pool.acquire(held)
    return held


def prefill(num_pages: int = 64, page_size: int = 16, **config: float) -> Driver:
    pool = PagePool(num_pages)
    scheduler = PrefillScheduler(SchedulerConfig(**config), pool, layout(page_size))  # type: ignore[arg-type]
    return Driver(scheduler, pool, page_size)


def decode(num_pages: int = 64, page_size: int = 16, **config: float) -> Driver:
    pool = PagePool(num_pages)
    scheduler = DecodeScheduler(SchedulerConfig(**config), pool, layout(page_size))  # type: ignore[arg-type]
    return Driver(scheduler, pool, page_size)


def reserve(driver: Driver, one: Sequence) -> bool:
    assert isinstance(driver.scheduler, DecodeScheduler)
    return driver.scheduler.reserve(one, driver.now)


def receive(driver: Driver, *sequences: Sequence) -> None:
    for one in sequences:
        assert reserve(driver, one)
    for one in sequences:
        driver.receive(one)


def stepped(plan: Plan | None) -> list[Sequence]:
    return [] if plan is None else [chunk.sequence for chunk in plan.chunks]


def shares(plan: Plan | None) -> list[tuple[Sequence, int, int]]:
    assert plan is not None
    return [(chunk.sequence, chunk.start, chunk.num_tokens) for chunk in plan.chunks]
