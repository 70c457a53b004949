"""A prefill worker's steps: chunks, pages, the prefix cache, refusals, and how sequences end."""

import pytest
from scheduling import hold, prefill, prompt, sequence, shares

from pageferry.core.claims import held_places
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.pool import PageState
from pageferry.core.sequence import FinishReason, Sequence, SequenceStatus
from pageferry.core.sequence_queues import RETRY_S


def test_a_prompt_is_computed_in_chunks_and_ends_with_its_first_token() -> None:
    driver = prefill(chunk_tokens=32)
    one = sequence(prompt(70), max_tokens=5)
    driver.add(one)
    assert driver.scheduler.queued_prompt_tokens == 70
    driver.run()
    assert [(plan.chunks[0].start, plan.chunks[0].num_tokens) for plan in driver.plans] == [(0, 32), (32, 32), (64, 6)]
    assert len(driver.outputs[one]) == 1
    assert driver.ended[one].reason is None
    assert (one.num_steps, one.first_scheduled, one.first_token_time) == (3, 0.0, 0.0)
    driver.check_idle()


def test_one_token_asked_for_ends_with_a_reason() -> None:
    driver = prefill()
    one = sequence(prompt(5), max_tokens=1)
    driver.add(one)
    driver.run()
    assert driver.ended[one].reason is FinishReason.LENGTH
    driver.check_golden(one)


