"""Windows, sinks and tails in both schedulers: what they hold, share, free, and wait for."""

import pytest
from scheduling import Driver, decode, hold, layout, prefill, prompt, receive, reserve, sequence, shares, stepped

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.sequence import NO_PAGE, Sequence, SequenceStatus
from pageferry.core.sequence_queues import RETRY_S

SELECTIVE = "0=window:64,sinks:4;1=full"


def held(one: Sequence, group: int = 0) -> list[int]:
    return [index for index, page in enumerate(one.tables[group]) if page != NO_PAGE]


def run_prompt(driver: Driver, num_tokens: int, variant: int = 0) -> Sequence:
    one = sequence(prompt(num_tokens, variant))
    driver.add(one)
    driver.run()
    driver.check_golden(one)
    return one


@pytest.mark.parametrize("window", [32, 40])  # a multiple of the page, and none
@pytest.mark.parametrize("more", [-1, 0, 1, 100])
def test_around_the_window_s_length_exactly_its_pages_are_held(window: int, more: int) -> None:
    driver = decode((10, 64), layout(groups=f"0=window:{window},sinks:5;1=full"), local_chunk_tokens=32)
    one = sequence(prompt(window + more), max_tokens=60)
    driver.add(one)
    while one not in driver.ended:
        driver.step()
        if one.tables:
            seen = [0, *range(max(0, one.num_computed - window + 1), one.num_computed)]
            assert held(one) == sorted({token // 16 for token in seen})
            assert held(one, 1) == list(range(len(one.tables[1])))
    driver.check_golden(one)
    driver.check_idle()


def test_a_long_prompt_runs_in_a_pool_far_smaller_than_itself() -> None:
    driver = prefill((10, 300), layout(groups=SELECTIVE), chunk_tokens=64)
    one = sequence(prompt(4096))
    driver.add(one)
    while one not in driver.ended:
        driver.step()
        assert not one.tables or held(one) == [0, *range(max(1, one.num_computed // 16 - 4), one.num_computed // 16)]
    driver.check_golden(one)
    driver.check_idle()


def test_selective_caching_holds_fewer_pages() -> None:
    driver = decode((200, 200), layout(groups=SELECTIVE))
    receive(driver, *(sequence(prompt(1000, number), max_tokens=50) for number in range(3)))
    driver.step()
    assert [pool.num_resident for pool in driver.pools.groups] == [3 * 6, 3 * 64]


def test_a_hit_whose_sinks_or_window_pages_were_evicted_is_shorter() -> None:
    driver = prefill((14, 64), layout(groups=SELECTIVE), chunk_tokens=32)
    first = run_prompt(driver, 160)
    hashes = driver.scheduler.tables.claims.prefix._hashes(first)
    num_hit, found = [], []
    for variant in range(1, 8):
        run_prompt(driver, 40, variant)
        num_hit.append(driver.scheduler.tables.claims.num_cached(sequence(prompt(170))))
        found.append([index for index in range(10) if driver.pool.match([hashes[index]])])
    assert found[2:] == [[0, 4, 5, 6, 7, 8, 9], [0, 4, 5, 6, 7], [0, 4, 5], [0], []]
    assert num_hit == [160, 160, 160, 128, 16, 16, 0]
    assert len(driver.pools.groups[1].match(hashes)) == 10, "of the full group all are there"


def test_without_the_sinks_there_is_no_hit() -> None:
    driver = prefill((14, 64), layout(groups=SELECTIVE), chunk_tokens=32)
    first = run_prompt(driver, 160)
    hashes = driver.scheduler.tables.claims.prefix._hashes(first)
    recent = [page for page_hash in hashes[4:] for page in driver.pool.match([page_hash])]
    driver.pool.acquire(recent)
    driver.pool.release(recent)  # later used than the sinks
    for variant in range(1, 5):
        run_prompt(driver, 40, variant)
    assert [len(driver.pool.match([page_hash])) for page_hash in hashes] == [0] * 4 + [1] * 5 + [0]
    assert run_prompt(driver, 170).num_cached == 0


@pytest.mark.parametrize("num_tokens", [161, 170, 230])
def test_a_hit_is_computed_on_from_the_pages_of_the_window_alone(num_tokens: int) -> None:
    driver = prefill((14, 64), layout(groups=SELECTIVE), chunk_tokens=32)
    run_prompt(driver, 160)
    one = sequence(prompt(num_tokens))
    driver.add(one)
    plan = driver.scheduler.schedule(0.0)
    assert shares(plan)[0][:2] == (one, 160)
    assert held(one)[:5] == [0, 6, 7, 8, 9]
    driver.record(driver.scheduler.apply(plan, driver.model.run(plan), 0.0))  # type: ignore[arg-type]
    driver.run()
    driver.check_golden(one)
    driver.check_idle()


def test_a_fully_cached_prompt_copies_the_last_page_of_each_group() -> None:
    for page_format, num_cached, num_copies in (("int8", 159, 2), ("int8:channel", 144, 0)):
        driver = prefill((14, 64), layout(groups=SELECTIVE, page_format=page_format), chunk_tokens=32)
        first, again = run_prompt(driver, 160), run_prompt(driver, 160)
        assert (first.num_cached, again.num_cached) == (0, num_cached)
        assert sum(len(plan.copies) for plan in driver.plans) == num_copies
        driver.check_idle()


def test_the_source_of_a_copy_is_promised_too() -> None:
    driver = prefill((5, 64), layout(groups=SELECTIVE), chunk_tokens=32)
    run_prompt(driver, 32)
    claim = driver.scheduler.tables.claims.to_compute(sequence(prompt(32)), 32)
    assert (claim.copies_last, claim.num_new, claim.promised) == (True, (1, 1), (3, 0))


def test_live_requests_share_the_pages_of_their_prefix() -> None:
    driver = decode((120, 120), layout(groups=SELECTIVE), local_chunk_tokens=128, headroom_pages=0)
    shared = prompt(1008)  # 63 pages
    streams = [sequence(shared + prompt(20, 1 + number), max_tokens=20, arrival=number) for number in range(8)]
    driver.add(streams[0])
    while streams[0].num_output == 0:
        driver.step()
    driver.add(*streams[1:])
    while streams[7].num_output == 0:
        driver.step()
    assert [one.num_cached for one in streams] == [0, *[1008] * 7]
    assert len({page for one in streams for page in one.tables[1][:63]}) == 63
    assert driver.pools.groups[1].num_resident == 63 + 8 * 2
    assert len({page for one in streams for page in one.tables[0] if page != NO_PAGE}) == 1 + 3 + 8 * 2
    driver.run()
    for one in streams:
        driver.check_golden(one)
    driver.check_idle()


def test_a_reservation_needs_of_window_groups_what_is_live_at_its_end_alone() -> None:
    driver = decode((40, 80), layout(groups=SELECTIVE), headroom_pages=0)
    first = sequence(prompt(500), max_tokens=3)
    receive(driver, first)
    driver.run()
    for num_tokens, num_cached in ((700, 496), (520, 496), (450, 384)):  # before page 27 no sender shipped any
        one = sequence((prompt(500) + prompt(200, 1))[:num_tokens], max_tokens=3)
        assert reserve(driver, one)
        assert one.num_cached == num_cached
        driver.receive(one)
        driver.run()
        driver.check_golden(one)
    driver.check_idle()


def test_preempted_with_windows_and_tails_it_resumes_with_the_same_output() -> None:
    driver = decode((40, 24), layout(groups=SELECTIVE, page_format="int8:channel"), headroom_pages=0)
    streams = [sequence(prompt(100, number), max_tokens=80, arrival=number) for number in range(3)]
    receive(driver, *streams)
    driver.run()
    assert [one.num_preemptions > 0 for one in streams] == [False, False, True]
    for one in streams:
        driver.check_golden(one)
    driver.check_idle()


def test_a_window_group_preempts_nobody_once_they_run() -> None:
    of = layout(groups="0=window:64")
    driver = decode(2 * of.groups[0].most_live(500, 32, 16), of, local_chunk_tokens=32)
    streams = [sequence(prompt(100, number), max_tokens=400, arrival=number) for number in range(3)]
    driver.add(*streams)
    driver.step()
    while streams[0] not in driver.ended:
        assert streams[2].status is SequenceStatus.WAITING, "two have all the promises"
        driver.step()
    driver.run()
    for one in streams:
        driver.check_golden(one)
        assert one.num_preemptions == 0
    driver.check_idle()


def test_urgent_work_takes_promises_and_tails_from_lower_priorities() -> None:
    for of, num_pages, num_tails in (
        (layout(groups="0=window:64"), 13, 0),
        (layout(page_format="int8:channel"), 64, 1),
    ):
        driver = decode(num_pages, of, num_tails, local_chunk_tokens=64)
        low, urgent = sequence(prompt(100, 1), 9, priority=1), sequence(prompt(100, 2), 9)
        receive(driver, low)
        driver.step()
        equal = sequence(prompt(100, 3), 9, priority=1, arrival=1.0)
        assert not reserve(driver, equal) and low.num_preemptions == 0
        assert reserve(driver, urgent)
        assert low.num_preemptions == 1
        driver.receive(urgent)
        driver.run()
        for one in (low, urgent):
            driver.check_golden(one)
        driver.check_idle()


def test_a_prompt_whose_promised_pages_a_push_holds_sits_out_and_others_go_on() -> None:
    of = layout(groups="0=window:32")
    driver = prefill(12, of, chunk_tokens=32)
    long, short = sequence(prompt(200, 3)), sequence(prompt(10, 4), arrival=0.1)
    driver.add(long)
    kept = driver.pool.allocate(driver.pool.num_available - 3)  # as other pushes hold them
    assert kept is not None
    assert stepped(driver.step()) == [long]
    assert long.num_computed == 32
    assert driver.step() is None
    assert driver.scheduler.next_wakeup(driver.now) == RETRY_S
    driver.add(short)
    assert stepped(driver.step()) == [short]
    driver.check_golden(short)
    driver.pool.release(kept)
    driver.run()
    driver.check_golden(long)
    driver.check_idle()


def test_what_no_pool_can_hold_is_refused_with_its_layers() -> None:
    driver = prefill((9, 300), layout(groups=SELECTIVE), chunk_tokens=64)
    message = "needs 10 pages of layers 0=window:64,sinks:4, for 4096 tokens in chunks of 64; the pool has 9"
    with pytest.raises(InvalidArgumentError, match=message):
        driver.add(sequence(prompt(4096)))
    with pytest.raises(InvalidArgumentError, match="of layers 1=full, for 4801 tokens; the pool has 300, for 4800"):
        prefill((10, 300), layout(groups=SELECTIVE), chunk_tokens=64).add(sequence(prompt(4801)))


def test_tails_held_by_a_push_keep_others_waiting() -> None:
    driver = prefill(64, layout(page_format="int8:channel"), 1)
    first, second = sequence(prompt(20, 1)), sequence(prompt(20, 2))
    driver.add(first)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    result = driver.model.run(plan)
    ((_, tail),) = driver.scheduler.tables.shippable(first, 1, 0, 20, as_tails=True)
    assert tail.is_tail
    pushed = hold(driver.pools, [tail])
    driver.record(driver.scheduler.apply(plan, result, 0.0))
    driver.add(second)
    assert driver.step() is None
    driver.pools.release(pushed)
    driver.run()
    driver.check_golden(second)
    driver.check_idle()
