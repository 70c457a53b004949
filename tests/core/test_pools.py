"""The pools of all groups and of tails, as one."""

import pytest
from scheduling import layout

from pageferry.core.layout import Place
from pageferry.core.pool import PageId, PageState
from pageferry.core.pools import PagePools

TAIL = [Place(group, PageId(1), is_tail=True) for group in (0, 1)]


def pools() -> PagePools:
    return PagePools(layout(4, "0=window:8;1=full", "int8:channel"), [3, 5], 2)


def test_figures_are_sums_and_a_tail_counts_once() -> None:
    both = pools()
    assert (both.num_pages, both.num_free, both.num_cached) == (10, 10, 0)
    window, full = both.groups
    assert both.tails is not None
    window.allocate(1)
    full.allocate(2, reserved=True)
    both.tails.allocate(2)
    assert (both.num_free, both.num_reserved, both.num_resident, both.num_cached) == (5, 2, 3, 0)


def test_a_place_finds_its_pool_and_a_tail_is_held_once_per_group() -> None:
    both = pools()
    assert both.tails is not None
    for pool in both.all:
        pool.allocate(2, reserved=True)
    places = [Place(0, PageId(1)), Place(1, PageId(0)), *TAIL]
    both.acquire(places)
    assert [pool.ref_count(PageId(1)) for pool in both.all] == [2, 1, 3]
    both.commit([Place(1, PageId(0)), TAIL[0]])
    assert both.of(TAIL[1]).state(PageId(1)) is PageState.RESIDENT
    assert both.num_reserved == 4
    both.release(places)
    for pool in both.all:
        pool.release([PageId(0), PageId(1)])
    both.check_integrity()
    assert both.num_free == both.num_pages


def test_cache_events_are_those_of_the_first_full_group() -> None:
    both = pools()
    for pool, page_hash in zip(both.groups, (b"window", b"full"), strict=True):
        pool.allocate(1)
        pool.store(PageId(0), page_hash)
    assert both.cached_hashes() == [b"full"]
    assert both.take_cache_events() == ([b"full"], [])
    alone = PagePools(layout(4, "0=window:8"), [3])
    alone.groups[0].allocate(1)
    alone.groups[0].store(PageId(0), b"window")
    assert alone.cached_hashes() == [b"window"]


def test_one_number_of_pages_for_each_group_and_no_tails_without_need() -> None:
    with pytest.raises(ValueError, match="num_pages has 1 entries, must have one for each of 2"):
        PagePools(layout(4, "0=window:8;1=full"), [3])
    plain = PagePools(layout(4), [3], 7)
    assert (plain.tails, plain.num_pages) == (None, 3)
    with pytest.raises(AssertionError, match="is a tail, and the format has none"):
        plain.acquire(TAIL)
