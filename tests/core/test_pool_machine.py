"""Pages have one owner under any order of calls, and content: what an owner wrote stays until it lets go."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pageferry.core.pool import PageId, PagePool, PageState

NUM_PAGES = 4
PICKS = st.integers(0, 5)
HASHES = st.sampled_from([b"a", b"b", b"c", b"d"])


@dataclass(eq=False)
class Owner:
    """Whoever holds a reference on each of its pages, and what it knows to be in them."""

    pages: list[PageId]
    contents: list[int]


has_pages = precondition(lambda machine: any(owner.pages for owner in machine.owners))


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.owners: list[Owner] = []
        self.content = dict.fromkeys(map(PageId, range(NUM_PAGES)), 0)
        self.reserved: set[PageId] = set()
        self.content_of_hash: dict[bytes, int] = {}
        self.mirror: set[bytes] = set()
        self.num_writes = 0

    def write(self, page: PageId) -> int:
        self.num_writes += 1
        self.content[page] = self.num_writes
        return self.num_writes

    def held(self) -> Counter[PageId]:
        return Counter(page for owner in self.owners for page in owner.pages)

    def pick(self, pick: int) -> tuple[Owner, int]:
        """One owner and the index of one of its pages."""
        places = [(owner, index) for owner in self.owners for index in range(len(owner.pages))]
        return places[pick % len(places)]

    @rule(num=st.integers(0, 3), reserved=st.booleans())
    def allocate(self, num: int, reserved: bool) -> None:
        num_available, held = self.pool.num_available, self.held()
        pages = self.pool.allocate(num, reserved=reserved)
        assert (pages is None) == (num > num_available)
        if pages is not None:
            assert not set(pages) & set(held)
            self.reserved |= set(pages if reserved else ())
            self.owners.append(Owner(pages, [self.write(page) for page in pages]))

    @has_pages
    @rule(pick=PICKS)
    def share(self, pick: int) -> None:
        owner, index = self.pick(pick)
        self.pool.acquire(owner.pages[index:])
        self.owners.append(Owner(owner.pages[index:], owner.contents[index:]))

    @has_pages
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        owner, _ = self.pick(pick)
        self.owners.remove(owner)
        self.pool.release(owner.pages)
        self.reserved &= set(self.held())
        for page in set(owner.pages) - set(self.held()):
            with pytest.raises(AssertionError, match="once too often"):
                self.pool.release([page])

    @has_pages
    @rule(pick=PICKS)
    def commit(self, pick: int) -> None:
        owner, _ = self.pick(pick)
        pages = [page for page in owner.pages if page in self.reserved]
        self.pool.commit(pages)
        self.reserved -= set(pages)

    @has_pages
    @rule(pick=PICKS, page_hash=HASHES)
    def store(self, pick: int, page_hash: bytes) -> None:
        owner, index = self.pick(pick)
        page = owner.pages[index]
        known = next((known for known in self.pool.cached_hashes() if self.pool.match([known]) == [page]), page_hash)
        if page in self.reserved or known != page_hash:
            with pytest.raises(AssertionError, match=f"page {page} is"):
                self.pool.store(page, page_hash)
            return
        if page_hash not in self.pool.cached_hashes():
            self.content_of_hash[page_hash] = self.content[page]
        self.pool.store(page, page_hash)

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=3, unique=True))
    def run_a_prompt(self, hashes: list[bytes]) -> None:
        """From nothing to cached pages, as far as there is room."""
        pages = self.pool.allocate(len(hashes)) or []
        for page, page_hash in zip(pages, hashes, strict=False):
            self.write(page)
            if page_hash not in self.pool.cached_hashes():
                self.content_of_hash[page_hash] = self.content[page]
            self.pool.store(page, page_hash)
        self.pool.release(pages)

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=3, unique=True))
    def hit(self, hashes: list[bytes]) -> None:
        pages = self.pool.match(hashes)
        findable = [page_hash in self.pool.cached_hashes() for page_hash in hashes]
        assert len(pages) == [*findable, False].index(False)
        self.pool.acquire(pages)
        self.owners.append(Owner(pages, [self.content_of_hash[page_hash] for page_hash in hashes[: len(pages)]]))

    @has_pages
    @rule(pick=PICKS)
    def write_or_copy(self, pick: int) -> None:
        owner, index = self.pick(pick)
        page = owner.pages[index]
        if self.pool.ref_count(page) > 1 or [page] in [self.pool.match([known]) for known in self.pool.cached_hashes()]:
            copy = self.pool.allocate(1)
            if copy is None:
                return
            self.pool.release([owner.pages[index]])
            owner.pages[index] = copy[0]
            self.reserved &= set(self.held())
        owner.contents[index] = self.write(owner.pages[index])

    @rule()
    def take_cache_events(self) -> None:
        stored, removed = self.pool.take_cache_events()
        assert not self.mirror & set(stored)
        assert self.mirror >= set(removed)
        self.mirror = self.mirror - set(removed) | set(stored)
        assert self.mirror == set(self.pool.cached_hashes())

    @invariant()
    def every_page_has_one_state_and_its_owners(self) -> None:
        self.pool.check_integrity()
        held = self.held()
        for page in self.content:
            assert self.pool.ref_count(page) == held[page]
            assert (self.pool.state(page) is PageState.RESERVED) == (page in self.reserved)
        assert self.pool.num_available == NUM_PAGES - len(held)
        assert self.pool.num_reserved == len(self.reserved)

    @invariant()
    def nobody_loses_content(self) -> None:
        for owner in self.owners:
            assert [self.content[page] for page in owner.pages] == owner.contents
        for page_hash in self.pool.cached_hashes():
            (page,) = self.pool.match([page_hash])
            assert self.content[page] == self.content_of_hash[page_hash]

    def teardown(self) -> None:
        for owner in self.owners:
            self.pool.release(owner.pages)
        self.pool.check_integrity()
        assert self.pool.num_available == NUM_PAGES


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
