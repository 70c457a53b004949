"""The decode step: hand-offs, tokens, ends, and that nothing stays behind."""

from collections.abc import Iterable

import pytest
from fake_engine import LAYOUT, LAYOUTS, FakeClock, FakePages, FakeRunner, golden, make_work
from handoff_bench import is_idle

from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PageferryError,
    ResourceExhaustedError,
    UnavailableError,
)
from pageferry.core.handoff import TicketTable
from pageferry.core.layout import CacheLayout, PageKey
from pageferry.core.plan import NO_TOKEN, Emitted, SampledToken
from pageferry.core.pools import PagePools
from pageferry.core.sequence import FinishReason, Sequence
from pageferry.decode_svc.desk import Places
from pageferry.decode_svc.step import ChunkDone, Completed, DecodeStep, Event, Failed, HandoffEnded
from pageferry.runtime.frames import FrameKey
from pageferry.v1.inference_pb2 import WorkerLoad

B = LAYOUT.page_size
LEASE_S = 2.0
RESERVATION_S = 3 * LEASE_S
GONE = CancelledError("the call is over")


class Bench:
    def __init__(
        self, num_pages: int = 32, layout: CacheLayout = LAYOUT, *, window_pages: int = 32, **config: float
    ) -> None:
        """`num_pages` of full groups."""
        self.clock = FakeClock()
        self.layout = layout
        counts = [num_pages if group.window is None else window_pages for group in layout.groups]
        self.pools = PagePools(layout, counts, num_tails=8)
        self.pages = FakePages(layout, max(counts), num_tails=8)
        self.runner = FakeRunner(self.pages, before=lambda plan: self.clock.advance(0.1))
        scheduler = DecodeScheduler(SchedulerConfig(**{"headroom_pages": 0, **config}), self.pools, layout)
        tickets = TicketTable(b"i" * 16, LEASE_S, layout, reservation_s=RESERVATION_S)
        self.step = DecodeStep(scheduler, self.pools, tickets, self.runner, self.clock)
        self.desk = self.step.desk

    def make(self, request_id: str, prompt: Iterable[int], **fields: object) -> Sequence:
        deadline = fields.pop("deadline", None)
        assert deadline is None or isinstance(deadline, float)
        return Sequence(make_work(request_id, prompt, **fields), self.clock(), deadline)

    def reserve(self, request_id: str, prompt: Iterable[int], **fields: object) -> Sequence:
        sequence = self.make(request_id, prompt, **fields)
        self.step.reserve(sequence, ticket_of(request_id))
        return sequence

    def open(self, request_id: str, push_id: int = 1) -> Places:
        return self.desk.open(push_id, ticket_of(request_id), request_id, self.layout, self.clock())

    def fill(self, sequence: Sequence, places: Places, push_id: int = 1) -> None:
        """Write what a prefill worker would send, and say so."""
        for key, place in places.items():
            self.pages.fill(key, place, sequence.token_ids)
            frames = [FrameKey(key, *frame) for frame in self.layout.of(key).frames()]
            self.desk.receive(push_id, frames, self.clock())

    def hand_off(
        self, request_id: str, prompt: Iterable[int], *, with_first: bool = True, **fields: object
    ) -> Sequence:
        """A whole hand-off, its first token drawn elsewhere."""
        sequence = self.reserve(request_id, prompt, **fields)
        self.fill(sequence, self.open(request_id))
        first = (
            (sequence.num_output, SampledToken(golden(sequence.token_ids, 1, self.layout)[0])) if with_first else None
        )
        self.desk.commit(1, len(sequence.token_ids), first, self.clock())
        self.desk.close(1, None)
        return sequence

    def run(self, steps: int = 20) -> list[Event]:
        return [event for _ in range(steps) for event in self.step.step(self.clock())]

    def is_idle(self) -> bool:
        self.pools.check_integrity()
        return is_idle(self.step.load())


def ticket_of(request_id: str) -> bytes:
    return request_id.encode().ljust(16, b".")


def tokens_of(events: list[Event], sequence: Sequence) -> list[tuple[int, int]]:
    return [(e.position, e.token.token_id) for e in events if isinstance(e, Emitted) and e.sequence is sequence]


