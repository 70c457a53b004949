"""The prefill step: what it hands over and when, and that nothing stays behind."""

from collections.abc import Iterable

import pytest
from fake_engine import GROUPED, LAYOUT, FakeClock, FakePages, FakeRunner, golden, make_work
from handoff_bench import is_idle

from pageferry.core.config import SchedulerConfig
from pageferry.core.errors import DeadlineExceededError, InternalError, InvalidArgumentError, ResourceExhaustedError
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.plan import NO_TOKEN
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sequence import FinishReason, Sequence
from pageferry.prefill_svc.step import ChunkDone, Drawn, Event, Failed, PrefillStep
from pageferry.runtime.reports import CacheReport
from pageferry.v1.inference_pb2 import WorkerLoad

B = LAYOUT.page_size


class Bench:
    def __init__(self, num_pages: int = 32, layout: CacheLayout = LAYOUT, **config: float) -> None:
        self.clock = FakeClock()
        self.pools = PagePools(layout, [num_pages] * len(layout.groups), num_tails=8)
        self.pages = FakePages(layout, num_pages, num_tails=8)
        self.runner = FakeRunner(self.pages, before=lambda plan: self.clock.advance(0.1))
        scheduler = PrefillScheduler(SchedulerConfig(**{"chunk_tokens": 2 * B, **config}), self.pools, layout)
        self.step = PrefillStep(scheduler, self.pools, self.runner, self.clock)

    def add(self, request_id: str, prompt: Iterable[int], first_page: int | None = 0, **fields: object) -> Sequence:
        deadline = fields.pop("deadline", None)
        assert deadline is None or isinstance(deadline, float)
        sequence = Sequence(make_work(request_id, prompt, **fields), self.clock(), deadline)
        self.step.add(sequence, first_page, as_tails=self.pages.layout.format.has_tails)
        return sequence

    def run(self, steps: int = 20) -> list[Event]:
        events: list[Event] = []
        for _ in range(steps):
            events += self.step.step(self.clock())
        return events

    def is_idle(self) -> bool:
        self.pools.check_integrity()
        return is_idle(self.step.load())

    def release(self, events: list[Event]) -> None:
        self.step.release_pages([place for _, place in pages_of(events)])


def pages_of(events: list[Event]) -> list[tuple[PageKey, Place]]:
    return [page for event in events if isinstance(event, ChunkDone) for page in event.pages]


def test_pages_come_with_their_chunks_and_keep_their_bytes_until_released() -> None:
    bench = Bench()
    prompt = range(5 * B + 1)
    sequence = bench.add("r", prompt)
    events = bench.run()
    chunks = [event for event in events if isinstance(event, ChunkDone)]
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks] == [(0, 2 * B), (2 * B, 2 * B), (4 * B, B + 1)]
    assert [[key.index for key, _ in chunk.pages] for chunk in chunks] == [[0, 1], [2, 3], [4, 5]]
    (drawn,) = (event for event in events if isinstance(event, Drawn))
    assert (drawn.sequence, drawn.position, drawn.reason) == (sequence, 0, None)
    assert drawn.token.token_id == golden(prompt, 1)[0]
    bench.add("other", range(500, 500 + 20 * B), None)  # cannot take pages that are on their way
    bench.run()
    for key, place in pages_of(events):  # what is behind the last token is blank
        assert bench.pages.at(place) == bench.pages.content(key, prompt)
    assert not bench.is_idle()
    bench.release(events)
    assert bench.is_idle()


def test_of_a_window_only_what_is_live_at_the_end_is_handed_over_and_open_pages_are_tails() -> None:
    bench = Bench(layout=GROUPED)
    dirty = bench.add("dirty", range(700, 700 + 20 * B), None)
    bench.run()
    assert dirty.num_computed == 20 * B
    prompt = range(6 * B + 1)
    bench.add("r", prompt)
    events = bench.run()
    # Of the window of 10 the last query, at 24, reads 15 to 24: from page 3 on, and of the sinks page 0.
    window = [PageKey(0, 0), PageKey(0, 3), PageKey(0, 4), PageKey(0, 5), PageKey(0, 6, is_tail=True)]
    full = [*(PageKey(1, index) for index in range(6)), PageKey(1, 6, is_tail=True)]
    pages = pages_of(events)
    assert sorted(key for key, _ in pages) == sorted([*window, *full])
    chunks = [[key.index for key, _ in event.pages] for event in events if isinstance(event, ChunkDone)]
    assert [max(indices) for indices in chunks] == [1, 3, 5, 6]  # as they are computed
    bench.add("other", range(500, 500 + 20 * B), None)
    bench.run()
    for key, place in pages:
        assert bench.pages.at(place) == bench.pages.content(key, prompt)
    bench.release(events)
    assert bench.is_idle()


@pytest.mark.parametrize("first_page", [0, 1, 3])
def test_pages_that_the_receiver_has_are_not_handed_over(first_page: int) -> None:
    bench = Bench()
    bench.add("r", range(3 * B + 2), first_page)
    events = bench.run()
    assert [key.index for key, _ in pages_of(events)] == list(range(first_page, 4))
    bench.release(events)
    assert bench.is_idle()


def test_pages_from_the_own_cache_are_handed_over_too() -> None:
    bench = Bench()
    bench.add("first", range(4 * B), None)
    bench.run()
    again = bench.add("again", range(4 * B), 1)
    events = bench.run()
    assert again.num_cached == 4 * B - 1
    assert [key.index for key, _ in pages_of(events)] == [1, 2, 3]
    (drawn,) = (event for event in events if isinstance(event, Drawn))
    assert drawn.token.token_id == golden(range(4 * B), 1)[0]
    bench.release(events)
    assert bench.is_idle()


