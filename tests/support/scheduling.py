"""Makes sequences and schedulers, and steps them with `ChainModel`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from chain_model import VOCABULARY, ChainModel, golden

from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.plan import Ended, Output, Plan, SampleFailure
from pageferry.core.pool import PagePool
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sampling import BeamParams, SamplingParams, StopParams
from pageferry.core.sequence import Sequence, SequenceStatus, WorkItem

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
    beam: BeamParams | None = None,
    stop_token_ids: Iterable[int] = (),
    speculate: bool = True,
) -> Sequence:
    work = WorkItem(
        f"request-{next(_names)}",
        tuple(prompt_ids),
        SamplingParams(),
        StopParams(max_tokens, stop_token_ids=frozenset(stop_token_ids)),
        output_ids=output_ids,
        priority=priority,
        beam=beam,
        speculate=speculate,
    )
    return Sequence(work, arrival, deadline)


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
        assert self.pools.num_free + self.pools.num_cached == self.pools.num_pages
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