def failure_of(events: list[Event]) -> PageferryError:
    (failed,) = (event for event in events if isinstance(event, Failed))
    return failed.error


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("with_first", [True, False])
@pytest.mark.parametrize("num_prompt", [1, B - 1, B, B + 1, 4 * B, 7 * B + 1])
def test_a_handed_over_prompt_gives_the_golden_tokens_from_position_0(
    num_prompt: int, with_first: bool, layout: CacheLayout
) -> None:
    bench = Bench(layout=layout)
    sequence = bench.hand_off("r", range(num_prompt), max_tokens=6, with_first=with_first)
    events = bench.run()
    assert tokens_of(events, sequence) == list(enumerate(golden(range(num_prompt), 6, layout)))
    (done,) = (event for event in events if isinstance(event, Completed))
    figures = done.figures
    assert (done.reason, figures.num_steps, figures.num_preemptions) == (FinishReason.LENGTH, 6 - with_first, 0)
    assert figures.first_step == figures.ready
    assert figures.first_own == pytest.approx(figures.ready + 0.1)
    assert figures.ended == pytest.approx(figures.ready + 0.1 * figures.num_steps)
    assert bench.is_idle()


def test_a_prompt_computed_here_gives_the_same_tokens() -> None:
    bench = Bench(local_chunk_tokens=B)
    sequence = bench.make("r", range(2 * B + 1), max_tokens=6)
    bench.step.add(sequence)
    events = bench.run()
    assert tokens_of(events, sequence) == list(enumerate(golden(range(2 * B + 1), 6)))
    assert [(e.start, e.num_tokens) for e in events if isinstance(e, ChunkDone)] == [(0, B), (B, B)]
    assert bench.is_idle()


def test_cached_pages_are_not_asked_for_again() -> None:
    bench = Bench()
    bench.hand_off("first", range(3 * B), max_tokens=2)
    bench.run()
    sequence = bench.reserve("again", range(3 * B), max_tokens=2)
    places = bench.open("again")
    assert (sequence.num_cached, list(places)) == (2 * B, [PageKey(0, 2)])
    bench.fill(sequence, places)
    bench.desk.commit(1, 3 * B, None, bench.clock())
    bench.desk.close(1, None)
    assert tokens_of(bench.run(), sequence) == list(enumerate(golden(range(3 * B), 2)))
    assert bench.is_idle()


def test_a_first_token_may_end_it_without_a_step() -> None:
    bench = Bench()
    bench.hand_off("r", range(B), max_tokens=1)
    (emitted, done) = (event for event in bench.run() if isinstance(event, Emitted | Completed))
    assert isinstance(emitted, Emitted)
    assert isinstance(done, Completed)
    assert (done.reason, done.figures.first_step, done.figures.first_own) == (FinishReason.LENGTH, None, None)
    assert bench.runner.plans == []
    assert bench.is_idle()


