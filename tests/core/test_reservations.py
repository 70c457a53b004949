"""What a reservation takes, when there is none, and what becomes of received pages."""

import pytest
from scheduling import decode, hold, prompt, receive, reserve, sequence

from pageferry.core.claims import held_places
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.plan import SampledToken
from pageferry.core.pool import PageState
from pageferry.core.sequence import FinishReason, SequenceStatus


def test_received_pages_decode_from_the_sender_s_token_on() -> None:
    driver = decode()
    one = sequence(prompt(40), max_tokens=30)
    assert reserve(driver, one)
    assert (one.status, len(one.tables[0]), driver.pool.num_reserved) == (SequenceStatus.RECEIVING, 4, 4)
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
@pytest.mark.field("sgl-project/sglang#27004")
def test_pages_reserved_are_those_of_the_prompt_cached_or_not(num_tokens: int, with_first: bool) -> None:
    driver = decode(headroom_pages=0)
    for attempt in range(2):
        one = sequence(prompt(num_tokens), max_tokens=20)
        assert reserve(driver, one)
        assert len(one.tables[0]) == -(-num_tokens // 16)
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
    assert (len(long.tables[0]), len(short.tables[0])) == (5, 2)


def test_the_first_token_may_end_it_at_once() -> None:
    driver = decode()
    one = sequence(prompt(20), max_tokens=1)
    receive(driver, one)
    assert driver.ended[one].reason is FinishReason.LENGTH
    driver.check_golden(one)
    driver.check_idle()


def test_a_reservation_without_room_changes_nothing() -> None:
    driver = decode(num_pages=6, max_num_seqs=2)
    first = sequence(prompt(40, 1), max_tokens=20)
    assert reserve(driver, first)
    assert len(first.tables[0]) == 4
    large, small, third = (sequence(prompt(size, size), max_tokens=2) for size in (40, 20, 1))
    for _ in range(2):
        assert not reserve(driver, large)
        assert (large.tables, large.status, driver.pool.num_available) == ([], SequenceStatus.WAITING, 2)
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
    assert len(stream.tables[0]) == 4
    newcomer = sequence(prompt(64, 2), max_tokens=1)
    assert not reserve(driver, newcomer)
    small = sequence(prompt(48, 3), max_tokens=1)
    assert reserve(driver, small)
    driver.receive(small)
    driver.run()
    assert stream.num_preemptions == 0


def test_slots_of_those_that_wait_are_not_given_to_reservations() -> None:
    driver = decode(max_num_seqs=2)
    driver.add(sequence(prompt(20, 1), max_tokens=2))
    assert reserve(driver, sequence(prompt(20, 2), max_tokens=2, arrival=1.0))
    assert not reserve(driver, sequence(prompt(20, 3), max_tokens=2, arrival=2.0))


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


def test_reserved_pages_stay_reserved_until_the_copy_into_them_ends() -> None:
    driver = decode()
    one = sequence(prompt(40), max_tokens=9)
    assert reserve(driver, one)
    copied = hold(driver.pools, held_places(one)[:2])
    driver.scheduler.abort(one)
    assert {driver.pool.state(place.page) for place in copied} == {PageState.RESERVED}
    driver.pools.release(copied)
    driver.check_idle()


def test_activating_what_is_not_reserved_is_our_own_mistake() -> None:
    driver = decode()
    assert isinstance(driver.scheduler, DecodeScheduler)
    with pytest.raises(AssertionError, match="WAITING cannot be activated"):
        driver.scheduler.activate(sequence(prompt(5)), SampledToken(1), 0.0)
