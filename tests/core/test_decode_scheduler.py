from itertools import pairwise

import pytest
from scheduling import Driver, golden, hold, layout, prompt, sequence

from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.page_tables import PageTables
from pageferry.core.plan import Plan, SampledToken
from pageferry.core.pool import PagePool, PageState
from pageferry.core.preemption import margin, running_order
from pageferry.core.sequence import FinishReason, Sequence, SequenceStatus
from pageferry.core.sequence_queues import RETRY_S, SequenceQueue


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


def test_received_pages_decode_from_the_sender_s_token_on() -> None:
    driver = decode()
    one = sequence(prompt(40), max_tokens=30)
    assert reserve(driver, one)
    assert (one.status, len(one.pages), driver.pool.num_reserved) == (SequenceStatus.RECEIVING, 4, 4)
    assert driver.step() is None
    driver.receive(one)
    assert (len(driver.outputs[one]), driver.pool.num_reserved, driver.pool.num_resident) == (1, 0, 4)
    driver.run()
    driver.check_golden(one)
    assert driver.ended[one].reason is FinishReason.LENGTH
    assert len(driver.plans) == 29
    driver.check_idle()


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("with_first", [False, True])
def test_pages_reserved_are_those_of_the_prompt_cached_or_not(num_tokens: int, with_first: bool) -> None:
    driver = decode(headroom_pages=0)
    for attempt in range(2):
        one = sequence(prompt(num_tokens), max_tokens=20)
        assert reserve(driver, one)
        assert len(one.pages) == -(-num_tokens // 16)
        assert one.num_cached == one.num_computed == (num_tokens - 1) // 16 * 16 * attempt
        driver.receive(one, with_first=with_first)
        driver.run()
        driver.check_golden(one)
        driver.check_idle()


def test_headroom_is_taken_with_the_reservation_but_never_beyond_need() -> None:
    driver = decode(headroom_pages=3)
    long, short = sequence(prompt(30, 1), max_tokens=100), sequence(prompt(30, 2), max_tokens=2)
    assert reserve(driver, long)
    assert reserve(driver, short)
    assert (len(long.pages), len(short.pages)) == (5, 2)


def test_the_first_token_may_end_it_at_once() -> None:
    driver = decode()
    one = sequence(prompt(20), max_tokens=1)
    receive(driver, one)
    assert driver.ended[one].reason is FinishReason.LENGTH
    driver.check_golden(one)
    driver.check_idle()


def test_a_prompt_is_computed_here_in_short_chunks_beside_streams() -> None:
    driver = decode(local_chunk_tokens=32)
    stream, local = sequence(prompt(20, 1), max_tokens=50), sequence(prompt(100, 2), max_tokens=5)
    receive(driver, stream)
    driver.add(local)
    assert driver.scheduler.queued_prompt_tokens == 100
    for start, num_tokens in ((0, 32), (32, 32), (64, 32), (96, 4)):
        plan = driver.step()
        assert plan is not None
        assert [(c.sequence, c.num_tokens) for c in plan.chunks] == [(stream, 1), (local, num_tokens)]
        assert plan.chunks[1].start == start
    driver.run()
    driver.check_golden(stream)
    driver.check_golden(local)
    driver.check_idle()


def test_streams_get_a_token_each_step_while_huge_prompts_are_computed() -> None:
    driver = decode(num_pages=1200, local_chunk_tokens=128)
    stream = sequence(prompt(20, 1), max_tokens=200)
    receive(driver, stream)
    huge = [sequence(prompt(4096, 2 + number), max_tokens=2) for number in range(4)]
    driver.add(*huge)
    while stream not in driver.ended:
        plan = driver.step()
        assert plan is not None
        assert stream in stepped(plan)
        assert plan.num_tokens <= 128 + len(stepped(plan))
    driver.run()
    for one in huge:
        driver.check_golden(one)
    driver.check_idle()


def test_a_short_local_prompt_does_not_wait_for_a_huge_one() -> None:
    driver = decode(num_pages=400, local_chunk_tokens=128)
    huge, short = sequence(prompt(4096, 1), max_tokens=2), sequence(prompt(32, 2), max_tokens=2, arrival=0.1)
    driver.add(huge)
    driver.step(0.1)
    driver.add(short)
    driver.step()
    driver.step()
    driver.check_golden(short)


def test_an_impossible_request_is_refused_at_once_and_holds_nobody_up() -> None:
    usable = 50 * 16
    for num_tokens in (usable - 1, usable, usable + 1, 1002):
        driver = decode(num_pages=50)
        large, small = sequence(prompt(num_tokens, 1)), sequence(prompt(5, 2))
        if num_tokens > usable:
            for take in (driver.scheduler.add, driver.scheduler.reserve):  # type: ignore[union-attr]
                with pytest.raises(InvalidArgumentError, match=rf"{num_tokens} tokens.* 50,.* {usable} tokens"):
                    take(large, 0.0)
        else:
            driver.add(large)
        driver.add(small)
        driver.run()
        driver.check_golden(small)
        assert (large in driver.ended) == (num_tokens <= usable)
        driver.check_idle()


def test_what_can_only_fit_in_part_is_refused_with_its_budget() -> None:
    driver = decode(num_pages=4)
    with pytest.raises(InvalidArgumentError, match="5 pages, for 65 tokens; the pool has 4, for 64"):
        driver.add(sequence(prompt(40), max_tokens=26))
    fits = sequence(prompt(40), max_tokens=25)
    driver.add(fits)
    driver.run()
    driver.check_golden(fits)


def test_a_full_queue_refuses_and_says_when_to_return() -> None:
    driver = decode(max_waiting=1)
    driver.add(sequence(prompt(5)))
    with pytest.raises(ResourceExhaustedError, match="max_waiting is 1") as refusal:
        driver.add(sequence(prompt(5)))
    assert refusal.value.retry_after_ms


def test_a_reservation_without_room_changes_nothing() -> None:
    driver = decode(num_pages=6, max_num_seqs=2)
    first = sequence(prompt(40, 1), max_tokens=20)
    assert reserve(driver, first)
    assert len(first.pages) == 4
    large, small, third = (sequence(prompt(size, size), max_tokens=2) for size in (40, 20, 1))
    for _ in range(2):
        assert not reserve(driver, large)
        assert (large.pages, large.status, driver.pool.num_available) == ([], SequenceStatus.WAITING, 2)
    assert reserve(driver, small)
    assert not reserve(driver, third), "slots are taken from the reservation on"
    driver.scheduler.abort(first)
    assert reserve(driver, third)
    for one in (small, third):
        driver.receive(one)
    driver.run()
    driver.check_idle()


def test_a_reservation_leaves_the_running_their_headroom() -> None:
    driver = decode(num_pages=8)
    stream = sequence(prompt(30, 1), max_tokens=90)
    receive(driver, stream)
    for _ in range(20):
        driver.step()
    assert len(stream.pages) == 4
    newcomer = sequence(prompt(64, 2), max_tokens=1)
    assert not reserve(driver, newcomer)
    small = sequence(prompt(48, 3), max_tokens=1)
    assert reserve(driver, small)
    driver.receive(small)
    driver.run()
    assert stream.num_preemptions == 0


def test_preemption_takes_the_latest_and_no_more_than_needed() -> None:
    driver = decode(num_pages=8, headroom_pages=0)
    streams = [sequence(prompt(28, number), max_tokens=40, arrival=number) for number in range(4)]
    receive(driver, *streams)
    preempted: list[tuple[Sequence, ...]] = []
    while plan := driver.step():
        if plan.preempted:
            preempted.append(plan.preempted)
    # All four need a third page in one step; one victim gives two, and the third in line gets none: it is next to go.
    assert preempted[0] == (streams[3],)
    assert all(len(victims) == 1 for victims in preempted)
    for one in streams:
        driver.check_golden(one)
        assert one.num_preemptions <= 4
    assert streams[0].num_preemptions == 0
    driver.check_idle()


def test_page_shortage_with_late_frees_preempts_no_more_and_goes_on() -> None:
    driver = decode(num_pages=16, headroom_pages=0)
    streams = [sequence(prompt(28, number), max_tokens=60, arrival=number) for number in range(8)]
    receive(driver, *streams)
    held: list[int] = []
    num_emitted, num_victims = [], []
    for number in range(2000):
        pages = [page for one in streams for page in one.pages] if number % 3 else []
        late, held = held, hold(driver.pool, pages)  # type: ignore[arg-type]
        driver.pool.release(late)  # type: ignore[arg-type]
        plan = driver.step()
        num_emitted.append(sum(map(len, driver.outputs.values())))
        if plan is not None and plan.preempted:
            num_victims.append(len(plan.preempted))
        if len(driver.ended) == 8:
            break
    driver.pool.release(held)  # type: ignore[arg-type]
    assert num_victims[0] == 3  # of two pages each, for the other five's need
    assert max(num_victims) == 3
    assert all(later > earlier for earlier, later in pairwise(num_emitted[::20]))
    for one in streams:
        driver.check_golden(one)
        assert one.num_preemptions <= 4
    driver.check_idle()


def test_pages_that_copies_hold_are_not_preempted_for() -> None:
    driver = decode(num_pages=4, headroom_pages=0)
    streams = [sequence(prompt(32, number), max_tokens=20, arrival=number) for number in range(2)]
    receive(driver, *streams)
    held = hold(driver.pool, streams[1].pages)
    assert driver.step() is None
    assert streams[1].num_preemptions == 0
    assert driver.scheduler.next_wakeup(0.0) == RETRY_S
    driver.pool.release(held)
    driver.run()
    for one in streams:
        driver.check_golden(one)
    driver.check_idle()


def test_preempted_twice_the_output_is_the_same_and_stays_output() -> None:
    driver = decode(num_pages=10, headroom_pages=0)
    victim = sequence(prompt(40, 1), max_tokens=80, arrival=5.0)
    receive(driver, victim)
    for position, number in ((40, 2), (60, 3)):
        while len(driver.outputs[victim]) < position:
            driver.step()
        urgent = sequence(prompt(100, number), max_tokens=2, priority=-1)
        driver.add(urgent)
        driver.step()
        assert (victim.status, victim.num_computed) == (SequenceStatus.WAITING, 0)
        assert victim.output_ids == driver.outputs[victim]
        while victim.status is not SequenceStatus.RUNNING:
            driver.step()
    driver.run()
    assert victim.num_preemptions == 2
    assert driver.outputs[victim] == golden(victim.work)
    driver.check_idle()


def test_recomputing_reuses_what_is_still_cached_but_counts_no_hit() -> None:
    driver = decode(num_pages=20, max_num_seqs=1)
    victim = sequence(prompt(40, 1), max_tokens=30, priority=1)
    receive(driver, victim)
    for _ in range(10):
        driver.step()
    driver.add(sequence(prompt(20, 2), max_tokens=1))
    driver.step()
    assert victim.num_preemptions == 1
    plan = driver.step()
    assert plan is not None
    assert (plan.chunks[0].sequence, plan.chunks[0].start) == (victim, 48)
    assert victim.num_cached == 0
    driver.run()
    driver.check_golden(victim)


def test_urgent_work_takes_a_slot_from_the_lowest_and_equals_never_swap() -> None:
    for pushed in (False, True):
        driver = decode(num_pages=640, max_num_seqs=4)
        streams = [sequence(prompt(20, number), max_tokens=200, priority=5, arrival=number) for number in range(4)]
        receive(driver, *streams)
        driver.step()
        equal = sequence(prompt(20, 8), max_tokens=5, priority=5, arrival=8.0)
        assert not reserve(driver, equal)
        urgent = sequence(prompt(20, 9), max_tokens=5, priority=0, arrival=9.0)
        if pushed:
            receive(driver, urgent)
        else:
            driver.add(urgent)
        plan = driver.step()
        assert plan is not None
        assert plan.preempted == (streams[3],)
        assert urgent in stepped(plan)
        driver.add(equal)
        driver.run()
        assert [one.num_preemptions for one in (*streams, urgent, equal)] == [0, 0, 0, 1, 0, 0]
        assert list(driver.ended).index(streams[3]) < list(driver.ended).index(equal)
        for one in (*streams, urgent, equal):
            driver.check_golden(one)
        driver.check_idle()


def test_urgent_work_takes_pages_only_where_they_are_enough() -> None:
    driver = decode(num_pages=10, headroom_pages=0)
    streams = [
        sequence(prompt(45, 1), max_tokens=4, priority=0),
        sequence(prompt(45, 2), max_tokens=4, priority=2),
        sequence(prompt(45, 3), max_tokens=4, priority=2),
    ]
    receive(driver, *streams)
    assert not reserve(driver, sequence(prompt(130, 4), max_tokens=1, priority=1))
    assert [one.num_preemptions for one in streams] == [0, 0, 0]
    urgent = sequence(prompt(60, 5), max_tokens=1, priority=1)
    assert reserve(driver, urgent)
    assert [one.num_preemptions for one in streams] == [0, 0, 1]
    assert driver.pool.num_reserved == 4
    driver.receive(urgent)
    driver.run()
    driver.check_idle()


def test_urgent_work_spares_the_better_where_one_victim_is_enough() -> None:
    driver = decode(num_pages=5, headroom_pages=0)
    small = sequence(prompt(10, 1), max_tokens=2, priority=3)
    large = sequence(prompt(60, 2), max_tokens=2, priority=2)
    receive(driver, small, large)
    assert reserve(driver, sequence(prompt(50, 3), priority=1))
    assert (small.num_preemptions, large.num_preemptions) == (0, 1)


def test_pages_that_urgent_work_shares_with_its_victim_give_no_room() -> None:
    driver = decode(num_pages=4, headroom_pages=0)
    victim, other = sequence(prompt(40, 1), max_tokens=2, priority=2), sequence(prompt(10, 2), max_tokens=2)
    receive(driver, victim, other)
    urgent = sequence(prompt(32, 1) + prompt(30, 3), priority=1)
    assert not reserve(driver, urgent), "two more pages are needed, and the victim's own is one"
    driver.scheduler.abort(other)
    assert reserve(driver, urgent)
    assert (urgent.num_cached, victim.num_preemptions) == (32, 1)


def test_urgent_work_leaves_no_margin_while_lower_priorities_go_first() -> None:
    driver = decode(num_pages=8)
    best, low = sequence(prompt(32, 1), max_tokens=60), sequence(prompt(16, 2), max_tokens=60, priority=2)
    receive(driver, best, low)
    for _ in range(17):
        driver.step()
    assert (len(best.pages), len(low.pages), driver.pool.num_available) == (4, 3, 1)
    urgent = sequence(prompt(10, 3), priority=1)
    assert reserve(driver, urgent)
    assert low.num_preemptions == 0


def test_the_margin_doubles_with_each_preemption_up_to_what_the_others_may_need() -> None:
    pool = PagePool(100)
    tables, running = PageTables(pool, layout(), prefix_cache=False), SequenceQueue()
    for number, max_tokens in enumerate((1000, 33, 1)):
        one = sequence(prompt(16, number), max_tokens=max_tokens)
        tables.take(one, tables.claim(one))
        running.add(one, running_order(one))
    later = sequence(prompt(16, 9), arrival=1.0)
    margins = []
    for later.num_preemptions in range(5):
        margins.append([margin(later, running, tables, headroom) for headroom in (0, 1, 2)])
    assert margins == [[0, 2, 4], [4, 4, 6], [6, 6, 10], [10, 10, 18], [18, 18, 34]]


def test_slots_of_those_that_wait_are_not_given_to_reservations() -> None:
    driver = decode(max_num_seqs=2)
    driver.add(sequence(prompt(20, 1), max_tokens=2))
    assert reserve(driver, sequence(prompt(20, 2), max_tokens=2, arrival=1.0))
    assert not reserve(driver, sequence(prompt(20, 3), max_tokens=2, arrival=2.0))


def test_a_prompt_takes_no_pages_before_the_step_s_tokens_reach_it() -> None:
    driver = decode(local_chunk_tokens=32)
    first, second = sequence(prompt(100, 1)), sequence(prompt(100, 2), arrival=1.0)
    driver.add(first, second)
    for status in [SequenceStatus.WAITING] * 3 + [SequenceStatus.RUNNING]:
        driver.step()
        assert second.status is status
    driver.run()
    driver.check_idle()


def test_nobody_is_preempted_for_a_reservation_during_a_step() -> None:
    driver = decode(max_num_seqs=1)
    low, urgent = sequence(prompt(20, 1), max_tokens=5, priority=1), sequence(prompt(20, 2), max_tokens=5)
    receive(driver, low)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    result = driver.model.run(plan)
    assert not reserve(driver, urgent)
    driver.record(driver.scheduler.apply(plan, result, 0.0))
    assert reserve(driver, urgent)
    assert low.num_preemptions == 1


def test_reservations_wait_behind_the_preempted() -> None:
    driver = decode(num_pages=7, headroom_pages=0)
    first, second = (sequence(prompt(45, number), max_tokens=40, arrival=number) for number in (1, 2))
    receive(driver, first, second)
    while not second.num_preemptions:
        driver.step()
    assert driver.pool.num_available >= 2
    assert not reserve(driver, sequence(prompt(5, 3), max_tokens=2, arrival=3.0))
    assert reserve(driver, sequence(prompt(5, 4), max_tokens=2, arrival=4.0, priority=-1))


def test_reservations_wait_behind_the_preempted_even_before_the_next_step() -> None:
    driver = decode(num_pages=6, headroom_pages=0)
    victim = sequence(prompt(45, 1), max_tokens=2, priority=1)
    receive(driver, victim)
    urgent = sequence(prompt(60, 2), max_tokens=2, arrival=1.0)
    assert reserve(driver, urgent)
    driver.scheduler.abort(urgent)
    assert not reserve(driver, sequence(prompt(5, 3), max_tokens=2, arrival=2.0, priority=1))
    driver.run()
    driver.check_golden(victim)


def test_reservations_wait_behind_local_work_that_found_no_room() -> None:
    driver = decode(num_pages=5, headroom_pages=0)
    stream, local = sequence(prompt(40, 1), max_tokens=5), sequence(prompt(60, 2), max_tokens=1, arrival=1.0)
    receive(driver, stream)
    driver.add(local)
    driver.step()
    newcomer = sequence(prompt(5, 3), max_tokens=2, arrival=2.0)
    assert not reserve(driver, newcomer)
    driver.scheduler.abort(local)
    assert reserve(driver, newcomer)


def test_a_shared_prefix_survives_a_flood_and_a_preemption() -> None:
    driver = decode(num_pages=40, local_chunk_tokens=64, headroom_pages=0)
    shared = prompt(160, 1)
    driver.add(sequence(shared, max_tokens=1))
    driver.run()
    reuser = sequence(shared + prompt(100, 2), max_tokens=100, priority=1)
    driver.add(reuser)
    driver.step()
    assert reuser.num_cached == 160
    for number in range(100):
        driver.add(sequence(prompt(48, 10 + number), max_tokens=3, priority=number % 3, arrival=number))
        driver.step()
        if number == 50:
            driver.add(sequence(prompt(500, 200), max_tokens=1, priority=-1))
    driver.run()
    assert reuser.num_preemptions >= 1
    assert len(driver.ended) == 103
    for one in driver.ended:
        driver.check_golden(one)
    driver.check_idle()


def test_equal_prompts_share_pages_and_still_make_progress_in_a_full_pool() -> None:
    driver = decode(num_pages=6, headroom_pages=0)
    twins = [sequence(prompt(40), max_tokens=50, arrival=number) for number in range(3)]
    driver.add(*twins)
    driver.run()
    for one in twins:
        driver.check_golden(one)
    driver.check_idle()


def test_an_abort_frees_all_in_every_state_and_can_be_repeated() -> None:
    driver = decode(max_num_seqs=2, local_chunk_tokens=16)
    receiving, running = sequence(prompt(40, 1), max_tokens=9), sequence(prompt(40, 2), max_tokens=9)
    waiting = sequence(prompt(40, 3), max_tokens=9)
    assert reserve(driver, receiving)
    receive(driver, running)
    driver.add(waiting)
    driver.step()
    statuses = [one.status for one in (receiving, running, waiting)]
    assert statuses == [SequenceStatus.RECEIVING, SequenceStatus.RUNNING, SequenceStatus.WAITING]
    for one in (receiving, running, waiting) * 2:
        driver.scheduler.abort(one)
    driver.check_idle()


def test_reserved_pages_stay_reserved_until_the_copy_into_them_ends() -> None:
    driver = decode()
    one = sequence(prompt(40), max_tokens=9)
    assert reserve(driver, one)
    copied = hold(driver.pool, one.pages[:2])
    driver.scheduler.abort(one)
    assert {driver.pool.state(page) for page in copied} == {PageState.RESERVED}
    driver.pool.release(copied)
    driver.check_idle()


def test_an_abort_during_a_step_frees_the_pages_when_the_step_ends() -> None:
    driver = decode()
    one, other = sequence(prompt(20, 1), max_tokens=5), sequence(prompt(20, 2), max_tokens=5)
    receive(driver, one, other)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    pages, result = list(one.pages), driver.model.run(plan)
    driver.scheduler.abort(one)
    assert {driver.pool.state(page) for page in pages} == {PageState.RESIDENT}
    driver.record(driver.scheduler.apply(plan, result, 0.0))
    assert {driver.pool.ref_count(page) for page in pages} == {0}
    assert len(driver.outputs[one]) == 1
    driver.run()
    driver.check_golden(other)
    driver.check_idle()


def test_a_deadline_ends_it_in_every_state_without_new_work() -> None:
    driver = decode(max_num_seqs=2)
    receiving = sequence(prompt(40, 1), max_tokens=9, deadline=3.0)
    running = sequence(prompt(40, 2), max_tokens=9, deadline=2.0)
    waiting = sequence(prompt(40, 3), max_tokens=9, deadline=1.0)
    assert reserve(driver, receiving)
    receive(driver, running)
    driver.add(waiting)
    driver.step()
    for now, one in ((1.0, waiting), (2.0, running), (3.0, receiving)):
        (ended,) = driver.scheduler.expire(now)
        assert (ended.sequence, ended.failure) == (one, "deadline")
        driver.end(ended)
    assert waiting.num_steps == 0
    driver.check_idle()


def test_the_next_deadline_of_a_receiving_one_wakes() -> None:
    driver = decode()
    assert reserve(driver, sequence(prompt(40), max_tokens=9, deadline=2.5))
    assert driver.scheduler.next_wakeup(1.0) == 1.5


def test_many_finished_sequences_with_far_deadlines_are_not_kept() -> None:
    driver = decode()
    for number in range(1000):
        one = sequence(prompt(4, number), deadline=1e9)
        driver.add(one)
        driver.scheduler.abort(one)
    assert len(driver.scheduler._deadlines._heap) <= 64
    assert driver.scheduler.next_wakeup(0.0) is None


def test_a_token_that_cannot_be_drawn_fails_its_own_sequence_alone() -> None:
    driver = decode()
    bad, good = sequence(prompt(20, 1), max_tokens=5), sequence(prompt(20, 2), max_tokens=5)
    receive(driver, bad, good)
    driver.model.failing.add(bad)
    driver.run()
    assert driver.ended[bad].failure == "logits are not numbers"
    assert len(driver.outputs[bad]) == 1
    driver.check_golden(good)
    driver.check_idle()


def test_a_stop_token_ends_it_with_its_reason() -> None:
    driver = decode()
    one = sequence(prompt(20), max_tokens=50)
    expected = golden(one.work)
    stop = type(one.work.stop)(50, min_tokens=8, stop_token_ids=frozenset({expected[3], expected[9]}))
    one.work = type(one.work)("stops", one.work.prompt_ids, one.work.sampling, stop)
    receive(driver, one)
    driver.run()
    assert driver.outputs[one] == expected[:10]
    assert driver.ended[one].reason is FinishReason.STOP


def test_activating_what_is_not_reserved_is_our_own_mistake() -> None:
    driver = decode()
    assert isinstance(driver.scheduler, DecodeScheduler)
    with pytest.raises(AssertionError, match="WAITING cannot be activated"):
        driver.scheduler.activate(sequence(prompt(5)), SampledToken(1), 0.0)
