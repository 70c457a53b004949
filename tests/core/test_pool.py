import pytest

from pageferry.core.pool import PageId, PagePool, PageState
from pageferry.core.prefix import page_hashes

HASHES = [bytes([index]) * 16 for index in range(16)]


def allocate(pool: PagePool, num: int, *, reserved: bool = False) -> list[PageId]:
    pages = pool.allocate(num, reserved=reserved)
    assert pages is not None
    pool.check_integrity()
    return pages


def store_all(pool: PagePool, pages: list[PageId], hashes: list[bytes]) -> None:
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.store(page, page_hash)


def release(pool: PagePool, pages: list[PageId]) -> None:
    pool.release(pages)
    pool.check_integrity()


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="num_pages is 0, must be at least 1"):
        PagePool(0)


def test_allocated_pages_are_distinct_and_counted_by_kind() -> None:
    pool = PagePool(8)
    resident = allocate(pool, 3)
    reserved = allocate(pool, 4, reserved=True)
    assert len({*resident, *reserved}) == 7
    assert (pool.num_free, pool.num_cached, pool.num_reserved, pool.num_resident) == (1, 0, 4, 3)
    assert {pool.state(page) for page in reserved} == {PageState.RESERVED}
    assert allocate(pool, 0) == []


def test_what_does_not_fit_changes_nothing() -> None:
    pool = PagePool(4)
    pages = allocate(pool, 2)
    store_all(pool, pages, HASHES[:2])
    release(pool, pages)
    assert pool.allocate(5) is None
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached) == (2, 2)
    assert pool.match(HASHES[:2]) == pages


def test_asking_for_fewer_than_no_pages_raises() -> None:
    with pytest.raises(AssertionError, match="asked for -1 pages"):
        PagePool(4).allocate(-1)


def test_the_last_owner_frees_a_page() -> None:
    pool = PagePool(2)
    pages = allocate(pool, 1)
    pool.acquire(pages)
    release(pool, pages)
    assert pool.ref_count(pages[0]) == 1
    release(pool, pages)
    assert pool.num_free == 2


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.field("sgl-project/mini-sglang#52", "Avarok-Cybersecurity/atlas#158", "Avarok-Cybersecurity/atlas#373")
def test_a_double_free_raises_and_harms_nothing(cached: bool) -> None:
    pool = PagePool(2)
    pages = allocate(pool, 1)
    if cached:
        pool.store(pages[0], HASHES[0])
    release(pool, pages)
    state = "cached" if cached else "free"
    with pytest.raises(AssertionError, match=f"page {pages[0]} is {state} and was released once too often"):
        pool.release(pages)
    pool.check_integrity()
    assert pool.num_available == 2


def test_a_free_page_cannot_be_acquired() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="page 1 is free and cannot be acquired"):
        pool.acquire([PageId(1)])
    pool.check_integrity()


def test_reserved_pages_become_resident_by_commit_once() -> None:
    pool = PagePool(4)
    pages = allocate(pool, 2, reserved=True)
    with pytest.raises(AssertionError, match="is reserved, only a resident one is stored"):
        pool.store(pages[0], HASHES[0])
    pool.commit(pages)
    pool.check_integrity()
    assert (pool.num_reserved, pool.num_resident) == (0, 2)
    with pytest.raises(AssertionError, match="is resident, only a reserved one is committed"):
        pool.commit(pages)


def test_a_cancel_in_mid_transfer_frees_reserved_pages_when_the_copy_ends() -> None:
    pool = PagePool(4)
    for _ in range(20):
        pages = allocate(pool, 4, reserved=True)
        in_flight = pages[1:2]
        pool.acquire(in_flight)  # the copy's own reference
        release(pool, pages)  # the client cancels
        assert (pool.num_free, pool.num_reserved) == (3, 1)
        assert pool.state(in_flight[0]) is PageState.RESERVED
        assert pool.allocate(4) is None
        release(pool, in_flight)  # the copy ends, or its lease does
        assert pool.num_free == 4


def test_cached_pages_are_found_until_they_are_evicted() -> None:
    pool = PagePool(4)
    pages = allocate(pool, 3)
    store_all(pool, pages, HASHES[:3])
    assert pool.match(HASHES[:3]) == pages  # resident ones are found too
    release(pool, pages)
    assert pool.match([HASHES[0], HASHES[1], HASHES[9], HASHES[2]]) == pages[:2]
    assert pool.match([HASHES[9], HASHES[0]]) == []
    assert allocate(pool, 1) == [3]  # free ones are given out first
    assert pool.num_cached == 3
    allocate(pool, 3)
    assert pool.match(HASHES[:1]) == []
    assert pool.cached_hashes() == []


