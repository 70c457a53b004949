"""Which prompts share a prefill step, in which order, and where chunks end."""

import pytest
from scheduling import prefill, prompt, sequence, shares

from pageferry.core.plan import Plan


def test_the_shortest_goes_first_and_the_budget_is_shared() -> None:
    driver = prefill(chunk_tokens=64)
    long, short, middle = sequence(prompt(100, 1)), sequence(prompt(20, 2)), sequence(prompt(40, 3))
    driver.add(long, short, middle)
    # 64 - 20 - 40 leaves 4 tokens, less than a page: the long one starts with the next step.
    assert shares(driver.step()) == [(short, 0, 20), (middle, 0, 40)]
    assert shares(driver.step()) == [(long, 0, 64)]
    driver.run()
    driver.check_idle()


def test_a_lower_priority_number_goes_before_a_shorter_prompt() -> None:
    driver = prefill(chunk_tokens=32)
    short, urgent = sequence(prompt(16, 1), priority=1), sequence(prompt(64, 2), priority=0)
    driver.add(short, urgent)
    assert [shares(driver.step())[0][0] for _ in range(3)] == [urgent, urgent, short]


def test_a_long_prompt_gives_way_to_an_urgent_one_at_its_next_chunk_and_adds_nothing_to_its_step() -> None:
    driver = prefill(chunk_tokens=64)
    flood = [sequence(prompt(160, number), priority=100) for number in (1, 2)]
    driver.add(*flood)
    assert shares(driver.step()) == [(flood[0], 0, 64)]
    urgent, other = sequence(prompt(20, 3)), sequence(prompt(16, 4))
    driver.add(urgent, other)
    loads = driver.scheduler.prompts_by_priority
    assert loads == {0: (2, 36), 100: (1, 256)}
    assert list(loads) == [0, 100]
    assert shares(driver.step()) == [(other, 0, 16), (urgent, 0, 20)]
    assert shares(driver.step()) == [(flood[0], 64, 64)]
    driver.run()
    driver.check_idle()
    assert driver.scheduler.prompts_by_priority == {}


@pytest.mark.field("sgl-project/sglang#32549", "ROCm/ATOM#1835", "sgl-project/sglang#34623")
def test_a_short_prompt_overtakes_a_huge_one_within_a_chunk() -> None:
    driver = prefill(num_pages=2100, chunk_tokens=256)
    huge = sequence(prompt(32_768, 1), arrival=0.0)
    driver.add(huge)
    driver.step(0.05)
    driver.step(0.05)
    short = sequence(prompt(64, 2), arrival=0.1)
    driver.add(short)
    driver.step(0.05)
    driver.check_golden(short)
    driver.run()
    driver.check_golden(huge)
    assert len(driver.plans) <= 32_768 // 256 + 2


def test_waiting_makes_up_for_length() -> None:
    driver = prefill(chunk_tokens=64, ageing_tokens_per_s=100, num_pages=1000)
    long = sequence(prompt(640, 1), arrival=0.0)
    driver.add(long)
    started = None
    for number in range(2, 40):  # a stream of short prompts that takes all of the worker's time
        driver.add(sequence(prompt(64, number), arrival=driver.now))
        plan = driver.step(1.0)
        if started is None and any(one is long for one, _, _ in shares(plan)):
            started = driver.now
    assert started is not None
    assert started <= 640 / 100 + 1
    assert long in driver.ended


def test_a_chunk_ends_with_a_page_unless_the_budget_is_smaller() -> None:
    assert [plan.chunks[0].num_tokens for plan in _plans(chunk_tokens=40, num_tokens=90)] == [32, 32, 26]
    assert [plan.chunks[0].num_tokens for plan in _plans(chunk_tokens=10, num_tokens=35)] == [10, 6, 10, 9]


def _plans(chunk_tokens: int, num_tokens: int) -> list[Plan]:
    driver = prefill(chunk_tokens=chunk_tokens)
    driver.add(sequence(prompt(num_tokens)))
    driver.run()
    return driver.plans


def test_no_more_than_max_num_seqs_are_in_flight() -> None:
    driver = prefill(max_num_seqs=2, chunk_tokens=1024)
    driver.add(*(sequence(prompt(10, number)) for number in range(5)))
    driver.run()
    assert [len(plan.chunks) for plan in driver.plans] == [2, 2, 1]


def test_the_batch_window_waits_for_company_only_while_some_could_join() -> None:
    driver = prefill(batch_window_ms=10, chunk_tokens=64, max_num_seqs=3)
    driver.add(sequence(prompt(20, 1)))
    assert driver.step() is None
    assert driver.scheduler.next_wakeup(0.004) == pytest.approx(0.006)
    driver.now = 0.004
    driver.add(sequence(prompt(20, 2)))
    assert driver.step() is None
    assert len(shares(driver.step(0.006))) == 2  # the window counts from the first

    driver.add(sequence(prompt(64, 3)))
    assert len(shares(driver.step())) == 1  # the budget is full
    driver.add(*(sequence(prompt(5, 10 + number)) for number in range(3)))
    assert len(shares(driver.step())) == 3  # all slots are
    driver.check_idle()


def test_the_batch_window_delays_no_prompt_under_way() -> None:
    driver = prefill(batch_window_ms=10, chunk_tokens=32)
    driver.add(sequence(prompt(64, 1)))
    assert driver.step() is not None
    driver.add(sequence(prompt(5, 2)))
    assert len(shares(driver.step())) == 2
    driver.run()
    driver.check_idle()


def test_the_batch_window_is_not_waited_for_while_pages_are_lacking() -> None:
    driver = prefill(num_pages=2, batch_window_ms=10, chunk_tokens=64)
    driver.add(sequence(prompt(20)))
    assert len(shares(driver.step())) == 1