def test_tokens_already_emitted_are_part_of_the_prompt() -> None:
    driver = prefill()
    forced = (11, 12, 13)
    one = sequence(prompt(20), max_tokens=4, output_ids=forced)
    driver.add(one)
    driver.run()
    assert driver.plans[0].num_tokens == 23
    assert driver.ended[one].reason is FinishReason.LENGTH
    driver.check_golden(one)


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 127, 128])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.field("sgl-project/sglang#27004")
def test_pages_taken_are_those_of_the_prompt(num_tokens: int, cached: bool) -> None:
    driver = prefill()
    for _ in range(1 + cached):
        one = sequence(prompt(num_tokens), max_tokens=2)
        driver.add(one)
        plan = driver.scheduler.schedule(0.0)
        assert plan is not None
        assert len(one.tables[0]) == -(-num_tokens // 16)
        driver.record(driver.scheduler.apply(plan, driver.model.run(plan), 0.0))
    assert one.num_cached == ((num_tokens - 1) // 16 * 16 if num_tokens % 16 else num_tokens - 1) * cached
    driver.check_idle()


@pytest.mark.field("vllm-project/vllm#11186", "vllm-project/vllm#17999")
def test_a_fully_cached_prompt_recomputes_its_last_token_on_a_copy() -> None:
    driver = prefill()
    first, again, longer = sequence(prompt(64)), sequence(prompt(64)), sequence(prompt(80))
    for one in (first, again, longer):
        driver.add(one)
        driver.run()
        driver.check_golden(one)
    assert (first.num_cached, again.num_cached, longer.num_cached) == (0, 63, 64)
    assert shares(driver.plans[1]) == [(again, 63, 1)]
    assert len(driver.plans[1].copies) == 1
    assert driver.plans[1].fresh == ()
    assert shares(driver.plans[2]) == [(longer, 64, 16)]
    driver.check_idle()


def test_a_fully_cached_prompt_that_fills_the_pool_recomputes_its_last_page() -> None:
    driver = prefill(num_pages=4)
    for num_cached in (0, 48):
        one = sequence(prompt(64))
        driver.add(one)
        driver.run()
        assert one.num_cached == num_cached
        driver.check_golden(one)
    driver.check_idle()


def test_the_source_of_a_copy_is_not_evicted_in_the_same_step() -> None:
    driver = prefill(num_pages=6)
    driver.add(sequence(prompt(64, 1)))
    driver.run()
    again, other = sequence(prompt(64, 1)), sequence(prompt(32, 2))
    driver.add(again, other)
    assert shares(driver.step()) == [(again, 63, 1)]
    assert shares(driver.step()) == [(other, 0, 32)]
    driver.check_golden(again)
    driver.check_golden(other)
    driver.check_idle()


def test_without_a_prefix_cache_nothing_is_found_or_stored() -> None:
    driver = prefill(prefix_cache=False)
    for _ in range(2):
        one = sequence(prompt(64))
        driver.add(one)
        driver.run()
        assert one.num_cached == 0
    assert driver.pool.num_cached == 0


@pytest.mark.field("vllm-project/vllm#16016")
def test_another_salt_finds_nothing() -> None:
    driver = prefill()
    one, other = sequence(prompt(64)), sequence(prompt(64))
    other.work = type(other.work)(**{**_fields(other), "cache_salt": "tenant"})
    for each in (one, other):
        driver.add(each)
        driver.run()
    assert other.num_cached == 0


def _fields(one: Sequence) -> dict[str, object]:
    return {name: getattr(one.work, name) for name in one.work.__dataclass_fields__}


@pytest.mark.field("vllm-project/vllm#35541", "vllm-project/vllm#39734", "RBLN-SW/vllm-rbln#957")
def test_an_impossible_prompt_is_refused_at_once_and_holds_nobody_up() -> None:
    usable = 50 * 16
    for num_tokens in (usable - 1, usable, usable + 1, 1002):
        driver = prefill(num_pages=50)
        large, small = sequence(prompt(num_tokens, 1)), sequence(prompt(5, 2))
        if num_tokens > usable:
            with pytest.raises(InvalidArgumentError, match=rf"{num_tokens} tokens.* 50,.* {usable} tokens"):
                driver.add(large)
        else:
            driver.add(large)
        driver.add(small)
        driver.run()
        driver.check_golden(small)
        assert (large in driver.ended) == (num_tokens <= usable)
        driver.check_idle()


def test_a_full_queue_refuses_and_says_when_to_return() -> None:
    driver = prefill(max_waiting=2)
    driver.add(sequence(prompt(5, 1)), sequence(prompt(5, 2)))
    with pytest.raises(ResourceExhaustedError, match="max_waiting is 2") as refusal:
        driver.add(sequence(prompt(5, 3)))
    assert refusal.value.retry_after_ms
    driver.run()
    driver.check_idle()


def test_pages_that_a_transfer_holds_are_waited_for() -> None:
    driver = prefill(num_pages=4)
    first, second = sequence(prompt(64, 1)), sequence(prompt(64, 2))
    driver.add(first)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    held = hold(driver.pools, held_places(first))
    driver.record(driver.scheduler.apply(plan, driver.model.run(plan), 0.0))
    driver.add(second)
    assert driver.scheduler.next_wakeup(0.0) == 0.0
    assert driver.step() is None
    assert driver.scheduler.next_wakeup(0.0) == RETRY_S
    driver.pools.release(held)
    driver.run()
    driver.check_golden(second)
    driver.check_idle()


def test_an_abort_frees_all_in_every_state_and_can_be_repeated() -> None:
    driver = prefill(chunk_tokens=32, max_num_seqs=1)
    running, waiting = sequence(prompt(96, 1)), sequence(prompt(96, 2), arrival=1.0)
    driver.add(running, waiting)
    driver.step()
    assert (running.status, waiting.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    for one in (running, waiting, running, waiting):
        driver.scheduler.abort(one)
    driver.check_idle()


def test_an_abort_during_a_step_frees_the_pages_when_the_step_ends() -> None:
    driver = prefill()
    one, other = sequence(prompt(40, 1)), sequence(prompt(40, 2))
    driver.add(one, other)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    pages, result = list(one.tables[0]), driver.model.run(plan)
    driver.scheduler.abort(one)
    assert {driver.pool.state(page) for page in pages} == {PageState.RESIDENT}
    driver.record(driver.scheduler.apply(plan, result, 0.0))
    assert one not in driver.outputs
    driver.check_golden(other)
    driver.check_idle()


def test_a_deadline_ends_what_waits_and_what_runs_without_new_work() -> None:
    driver = prefill(chunk_tokens=32, max_num_seqs=1)
    running = sequence(prompt(96, 1), deadline=2.0)
    waiting = sequence(prompt(97, 2), deadline=0.5)
    finished = sequence(prompt(5, 3), deadline=0.1)
    driver.add(finished)
    driver.run()
    driver.add(running, waiting)
    driver.step()
    assert driver.scheduler.expire(0.4) == ()
    assert [ended.sequence for ended in driver.scheduler.expire(0.5)] == [waiting]
    (ended,) = driver.scheduler.expire(2.0)
    assert (ended.sequence, ended.failure, ended.reason) == (running, "deadline", None)
    assert waiting.num_steps == 0
    driver.check_idle()


def test_the_next_deadline_wakes_a_blocked_worker() -> None:
    driver = prefill(num_pages=1)
    held = driver.pool.allocate(1)
    assert held is not None
    driver.add(sequence(prompt(5), deadline=0.004))
    assert driver.step() is None
    assert driver.scheduler.next_wakeup(0.0) == 0.004
    assert len(driver.scheduler.expire(0.004)) == 1
    assert driver.scheduler.next_wakeup(0.004) is None


def test_a_token_that_cannot_be_drawn_fails_its_own_sequence_alone() -> None:
    driver = prefill()
    bad, good = sequence(prompt(20, 1)), sequence(prompt(20, 2))
    driver.model.failing.add(bad)
    driver.add(bad, good)
    driver.run()
    assert driver.ended[bad].failure == "logits are not numbers"
    assert bad not in driver.outputs
    driver.check_golden(good)
    driver.check_idle()


@pytest.mark.field("sgl-project/mini-sglang#52", "Avarok-Cybersecurity/atlas#158", "Avarok-Cybersecurity/atlas#373")
def test_a_flood_evicts_no_page_of_a_prefix_in_use() -> None:
    driver = prefill(num_pages=40, chunk_tokens=32)
    shared = prompt(160, 1)
    driver.add(sequence(shared))
    driver.run()
    reuser = sequence(shared + prompt(200, 2), arrival=0.0)
    driver.add(reuser)
    driver.step()
    assert reuser.num_cached == 160
    for number in range(100):
        driver.add(sequence(prompt(48, 10 + number), arrival=0.0))
        driver.step()
    driver.run()
    driver.check_golden(reuser)
    assert len(driver.ended) == 102
    driver.check_idle()