def test_eviction_takes_the_least_recently_used_and_the_end_of_a_prompt_first() -> None:
    pool = PagePool(4)
    first, second = allocate(pool, 2), allocate(pool, 2)
    store_all(pool, first, HASHES[:2])
    store_all(pool, second, HASHES[2:4])
    release(pool, first)
    release(pool, second)
    pool.acquire(first)
    release(pool, first)  # used again: now younger than the second
    for remaining in ([0, 1, 2], [0, 1], [0], []):
        allocate(pool, 1)
        assert sorted(pool.cached_hashes()) == [HASHES[index] for index in remaining]


@pytest.mark.field("sgl-project/mini-sglang#52", "Avarok-Cybersecurity/atlas#158", "Avarok-Cybersecurity/atlas#373")
def test_pages_in_use_are_never_evicted_under_a_flood() -> None:
    pool = PagePool(16)
    prefix = allocate(pool, 10)
    hashes = page_hashes(range(40), 4, salt="", layout_key=b"")
    store_all(pool, prefix, hashes)
    release(pool, prefix)
    running = pool.match(hashes)
    pool.acquire(running)
    for request in range(100):
        flood = allocate(pool, 6)
        assert not set(flood) & set(running)
        store_all(pool, flood, page_hashes(range(request, request + 24), 4, salt=f"{request}", layout_key=b""))
        release(pool, flood)
    release(pool, running)  # preempted
    assert pool.match(hashes) == running  # and resumed
    pool.acquire(running)
    pool.check_integrity()
    assert pool.num_resident == 10


def test_a_hash_keeps_its_first_page_and_a_page_its_hash() -> None:
    pool = PagePool(4)
    first, twin = allocate(pool, 2)
    pool.store(first, HASHES[0])
    pool.store(first, HASHES[0])
    pool.store(twin, HASHES[0])
    pool.check_integrity()
    assert pool.match(HASHES[:1]) == [first]
    with pytest.raises(AssertionError, match=f"page {first} is already stored under another hash"):
        pool.store(first, HASHES[1])
    release(pool, [first, twin])
    assert (pool.num_cached, pool.num_free) == (1, 3)


def test_cache_events_are_net_of_one_another() -> None:
    pool = PagePool(2)
    pages = allocate(pool, 2)
    store_all(pool, pages, HASHES[:2])
    assert pool.take_cache_events() == (HASHES[:2], [])
    assert pool.take_cache_events() == ([], [])
    release(pool, pages)
    pages = allocate(pool, 1)  # evicts the second
    assert pool.take_cache_events() == ([], [HASHES[1]])
    pool.store(pages[0], HASHES[5])
    release(pool, pages)
    pages = allocate(pool, 2)  # evicts both; nobody heard of the sixth
    assert pool.take_cache_events() == ([], [HASHES[0]])
    pool.store(pages[0], HASHES[1])
    release(pool, pages)
    pages = allocate(pool, 2)
    pool.store(pages[0], HASHES[1])  # gone and back
    assert pool.take_cache_events() == ([HASHES[1]], [])


@pytest.mark.parametrize(
    ("attribute", "page", "value", "message"),
    [
        ("_refs", 0, 0, "page 0 is resident with 0 references"),
        ("_refs", 1, -1, "page 1 is cached with -1 references"),
        ("_refs", 3, 1, "page 3 is free with 1 references"),
        ("_states", 0, PageState.FREE, "page 0 is free with 1 references"),
        ("_states", 2, PageState.RESIDENT, "1 pages are counted as reserved"),
        ("_states", 3, PageState.CACHED, "page 3 is cached"),
        ("_hashes", 1, None, "page 1 is cached"),
        ("_hashes", 2, HASHES[3], "page 2 is reserved"),
        ("_hashes", 0, HASHES[0], "page 0 is resident"),
    ],
)
def test_check_integrity_names_the_page(attribute: str, page: int, value: object, message: str) -> None:
    pool = PagePool(4)
    resident, cached = allocate(pool, 2)
    allocate(pool, 1, reserved=True)
    pool.store(cached, HASHES[0])
    release(pool, [cached])
    assert (resident, cached) == (0, 1)
    getattr(pool, attribute)[page] = value
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_check_integrity_sees_a_page_twice_in_the_free_list_and_a_stray_hash() -> None:
    pool = PagePool(2)
    pool._by_hash[HASHES[0]] = PageId(0)
    with pytest.raises(AssertionError, match="a hash finds a page that does not carry it"):
        pool.check_integrity()
    pool = PagePool(2)
    pool._free.append(PageId(0))
    with pytest.raises(AssertionError, match="twice in the free list"):
        pool.check_integrity()