@pytest.mark.parametrize(("max_tokens", "stop_ids", "reason"), [(1, (), "length"), (5, (7,), "stop")])
def test_a_first_token_that_ends_it_hands_the_last_pages_over_to_nobody(
    max_tokens: int, stop_ids: tuple[int, ...], reason: str
) -> None:
    bench = Bench()
    bench.runner.script["r", 0] = 7
    bench.add("r", range(B + 1), max_tokens=max_tokens, stop_ids=stop_ids)
    events = bench.run()
    (drawn,) = (event for event in events if isinstance(event, Drawn))
    assert drawn.reason is FinishReason(reason)
    assert pages_of(events) == []
    assert bench.is_idle()


def test_forced_output_is_covered_and_the_position_counts_it() -> None:
    bench = Bench()
    bench.add("r", range(B), output_ids=(9, 8, 7))
    events = bench.run()
    (drawn,) = (event for event in events if isinstance(event, Drawn))
    assert drawn.position == 3
    assert drawn.token.token_id == golden([*range(B), 9, 8, 7], 1)[0]
    assert [key.index for key, _ in pages_of(events)] == [0, 1]


def test_an_abort_between_chunks_stops_the_computing_and_frees_all() -> None:
    bench = Bench()
    sequence = bench.add("r", range(20 * B))
    events = bench.run(2)
    bench.step.abort(sequence)
    bench.step.abort(sequence)
    num_tokens = bench.runner.num_tokens
    assert not [event for event in bench.run() if isinstance(event, ChunkDone | Drawn | Failed)]
    assert bench.runner.num_tokens == num_tokens == 4 * B
    bench.release(events)
    assert bench.is_idle()


def test_what_waits_past_its_deadline_is_never_computed() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("busy", range(10 * B), None)
    bench.run(1)
    late = bench.add("late", range(900, 900 + B), deadline=bench.clock() + 0.25)
    events = bench.run()
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.sequence is late
    assert isinstance(failed.error, DeadlineExceededError)
    assert all(chunk.sequence is not late for plan in bench.runner.plans for chunk in plan.chunks)
    with pytest.raises(DeadlineExceededError):
        bench.add("dead", range(B), deadline=bench.clock())
    assert bench.is_idle()


@pytest.mark.field("vllm-project/vllm#14126", "EricLBuehler/mistral.rs#2051", "vllm-project/vllm#48231")
def test_a_failed_draw_fails_its_own_sequence_alone() -> None:
    bench = Bench(chunk_tokens=8 * B)
    bench.runner.failures["bad", 0] = "logits are not numbers"
    bad = bench.add("bad", range(B))
    good = bench.add("good", range(100, 100 + B))
    events = bench.run()
    (failed,) = (event for event in events if isinstance(event, Failed))
    (drawn,) = (event for event in events if isinstance(event, Drawn))
    assert (failed.sequence, drawn.sequence) == (bad, good)
    assert isinstance(failed.error, InternalError)
    bench.release(events)
    assert bench.is_idle()


def test_a_request_that_leaves_no_token_is_told_that_it_is_to_blame() -> None:
    bench = Bench(chunk_tokens=8 * B)
    bench.runner.failures["bad", 0] = f"{NO_TOKEN} at position 0: nothing is left by what is banned"
    bench.add("bad", range(B))
    events = bench.run()
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert (type(failed.error), failed.error.reason) == (InvalidArgumentError, "NO_TOKEN_LEFT")
    bench.release(events)
    assert bench.is_idle()


def test_refusals_leave_nothing_behind() -> None:
    bench = Bench(num_pages=4, max_waiting=1)
    with pytest.raises(InvalidArgumentError, match=r"17.*5.*4"):
        bench.add("huge", range(4 * B + 1))
    bench.add("waits", range(B), None)
    with pytest.raises(ResourceExhaustedError, match="max_waiting is 1"):
        bench.add("too many", range(B))
    bench.run()
    assert bench.is_idle()


def test_a_report_counts_prompts_by_priority() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("flood", range(5 * B), priority=100)
    bench.run(1)
    bench.add("urgent", range(100, 100 + B), priority=-1)
    loads = [(load.priority, load.waiting, load.queued_prompt_tokens) for load in bench.step.load().priorities]
    assert loads == [(-1, 1, B), (100, 0, 3 * B)]


def test_reports_come_when_something_changed_and_twice_a_second() -> None:
    bench = Bench()
    assert [type(event) for event in bench.step.step(bench.clock())] == [WorkerLoad]
    assert bench.step.step(bench.clock()) == []
    assert bench.step.next_wakeup(bench.clock()) == pytest.approx(0.5)
    bench.add("r", range(2 * B), None)
    assert bench.step.next_wakeup(bench.clock()) == 0
    events = bench.run(1)
    (load,) = (event for event in events if isinstance(event, WorkerLoad))
    assert (load.pages_cached, load.prefill_tokens, load.generated_tokens) == (2, 2 * B, 1)
    assert load.prefill_tokens_per_s == pytest.approx(2 * B / 0.1)
    (cache,) = (event for event in events if isinstance(event, CacheReport))
    assert (len(cache.stored), len(cache.removed)) == (2, 0)
