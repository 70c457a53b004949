"""The accounting of a page pool: which page belongs to whom. It holds no bytes.

Every page has one state, and every owner (a sequence's page table, a copy in flight, a step in flight) holds one
reference. A page goes back only when its last owner lets go, so that whoever cancels need not know who else is at work.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NewType

PageId = NewType("PageId", int)


class PageState(Enum):
    FREE = "free"
    CACHED = "cached"  # no reference; found by its hash until it is evicted
    RESERVED = "reserved"  # its bytes come from elsewhere; not to be read yet
    RESIDENT = "resident"


class PagePool:
    """Gives pages out and takes them back. Misuse by its callers raises AssertionError naming the page."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, must be at least 1")
        self._states = [PageState.FREE] * num_pages
        self._refs = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._by_hash: dict[bytes, PageId] = {}
        self._free = [PageId(page) for page in reversed(range(num_pages))]
        self._cached: OrderedDict[PageId, None] = OrderedDict()  # least recently used first
        self._num_reserved = 0
        self._stored: dict[bytes, None] = {}  # cache events not yet taken, net of one another
        self._removed: dict[bytes, None] = {}

    @property
    def num_pages(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    @property
    def num_resident(self) -> int:
        return self.num_pages - self.num_available - self._num_reserved

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones and, by eviction, cached ones."""
        return len(self._free) + len(self._cached)

    def ref_count(self, page: PageId) -> int:
        return self._refs[page]

    def state(self, page: PageId) -> PageState:
        return self._states[page]

    def allocate(self, num: int, *, reserved: bool = False) -> list[PageId] | None:
        """Take `num` pages, each with one reference, evicting the least recently used cached ones if it must.

        None, with nothing changed, when even eviction can't give enough. `reserved` pages are for bytes from
        elsewhere: `commit` makes them resident. The content of a page is whatever its last owner left.
        """
        if num < 0:
            raise AssertionError(f"asked for {num} pages")
        if num > self.num_available:
            return None
        while len(self._free) < num:
            self._evict()
        state = PageState.RESERVED if reserved else PageState.RESIDENT
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._states[page] = state
            self._refs[page] = 1
        self._num_reserved += num if reserved else 0
        return pages

    def acquire(self, pages: Iterable[PageId]) -> None:
        """Add one owner to each page; a cached page becomes resident."""
        for page in pages:
            if self._states[page] is PageState.FREE:
                raise AssertionError(f"page {page} is free and cannot be acquired")
            if self._states[page] is PageState.CACHED:
                del self._cached[page]
                self._states[page] = PageState.RESIDENT
            self._refs[page] += 1

    def release(self, pages: Sequence[PageId]) -> None:
        """Take one owner off each page; without any it is cached if it has a hash, else free.

        Of a page table the last pages count as least recently used, since the first ones serve more prompts.
        """
        for page in reversed(pages):
            if self._refs[page] == 0:
                raise AssertionError(f"page {page} is {self._states[page].value} and was released once too often")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._let_go(page)

    def commit(self, pages: Iterable[PageId]) -> None:
        """Make reserved pages resident: their bytes are all there."""
        for page in pages:
            if self._states[page] is not PageState.RESERVED:
                raise AssertionError(f"page {page} is {self._states[page].value}, only a reserved one is committed")
            self._states[page] = PageState.RESIDENT
            self._num_reserved -= 1

    def match(self, hashes: Iterable[bytes]) -> list[PageId]:
        """The longest leading run of `hashes` that is findable. Takes no reference: acquire before anything else."""
        pages: list[PageId] = []
        for page_hash in hashes:
            page = self._by_hash.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def store(self, page: PageId, page_hash: bytes) -> PageId:
        """Make a full resident page findable; it is never written again. Where the hash has a page, give that one."""
        if self._states[page] is not PageState.RESIDENT:
            raise AssertionError(f"page {page} is {self._states[page].value}, only a resident one is stored")
        if self._hashes[page] not in (None, page_hash):
            raise AssertionError(f"page {page} is already stored under another hash")
        if page_hash in self._by_hash:
            return self._by_hash[page_hash]
        self._by_hash[page_hash] = page
        self._hashes[page] = page_hash
        if page_hash in self._removed:
            del self._removed[page_hash]
        else:
            self._stored[page_hash] = None
        return page

    def take_cache_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) hashes since the last call; one that came and went since is in neither."""
        events = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return events

    def cached_hashes(self) -> list[bytes]:
        """All that `match` finds now."""
        return list(self._by_hash)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the page, unless every page has exactly one state and it fits its owners."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is twice in the free list")
        for page, state in enumerate(self._states):
            page_hash = self._hashes[page]
            found = page_hash is not None and self._by_hash.get(page_hash) == page
            facts = (page in free, page in self._cached, self._refs[page] > 0, page_hash is not None, found)
            if self._refs[page] < 0 or facts not in _CONSISTENT[state]:
                raise AssertionError(
                    f"page {page} is {state.value} with {self._refs[page]} references and (in the free list, in the "
                    f"cached list, referenced, hashed, findable) = {facts}"
                )
        if len(self._by_hash) != sum(page_hash is not None for page_hash in self._hashes):
            raise AssertionError("a hash finds a page that does not carry it")
        if self._num_reserved != self._states.count(PageState.RESERVED):
            raise AssertionError(f"{self._num_reserved} pages are counted as reserved, but not that many are")

    def _let_go(self, page: PageId) -> None:
        if self._states[page] is PageState.RESERVED:
            self._num_reserved -= 1
        if self._hashes[page] is None:
            self._states[page] = PageState.FREE
            self._free.append(page)
        else:
            self._states[page] = PageState.CACHED
            self._cached[page] = None

    def _evict(self) -> None:
        page, _ = self._cached.popitem(last=False)
        page_hash = self._hashes[page]
        assert page_hash is not None
        del self._by_hash[page_hash]
        self._hashes[page] = None
        self._states[page] = PageState.FREE
        self._free.append(page)
        if page_hash in self._stored:
            del self._stored[page_hash]
        else:
            self._removed[page_hash] = None


# What `check_integrity` accepts: (in the free list, in the cached list, referenced, hashed, findable).
_CONSISTENT = {
    PageState.FREE: {(True, False, False, False, False)},
    PageState.CACHED: {(False, True, False, True, True)},
    PageState.RESERVED: {(False, False, True, False, False)},
    PageState.RESIDENT: {(False, False, True, False, False), (False, False, True, True, True)},
}
