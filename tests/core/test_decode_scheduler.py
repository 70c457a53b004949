"""A decode worker's steps: prompts computed here, refusals, and how sequences end."""

import pytest
from chain_model import golden
from scheduling import decode, prompt, receive, reserve, sequence, stepped

from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError
from pageferry.core.pool import PageState
from pageferry.core.sequence import FinishReason, SequenceStatus


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


@pytest.mark.field("sgl-project/sglang#32549", "ROCm/ATOM#1835", "sgl-project/sglang#34623")
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


@pytest.mark.field("sgl-project/sglang#32549", "ROCm/ATOM#1835", "sgl-project/sglang#34623")
def test_streams_get_a_token_each_step_while_a_preempted_prompt_is_computed_again() -> None:
    driver = decode(num_pages=320, local_chunk_tokens=128, headroom_pages=0)
    stream, victim = sequence(prompt(20, 1), max_tokens=300, priority=-1), sequence(prompt(4096, 2), 20, priority=1)
    receive(driver, stream, victim)
    driver.step()
    driver.add(sequence(prompt(4096, 3), max_tokens=2))
    while stream not in driver.ended:
        plan = driver.step()
        assert stream in stepped(plan)
        assert plan is not None and plan.num_tokens <= 128 + len(stepped(plan))
    assert victim.num_preemptions == 1
    assert sum(chunk.sequence is victim and chunk.num_tokens > 1 for plan in driver.plans for chunk in plan.chunks) > 20
    driver.run()
    driver.check_golden(victim)
    driver.check_idle()


@pytest.mark.field("sgl-project/sglang#32549", "ROCm/ATOM#1835", "sgl-project/sglang#34623")
def test_a_short_local_prompt_does_not_wait_for_a_huge_one() -> None:
    driver = decode(num_pages=400, local_chunk_tokens=128)
    huge, short = sequence(prompt(4096, 1), max_tokens=2), sequence(prompt(32, 2), max_tokens=2, arrival=0.1)
    driver.add(huge)
    driver.step(0.1)
    driver.add(short)
    driver.step()
    driver.step()
    driver.check_golden(short)


@pytest.mark.field("vllm-project/vllm#35541", "vllm-project/vllm#39734", "RBLN-SW/vllm-rbln#957")
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


def test_a_prompt_takes_no_pages_before_the_step_s_tokens_reach_it() -> None:
    driver = decode(local_chunk_tokens=32)
    first, second = sequence(prompt(100, 1)), sequence(prompt(100, 2), arrival=1.0)
    driver.add(first, second)
    for status in [SequenceStatus.WAITING] * 3 + [SequenceStatus.RUNNING]:
        driver.step()
        assert second.status is status
    driver.run()
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


def test_an_abort_during_a_step_frees_the_pages_when_the_step_ends() -> None:
    driver = decode()
    one, other = sequence(prompt(20, 1), max_tokens=5), sequence(prompt(20, 2), max_tokens=5)
    receive(driver, one, other)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    pages, result = list(one.tables[0]), driver.model.run(plan)
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
