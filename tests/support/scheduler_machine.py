"""A scheduler under any order of commands, in pools of a few pages, with each kind of cache."""

from collections import Counter

from chain_model import golden, golden_beams
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from scheduling import Driver, hold, layout, prompt, sequence

from pageferry.core.claims import held_places
from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.layout import Place
from pageferry.core.plan import Plan, StepResult
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sequence import NO_PAGE, Sequence, SequenceStatus

PAGE_SIZE = 4
KINDS = {
    "full": ("0=full", "int8"),
    "selective": ("0=window:7,sinks:3;1=full", "int8"),
    "window": ("0=window:9", "int8"),
    "tails": ("0=full", "int8:channel"),
    "window_tails": ("0=window:6,sinks:5;1=full;2=window:1", "int8:channel"),
}
# Few different ones, so that they often share pages, and whole prompts; lengths that fill pages are frequent.
PROMPTS = st.builds(prompt, st.integers(1, 30) | st.sampled_from([8, 12, 16]), st.integers(0, 2))
CONFIGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 5),
        "max_prefills": st.integers(1, 5),
        "max_waiting": st.integers(1, 6),
        "chunk_tokens": st.sampled_from([1, 3, 4, 10, 64]),
        "local_chunk_tokens": st.sampled_from([1, 3, 4, 10, 64]),
        "batch_window_ms": st.sampled_from([0.0, 1.0]),
        "headroom_pages": st.integers(0, 2),
        "ageing_tokens_per_s": st.sampled_from([0.0, 1000.0]),
        "prefix_cache": st.booleans(),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """What both have in common. The model checks that no page is another's."""

    kind = "full"
    num_drafts = 0  # most behind a chunk
    driver: Driver
    config: SchedulerConfig

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.held: list[list[Place]] = []
        self.layout = layout(PAGE_SIZE, *KINDS[self.kind])
        self.in_flight: tuple[Plan, StepResult] | None = None

    def make_scheduler(self, pools: PagePools) -> PrefillScheduler | DecodeScheduler:
        raise NotImplementedError

    @initialize(
        config=CONFIGS, num_pages=st.lists(st.integers(1, 12), min_size=3, max_size=3), num_tails=st.integers(1, 5)
    )
    def start(self, config: dict[str, float], num_pages: list[int], num_tails: int) -> None:
        self.begin(config, num_pages, num_tails)

    def begin(self, config: dict[str, float], num_pages: list[int], num_tails: int) -> None:
        self.config = SchedulerConfig(**config)  # type: ignore[arg-type]
        pools = PagePools(self.layout, num_pages[: len(self.layout.groups)], num_tails)
        self.driver = Driver(self.make_scheduler(pools), pools, self.layout)

    def most_positions(self, one: Sequence) -> tuple[int, int]:
        """Positions that a sequence may come to, and those of one step."""
        raise NotImplementedError

    def fits(self, one: Sequence) -> bool:
        """Whether each pool is large enough for the sequence alone."""
        num_positions, num_chunk = self.most_positions(one)
        num_shared = (one.num_slots - 1) * (one.num_prompt // PAGE_SIZE)
        tails = self.driver.pools.tails
        return (tails is None or one.num_slots <= tails.num_pages) and all(
            one.num_slots * group.most_live(num_positions, num_chunk, PAGE_SIZE)
            <= pool.num_pages + num_shared * (group.window is None)
            for group, pool in zip(self.layout.groups, self.driver.pools.groups, strict=True)
        )

    def make_sequence(self, data: st.DataObject) -> Sequence:
        lifetime = data.draw(st.none() | st.floats(0.001, 0.02))
        return sequence(
            data.draw(PROMPTS),
            max_tokens=data.draw(st.integers(2, 12)),
            output_ids=(3,) * data.draw(st.integers(0, 1)),
            priority=data.draw(st.integers(0, 2)),
            arrival=self.driver.now,
            deadline=None if lifetime is None else self.driver.now + lifetime,
        )

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        one = self.make_sequence(data)
        num_waiting = self.driver.scheduler.num_waiting
        try:
            self.driver.add(one)
        except InvalidArgumentError:
            assert not self.fits(one)
        except ResourceExhaustedError:
            assert num_waiting >= self.config.max_waiting
        else:
            assert self.fits(one)
            self.live.append(one)

    @rule(milliseconds=st.integers(0, 3))
    def begin_step(self, milliseconds: int) -> None:
        if self.in_flight is None:
            self.driver.now += milliseconds / 1000
            plan = self.driver.scheduler.schedule(self.driver.now)
            if plan is not None:
                self.check_plan(plan)
                self.in_flight = plan, self.driver.model.run(plan)

    @rule()
    def end_step(self) -> None:
        if self.in_flight is not None:
            (plan, result), self.in_flight = self.in_flight, None
            self.driver.record(self.driver.scheduler.apply(plan, result, self.driver.now))

    @rule(milliseconds=st.integers(0, 1), num_steps=st.integers(1, 8))
    def step(self, milliseconds: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.begin_step(milliseconds)
            self.end_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        for _ in range(data.draw(st.integers(1, 2))):
            self.driver.scheduler.abort(one)
        assert one.status is SequenceStatus.FINISHED
        assert not one.tables and one.tail is None
        self.live.remove(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def begin_copy(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        self.held.append(hold(self.driver.pools, held_places(one)))

    @precondition(lambda self: self.held)
    @rule()
    def end_copy(self) -> None:
        self.driver.pools.release(self.held.pop(0))

    @precondition(lambda self: self.live and self.in_flight is None)
    @rule(data=st.data())
    def fail_sampling(self, data: st.DataObject) -> None:
        self.driver.model.failing.add(data.draw(st.sampled_from(self.live)))

    @rule(milliseconds=st.integers(0, 10))
    def expire(self, milliseconds: int) -> None:
        """By time alone, whatever else goes on."""
        self.driver.now += milliseconds / 1000
        expired = {ended.sequence for ended in self.driver.scheduler.expire(self.driver.now)}
        due = {one for one in self.live if one.deadline is not None and one.deadline <= self.driver.now}
        assert expired == due - set(self.driver.ended)
        self.live = [one for one in self.live if one not in expired]

    def check_plan(self, plan: Plan) -> None:
        raise NotImplementedError

    @invariant()
    def every_page_has_one_state(self) -> None:
        if hasattr(self, "driver"):
            self.driver.pools.check_integrity()
            self.live = [one for one in self.live if one not in self.driver.ended]
            for one in self.live:
                assert one.status is not SequenceStatus.FINISHED
                waits_with = (one.tables, one.beams, one.num_computed)
                assert one.status is not SequenceStatus.WAITING or waits_with == ([], [], 0)

    @invariant()
    def sequences_hold_what_they_need_and_no_more(self) -> None:
        holders = [member for one in self.live for member in one.members if member.tables]
        owners = Counter(place for one in holders for place in held_places(one))
        for one in holders:
            for number, (group, table) in enumerate(zip(self.layout.groups, one.tables, strict=True)):
                held, done = {index for index, page in enumerate(table) if page != NO_PAGE}, one.num_computed
                if one.status is SequenceStatus.RECEIVING:
                    needed = allowed = set(group.live_at_end(len(one.token_ids), PAGE_SIZE))
                else:
                    needed = set(group.live_pages(done, done, PAGE_SIZE))
                    allowed = set(group.live_pages(done, done + 1 + self.num_drafts, PAGE_SIZE))
                if self.in_flight is None:
                    assert held >= needed
                    assert group.window is None or held <= allowed
                if group.window is not None:
                    promised = self.driver.scheduler.tables.claims._promised[one.owner][number]
                    assert len(held) <= promised // one.num_slots
                for page in table[done // PAGE_SIZE :]:
                    is_alone = one.root is not None or owners[Place(number, page)] == 1  # beams copy as they write
                    assert page == NO_PAGE or is_alone, "somebody else has what is written to"
        if hasattr(self, "driver"):
            assert sum(one.tail is not None for one in holders) == len(holders) * bool(self.layout.tails)
            num_promised = self.driver.scheduler.tables.claims._num_promised
            assert all(num <= pool.num_pages for num, pool in zip(num_promised, self.driver.pools.groups, strict=True))

    @invariant()
    def figures_are_not_negative(self) -> None:
        if hasattr(self, "driver"):
            scheduler = self.driver.scheduler
            assert min(scheduler.num_waiting, scheduler.num_running, scheduler.queued_prompt_tokens) >= 0
            assert scheduler.num_running <= self.config.max_num_seqs
            wakeup = scheduler.next_wakeup(self.driver.now)
            assert wakeup is None or wakeup >= 0
            if scheduler.num_running or scheduler.num_waiting:
                assert wakeup is not None

    def finish(self) -> None:
        """Let all that is left run to its end without new work."""
        self.end_step()
        for pages in self.held:
            self.driver.pools.release(pages)
        for _ in range(5000):
            if not self.driver.scheduler.num_waiting and not self.driver.scheduler.num_running:
                break
            wakeup = self.driver.scheduler.next_wakeup(self.driver.now)
            assert wakeup is not None
            self.begin_step(0)
            assert self.in_flight is not None or wakeup > 0, "woken for nothing"
            self.end_step()
            self.driver.now += wakeup
        else:
            raise AssertionError("no end")

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.finish()
        for one in self.live:
            ended = self.driver.ended[one]
            assert (ended.failure == "") == (one not in self.driver.model.failing)
            if one.work.beam is not None and not ended.failure:
                assert ended.hypotheses == golden_beams(one.work)
        for one, tokens in self.driver.outputs.items():
            expected = golden(one.work)[len(one.work.output_ids) :]
            assert tokens == expected[: len(tokens)]
            self.check_complete(one, tokens, expected)
        self.driver.scheduler.expire(float("inf"))
        self.driver.check_idle()

    def check_complete(self, one: Sequence, tokens: list[int], expected: list[int]) -> None:
        raise NotImplementedError
