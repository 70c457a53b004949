"""The pools of a worker: of pages, one for each cache group, and where the format has tails one of those."""

from collections.abc import Iterable, Iterator, Sequence

from pageferry.core.layout import CacheLayout, Place
from pageferry.core.pool import PageId, PagePool


class PagePools:
    """The page accounting of a `CacheLayout`: all pools that a place can lie in.

    A sequence has one tail, which names a page in every group's tail tensors, and is counted once. Figures are sums
    over all pools, tails included. Cache events are those of the first full group, or of group 0.
    """

    def __init__(self, layout: CacheLayout, num_pages: Sequence[int], num_tails: int = 0) -> None:
        if len(num_pages) != len(layout.groups):
            raise ValueError(f"num_pages has {len(num_pages)} entries, must have one for each of {len(layout.groups)}")
        self.groups = tuple(PagePool(num) for num in num_pages)
        self.tails = PagePool(num_tails) if layout.tails else None
        full = (pool for group, pool in zip(layout.groups, self.groups, strict=True) if group.window is None)
        self._lead = next(full, self.groups[0])

    @property
    def all(self) -> tuple[PagePool, ...]:
        """Those of the groups, then that of the tails."""
        return self.groups if self.tails is None else (*self.groups, self.tails)

    @property
    def num_pages(self) -> int:
        return sum(pool.num_pages for pool in self.all)

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self.all)

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self.all)

    @property
    def num_reserved(self) -> int:
        return sum(pool.num_reserved for pool in self.all)

    @property
    def num_resident(self) -> int:
        return sum(pool.num_resident for pool in self.all)

    def of(self, place: Place) -> PagePool:
        if not place.is_tail:
            return self.groups[place.group]
        assert self.tails is not None, f"{place} is a tail, and the format has none"
        return self.tails

    def acquire(self, places: Iterable[Place]) -> None:
        """Add one owner to each place; for a tail that is one in each group that is named."""
        for pool, pages in self._by_pool(places):
            pool.acquire(pages)

    def release(self, places: Iterable[Place]) -> None:
        """Take one owner off each place."""
        for pool, pages in self._by_pool(places):
            pool.release(pages)

    def commit(self, places: Iterable[Place]) -> None:
        """Make reserved places resident: their bytes are all there."""
        for pool, pages in self._by_pool(places):
            pool.commit(pages)

    def take_cache_events(self) -> tuple[list[bytes], list[bytes]]:
        return self._lead.take_cache_events()

    def cached_hashes(self) -> list[bytes]:
        return self._lead.cached_hashes()

    def check_integrity(self) -> None:
        for pool in self.all:
            pool.check_integrity()

    def _by_pool(self, places: Iterable[Place]) -> Iterator[tuple[PagePool, list[PageId]]]:
        pages: dict[PagePool, list[PageId]] = {}
        for place in places:
            pages.setdefault(self.of(place), []).append(place.page)
        return iter(pages.items())
