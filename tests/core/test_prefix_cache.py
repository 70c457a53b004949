"""The longest hit over all cache groups, whichever pages are there: beside a search for it by definition."""

from hypothesis import given, settings, strategies as st
from scheduling import layout, prompt, sequence

from pageferry.core.pools import PagePools
from pageferry.core.prefix import page_hashes
from pageferry.core.prefix_cache import PrefixCache
from pageferry.core.sequence import NO_PAGE

B, NUM_PAGES = 4, 9
GROUPS = (
    "0=full",
    "0=window:9",
    "0=window:7,sinks:3;1=full",
    "0=window:5;1=window:12,sinks:6",
    "0=window:1;1=window:17",
)
MISSING = st.lists(st.frozensets(st.integers(0, NUM_PAGES - 1), max_size=3), min_size=2, max_size=2)
LIMITS = st.sampled_from([*[NUM_PAGES] * 9, 0, 1, NUM_PAGES + 1])


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.sampled_from(GROUPS), MISSING, LIMITS, st.none() | st.just((NUM_PAGES - 1) * B))
def test_the_longest_hit_is_found(groups: str, missing: list[frozenset[int]], limit: int, start: int | None) -> None:
    of = layout(B, groups)
    pools = PagePools(of, [NUM_PAGES] * len(of.groups))
    one = sequence(prompt(NUM_PAGES * B))
    hashes = page_hashes(one.token_ids, B, salt="", layout_key=of.cache_key)
    for pool, absent in zip(pools.groups, missing, strict=False):
        pages = pool.allocate(NUM_PAGES) or []
        for index in range(NUM_PAGES):
            if index not in absent:
                pool.store(pages[index], hashes[index])

    def needed(num_hit: int) -> list[set[int]]:
        end = num_hit * B
        return [set(group.live_pages(end if start is None else start, end, B)) for group in of.groups]

    def is_hit(num_hit: int) -> bool:
        return not any(pages & absent for pages, absent in zip(needed(num_hit), missing, strict=False))

    cache = PrefixCache(pools, of, is_on=True)
    num_hit = cache.num_hit(one, limit, start)
    assert num_hit == max(filter(is_hit, range(min(limit, NUM_PAGES) + 1)))
    found = [
        {index for index, page in enumerate(table) if page != NO_PAGE} for table in cache.pages(one, num_hit, start)
    ]
    assert found == needed(num_hit)
