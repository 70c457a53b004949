"""Who gives up pages and slots to whom, and that the output stays the same."""

from itertools import pairwise

import pytest
from chain_model import golden
from scheduling import decode, hold, layout, prompt, receive, reserve, sequence, stepped

from pageferry.core.claims import held_places
from pageferry.core.layout import Place
from pageferry.core.page_tables import PageTables
from pageferry.core.pools import PagePools
from pageferry.core.preemption import margin, running_order
from pageferry.core.sequence import Sequence, SequenceStatus
from pageferry.core.sequence_queues import RETRY_S, SequenceQueue


@pytest.mark.field("vllm-project/vllm#49674", "vllm-project/vllm-ascend#16315")
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


@pytest.mark.field("vllm-project/vllm#49674", "vllm-project/vllm-ascend#16315")
def test_page_shortage_with_late_frees_preempts_no_more_and_goes_on() -> None:
    driver = decode(num_pages=16, headroom_pages=0)
    streams = [sequence(prompt(28, number), max_tokens=60, arrival=number) for number in range(8)]
    receive(driver, *streams)
    held: list[Place] = []
    num_emitted, num_victims = [], []
    for number in range(2000):
        pages = [place for one in streams for place in held_places(one)] if number % 3 else []
        late, held = held, hold(driver.pools, pages)
        driver.pools.release(late)
        plan = driver.step()
        num_emitted.append(sum(map(len, driver.outputs.values())))
        if plan is not None and plan.preempted:
            num_victims.append(len(plan.preempted))
        if len(driver.ended) == 8:
            break
    driver.pools.release(held)
    assert num_victims[0] == 3  # of two pages each, for the other five's need
    assert max(num_victims) == 3
    assert all(later > earlier for earlier, later in pairwise(num_emitted[::20]))
    for one in streams:
        driver.check_golden(one)
        assert one.num_preemptions <= 4
    driver.check_idle()


@pytest.mark.field("vllm-project/vllm#49674", "vllm-project/vllm-ascend#16315")
def test_pages_that_copies_hold_are_not_preempted_for() -> None:
    driver = decode(num_pages=4, headroom_pages=0)
    streams = [sequence(prompt(32, number), max_tokens=20, arrival=number) for number in range(2)]
    receive(driver, *streams)
    held = hold(driver.pools, held_places(streams[1]))
    assert driver.step() is None
    assert streams[1].num_preemptions == 0
    assert driver.scheduler.next_wakeup(0.0) == RETRY_S
    driver.pools.release(held)
    driver.run()
    for one in streams:
        driver.check_golden(one)
    driver.check_idle()


@pytest.mark.field("vllm-project/vllm-gaudi#524", "LMCache/LMCache#1361")
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


@pytest.mark.field("vllm-project/vllm#25780")
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


@pytest.mark.field("vllm-project/vllm#45561", "vllm-project/vllm#40004", "vllm-project/vllm#54530")
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
    assert (len(best.tables[0]), len(low.tables[0]), driver.pool.num_available) == (4, 3, 1)
    urgent = sequence(prompt(10, 3), priority=1)
    assert reserve(driver, urgent)
    assert low.num_preemptions == 0


def test_the_margin_doubles_with_each_preemption_up_to_what_the_others_may_need() -> None:
    tables = PageTables(PagePools(layout(), [100]), layout(), prefix_cache=False, chunk_tokens=64)
    running = SequenceQueue()
    for number, max_tokens in enumerate((1000, 33, 1)):
        one = sequence(prompt(16, number), max_tokens=max_tokens)
        tables.take(one, tables.claims.to_compute(one, 16))
        running.add(one, running_order(one))
    later = sequence(prompt(16, 9), arrival=1.0)
    margins = []
    for later.num_preemptions in range(5):
        margins.append([margin(later, running, tables, headroom) for headroom in (0, 1, 2)])
    assert margins == [[0, 2, 4], [4, 4, 6], [6, 6, 10], [10, 10, 18], [18, 18, 34]]


@pytest.mark.field("sgl-project/mini-sglang#52", "Avarok-Cybersecurity/atlas#158", "Avarok-Cybersecurity/atlas#373")
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