def test_no_room_is_said_at_once_and_changes_nothing() -> None:
    bench = Bench(num_pages=4)
    bench.reserve("first", range(3 * B), max_tokens=B)
    with pytest.raises(ResourceExhaustedError) as caught:
        bench.reserve("second", range(B + 1), max_tokens=2)
    assert caught.value.retry_after_ms
    with pytest.raises(InvalidArgumentError, match=r"5.*4"):
        bench.reserve("never", range(4 * B + 1), max_tokens=1)
    assert (bench.pools.num_reserved, bench.step.load().tickets) == (3, 1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("num_prompt", [3 * B, 5 * B + 1])
@pytest.mark.parametrize("state", ["reserved", "filling", "filled", "committed", "running"])
def test_a_cancel_in_any_state_frees_everything_within_a_step(state: str, num_prompt: int, layout: CacheLayout) -> None:
    bench = Bench(layout=layout)
    sequence = bench.reserve("r", range(num_prompt))
    push_open = state in ("filling", "filled", "committed")
    if state != "reserved":
        places = bench.open("r")
        if state != "filling":
            bench.fill(sequence, places)
        if state in ("committed", "running"):
            bench.desk.commit(1, num_prompt, (0, SampledToken(5)), bench.clock())
        if state == "running":
            bench.desk.close(1, None)
            bench.run(2)
    figures = bench.step.abort(sequence, GONE)
    assert (figures is not None) == (state in ("committed", "running"))
    assert bench.step.abort(sequence, GONE) is None
    events = bench.run(1)
    assert not [event for event in events if isinstance(event, Failed | Completed)]
    ended = [(event.push, event.error) for event in events if isinstance(event, HandoffEnded)]
    assert ended == ([(1, GONE)] if state in ("filling", "filled") else [])
    if push_open:
        assert not bench.is_idle()  # a copy may be in flight
        bench.desk.close(1, GONE)
    assert bench.is_idle()
    assert not [event for event in bench.run() if not isinstance(event, WorkerLoad)]


def test_pages_of_a_broken_push_return_when_its_copies_have_ended() -> None:
    bench = Bench(num_pages=4)
    sequence = bench.reserve("r", range(3 * B), max_tokens=2)
    places = bench.open("r")
    bench.step.abort(sequence, GONE)
    (pool,) = bench.pools.groups
    assert {pool.ref_count(place.page) for place in places.values()} == {1}
    assert pool.num_available == 1
    bench.desk.receive(1, [FrameKey(PageKey(0, 0), 0, LAYOUT.num_layers)], bench.clock())  # late, and of no effect
    with pytest.raises(FailedPreconditionError, match="aborted"):
        bench.desk.commit(1, 3 * B, None, bench.clock())
    bench.desk.close(1, GONE)
    bench.desk.close(1, GONE)
    assert bench.is_idle()


@pytest.mark.parametrize("state", ["filling", "filled"])
def test_a_push_that_breaks_ends_the_request_retryably_with_the_reason(state: str) -> None:
    bench = Bench()
    sequence = bench.reserve("r", range(3 * B))
    places = bench.open("r")
    if state == "filled":
        bench.fill(sequence, places)
    bench.desk.close(1, UnavailableError("the sender's machine burns", reason="FIRE"))
    error = failure_of(bench.run(1))
    assert isinstance(error, UnavailableError)
    assert error.retryable
    assert error.reason == "FIRE"
    assert "machine burns" in error.message
    with pytest.raises(FailedPreconditionError):
        bench.open("r", 2)
    assert bench.is_idle()


def test_a_sender_that_dies_after_its_commit_is_no_failure() -> None:
    bench = Bench()
    sequence = bench.reserve("r", range(B), max_tokens=3)
    bench.fill(sequence, bench.open("r"))
    bench.desk.commit(1, B, (0, SampledToken(golden(range(B), 1)[0])), bench.clock())
    bench.desk.close(1, UnavailableError("the sender is gone"))
    assert tokens_of(bench.run(), sequence) == list(enumerate(golden(range(B), 3)))
    assert bench.is_idle()


def test_a_silent_sender_loses_its_lease_by_time_alone() -> None:
    bench = Bench()
    bench.reserve("r", range(3 * B))
    bench.open("r")
    bench.run(1)
    bench.clock.advance(LEASE_S - 0.5)
    bench.desk.receive(1, (), bench.clock())
    bench.clock.advance(LEASE_S - 0.1)
    assert not [event for event in bench.run(1) if not isinstance(event, WorkerLoad)]
    assert bench.step.next_wakeup(bench.clock()) == pytest.approx(0.1)
    bench.clock.advance(0.1)
    events = bench.run(1)
    assert failure_of(events).reason == "HANDOFF_EXPIRED"
    assert [event.push for event in events if isinstance(event, HandoffEnded)] == [1]
    bench.desk.close(1, GONE)
    assert bench.is_idle()


def test_a_ticket_that_nobody_opens_fails_its_request_and_frees_its_pages() -> None:
    bench = Bench()
    bench.reserve("r", range(B))
    bench.run(1)
    bench.clock.advance(RESERVATION_S - 0.5)
    assert not [event for event in bench.run(1) if isinstance(event, Failed)]
    assert bench.step.next_wakeup(bench.clock()) == pytest.approx(0.5)
    bench.clock.advance(0.5)
    assert failure_of(bench.run(1)).reason == "HANDOFF_EXPIRED"
    assert bench.is_idle()


def test_an_unopened_ticket_lives_to_the_deadline_only() -> None:
    bench = Bench()
    bench.reserve("r", range(B), deadline=bench.clock() + 2 * LEASE_S)
    bench.run(1)
    bench.clock.advance(LEASE_S)
    assert not [event for event in bench.run(1) if isinstance(event, Failed)]
    bench.clock.advance(LEASE_S)
    assert bench.step.next_wakeup(bench.clock()) == 0
    assert isinstance(failure_of(bench.run(1)), DeadlineExceededError)
    with pytest.raises(FailedPreconditionError):
        bench.open("r")
    assert bench.is_idle()


def test_a_deadline_during_a_push_is_a_deadline_and_ends_the_push() -> None:
    bench = Bench()
    bench.reserve("r", range(B), deadline=bench.clock() + LEASE_S / 2)
    bench.open("r")
    bench.clock.advance(LEASE_S / 2)
    events = bench.run(1)
    assert isinstance(failure_of(events), DeadlineExceededError)
    assert [event.push for event in events if isinstance(event, HandoffEnded)] == [1]
    bench.desk.close(1, None)
    assert bench.is_idle()


def test_a_deadline_ends_a_running_request_and_one_that_has_passed_starts_nothing() -> None:
    bench = Bench()
    sequence = bench.hand_off("r", range(B), max_tokens=100, deadline=bench.clock() + 0.35)
    events = bench.run()
    assert len(tokens_of(events, sequence)) == 5
    assert isinstance(failure_of(events), DeadlineExceededError)
    for accept in (bench.step.add, lambda sequence: bench.step.reserve(sequence, b"t" * 16)):
        with pytest.raises(DeadlineExceededError):
            accept(bench.make("late", range(B), deadline=bench.clock()))
    assert bench.is_idle()


def test_a_commit_that_does_not_fit_starts_nothing() -> None:
    bench = Bench()
    sequence = bench.reserve("r", range(3 * B))
    places = bench.open("r")
    now = bench.clock()
    with pytest.raises(FailedPreconditionError, match="0 of 3"):
        bench.desk.commit(1, 3 * B, None, now)
    bench.fill(sequence, places)
    with pytest.raises(FailedPreconditionError, match="covered_tokens"):
        bench.desk.commit(1, 3 * B - 1, None, now)
    with pytest.raises(InvalidArgumentError, match="position"):
        bench.desk.commit(1, 3 * B, (1, SampledToken(5)), now)
    bench.desk.close(1, FailedPreconditionError("the commit does not fit"))
    assert failure_of(bench.run()).retryable
    assert bench.runner.plans == []
    assert bench.is_idle()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_preempted_request_goes_on_without_a_repeated_token(layout: CacheLayout) -> None:
    bench = Bench(num_pages=7, layout=layout)
    sequences = [
        bench.hand_off(name, range(start, start + 2 * B), max_tokens=12) for name, start in (("a", 0), ("b", 50))
    ]
    events = bench.run(40)
    for sequence in sequences:
        assert tokens_of(events, sequence) == list(enumerate(golden(sequence.work.prompt_ids, 12, layout)))
    done = {event.sequence: event.figures for event in events if isinstance(event, Completed)}
    assert done[sequences[1]].num_preemptions > 0
    assert bench.step.load().preemptions == sum(figures.num_preemptions for figures in done.values())
    assert bench.is_idle()


def test_a_request_that_leaves_no_token_is_told_that_it_is_to_blame() -> None:
    bench = Bench()
    bench.runner.failures["bad", 2] = f"{NO_TOKEN} at position 2: nothing is left by what is banned"
    bench.hand_off("bad", range(B), max_tokens=4)
    error = failure_of(bench.run())
    assert (type(error), error.reason) == (InvalidArgumentError, "NO_TOKEN_LEFT")
    assert bench.is_idle()


def test_a_failed_draw_fails_its_own_request_alone() -> None:
    bench = Bench()
    bench.runner.failures["bad", 2] = "logits are not numbers"
    bad, good = (bench.hand_off(name, range(B), max_tokens=4) for name in ("bad", "good"))
    events = bench.run()
    assert isinstance(failure_of(events), InternalError)
    assert len(tokens_of(events, bad)) == 2
    assert tokens_of(events, good) == list(enumerate(golden(range(B), 4)))
    assert bench.is_idle()
