"""Drives a scheduler with a model whose keys and values are a chain over the tokens, so that any mix-up shows.

The value of position p depends on all tokens up to p. A page that was evicted in use, given back while its window is
still read, shared in the wrong place or not blanked fails an assertion in the model, or gives tokens other than
`golden`'s.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup, parse_groups
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.plan import Ended, Output, Plan, SampledToken, SampleFailure, StepResult
from pageferry.core.pool import PagePool, PageState
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import NO_PAGE, Sequence, SequenceStatus, WorkItem

VOCABULARY = 50_000
_names = count()


def layout(page_size: int = 16, groups: str = "0=full", page_format: str = "int8") -> CacheLayout:
    """The groups have a layer each."""
    parsed = parse_groups(groups, groups.count("=") if groups else 1, None)
    return CacheLayout("test", PageFormat.parse(page_format), page_size, 1, 8, parsed)


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

    def __init__(self, pools: PagePools, layout: CacheLayout) -> None:
        self._pools = pools
        self._layout = layout
        self.pages: dict[Place, list[int | None]] = defaultdict(lambda: [-1] * layout.page_size)
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
        for place in plan.fresh:
            self.pages[place] = [None] * self._layout.page_size
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        self._check_writers(plan)
        samples: list[SampledToken | SampleFailure] = []
        for chunk in plan.chunks:
            for number, group in enumerate(self._layout.groups):
                self._compute(chunk.sequence, number, group, chunk.start, chunk.start + chunk.num_tokens)
            assert chunk.samples == (chunk.start + chunk.num_tokens == len(chunk.sequence.token_ids))
            if chunk.samples:
                samples.append(self.sample(chunk.sequence))
        return StepResult(tuple(samples))

    def sample(self, sequence: Sequence) -> SampledToken | SampleFailure:
        if sequence in self.failing:
            return SampleFailure("logits are not numbers")
        return SampledToken(_draw(self.chain(sequence)[-1], sequence.num_output))

    def receive(self, sequence: Sequence, expected: dict[PageKey, Place]) -> None:
        """Fill a reserved sequence's pages as a sender would."""
        for key, place in expected.items():
            assert self._pools.of(place).state(place.page) is PageState.RESERVED
            self.pages[place] = self.content(sequence, key)

    def content(self, sequence: Sequence, key: PageKey) -> list[int | None]:
        """What the page holds once all of the tokens are computed."""
        size = self._layout.page_size
        values = self._values(sequence, key.group)[key.index * size : (key.index + 1) * size]
        return [*values, *[None] * (size - len(values))]

    def _values(self, sequence: Sequence, group: int) -> list[int]:
        """A chain for each group, so that they can't be mixed up."""
        return [2 * value + group for value in self.chain(sequence)]

    def _check_writers(self, plan: Plan) -> None:
        """No two sequences of a step write to one page."""
        size, written = self._layout.page_size, set()
        for chunk in plan.chunks:
            for number, table in enumerate(chunk.sequence.tables):
                for page in table[chunk.start // size : self._layout.num_pages(chunk.start + chunk.num_tokens)]:
                    place = Place(number, page)
                    assert place not in written, f"{place} has two writers"
                    written.add(place)

    def _compute(self, sequence: Sequence, number: int, group: CacheGroup, start: int, end: int) -> None:
        values, size = self._values(sequence, number), self._layout.page_size
        assert sequence.num_computed == start < end <= len(values)
        for index in group.live_pages(start, end, size):
            first = index * size
            assert sequence.tables[number][index] != NO_PAGE, f"page {index} of group {number} is needed"
            place = Place(number, sequence.tables[number][index])
            assert self._pools.of(place).state(place.page) is PageState.RESIDENT
            is_open = bool(self._layout.tails) and first + size > start  # in the tail until it is full
            source = self._tail(sequence, number) if is_open else place
            known = values[first : min(max(start, first), first + size)]
            assert self.pages[source][: len(known)] == known, f"{source} is another's"
            content: list[int | None] = list(self.pages[place])
            for slot in range(len(known), min(end - first, size)):
                assert is_open or content[slot] in (None, values[first + slot]), f"{place} is written over"
                content[slot] = values[first + slot]
            if not is_open or first + size <= end:
                self.pages[place] = [*known, *content[len(known) :]]
            else:
                open_part = [*known, *content[len(known) : end - first]]
                self.pages[self._tail(sequence, number)] = open_part + [None] * (size - len(open_part))

    def _tail(self, sequence: Sequence, group: int) -> Place:
        assert sequence.tail is not None
        return Place(group, sequence.tail, is_tail=True)


@dataclass
class Driver:
    """Steps a scheduler and keeps what came out of it."""

    scheduler: PrefillScheduler | DecodeScheduler
    pools: PagePools
    layout: CacheLayout
    now: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    outputs: dict[Sequence, list[int]] = field(default_factory=dict)
    ended: dict[Sequence, Ended] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = ChainModel(self.pools, self.layout)

    @property
    def pool(self) -> PagePool:
        """That of the first group."""
        return self.pools.groups[0]

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.scheduler.add(one, self.now)

    def receive(self, one: Sequence, *, with_first: bool = True) -> None:
        """Do what a push and its commit do."""
        assert isinstance(self.scheduler, DecodeScheduler)
        self.model.receive(one, self.scheduler.tables.expected(one))
        self.activate(one, with_first=with_first)

    def activate(self, one: Sequence, *, with_first: bool = True) -> None:
        """All pages have come."""
        assert isinstance(self.scheduler, DecodeScheduler)
        first = self.model.sample(one) if with_first else None
        assert not isinstance(first, SampleFailure)
        self.record(self.scheduler.activate(one, first, self.now))

    def step(self, seconds: float = 0.0) -> Plan | None:
        self.now += seconds
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.record(self.scheduler.apply(plan, self.model.run(plan), self.now))
        self.pools.check_integrity()
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
        assert not ended.sequence.tables and ended.sequence.tail is None
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
        assert self.pools.num_available == self.pools.num_pages
        claims = self.scheduler.tables.claims
        assert not claims._promised and not any(claims._num_promised)
        assert self.scheduler.next_wakeup(self.now) is None


def hold(pools: PagePools, places: Iterable[Place]) -> list[Place]:
    """Take references as a transfer does; release the result."""
    held = list(places)
    pools.acquire(held)
    return held


def prefill(
    num_pages: int | tuple[int, ...] = 64, of: CacheLayout | None = None, num_tails: int = 8, **config: float
) -> Driver:
    return _driver(PrefillScheduler, num_pages, of or layout(), num_tails, config)


def decode(
    num_pages: int | tuple[int, ...] = 64, of: CacheLayout | None = None, num_tails: int = 8, **config: float
) -> Driver:
    return _driver(DecodeScheduler, num_pages, of or layout(), num_tails, config)


def _driver(
    kind: type[PrefillScheduler] | type[DecodeScheduler],
    num_pages: int | tuple[int, ...],
    of: CacheLayout,
    num_tails: int,
    config: dict[str, float],
) -> Driver:
    pools = PagePools(of, (num_pages,) if isinstance(num_pages, int) else num_pages, num_tails)
    return Driver(kind(SchedulerConfig(**config), pools, of), pools, of)  # type: ignore[arg-type]


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
