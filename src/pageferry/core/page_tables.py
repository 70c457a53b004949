"""A sequence's page tables, one for each cache group: filled from the prefix cache and the pools, and given back.

Pages of a full group are taken before they are needed, for the whole prompt when it starts and one by one behind it.
Those of a window group are promised when a sequence starts, as many as it can come to hold at once; it takes them
chunk by chunk, and gives those behind the window back at the end of the step.
"""

from collections.abc import Iterator

from pageferry.core.claims import Claim, Claims, held_places, places
from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.pool import PageId
from pageferry.core.pools import PagePools
from pageferry.core.sequence import NO_PAGE, Sequence, page_table


class PageTables:
    """Gives sequences their pages and takes them back. One per scheduler, which owns the pools' thread.

    Only full pages are ever shared, and a chunk starts behind them: so that a sequence writes to no page of another's.
    Pages released while a step is in flight return to the pools when it ends. `chunk_tokens` are the most that a
    sequence computes in a step.
    """

    def __init__(self, pools: PagePools, layout: CacheLayout, *, prefix_cache: bool, chunk_tokens: int) -> None:
        self.claims = Claims(pools, layout, prefix_cache=prefix_cache, chunk_tokens=chunk_tokens)
        self._pools = pools
        self._layout = layout
        self._has_windows = any(group.window is not None for group in layout.groups)
        self._in_step = False
        self._deferred: list[Place] = []
        self._copies: list[tuple[Place, Place]] = []

    @property
    def page_size(self) -> int:
        return self._layout.page_size

    @property
    def in_step(self) -> bool:
        return self._in_step

    def num_pages(self, num_tokens: int) -> int:
        return self._layout.num_pages(num_tokens)

    def take(self, sequence: Sequence, claim: Claim, *, reserved: bool = False) -> None:
        """Fill the page tables as claimed, and set how much of the sequence is computed already."""
        self._pools.acquire(places(claim.matched))
        new = []
        for pool, num_new in zip(self._pools.all, claim.num_new, strict=True):
            pages = pool.allocate(num_new, reserved=reserved)
            assert pages is not None, f"a claim that lacks {claim.lacking} pages was taken"
            new.append(pages)
        sequence.tail = new.pop()[0] if self._pools.tails is not None else None
        sequence.tables = [page_table(matched) for matched in claim.matched]
        for number, (group, table, pages) in enumerate(zip(self._layout.groups, sequence.tables, new, strict=True)):
            if claim.copies_last:
                source = Place(number, table.pop())
                self._copies.append((source, Place(number, pages[0])))
                self._deferred.append(source)  # our reference outlives the copy
            table.extend(self._spread(group, len(sequence.token_ids), len(table), pages) if reserved else pages)
        self.claims.promise(sequence, claim)
        sequence.num_computed = min(len(claim.matched[0]) * self.page_size, len(sequence.token_ids) - 1)
        if sequence.num_preemptions == 0:
            sequence.num_cached = sequence.num_computed

    def cover(self, sequence: Sequence, end: int) -> bool:
        """Take the pages that computing up to position `end` lacks. False, with nothing changed, if there are none.

        For those of window groups, which were promised, that is only while transfers in flight hold such pages.
        """
        num_pages = self.num_pages(end)
        if len(min(sequence.tables, key=len)) >= num_pages:  # as mostly: a page is lacking once in page_size steps
            return True
        pairs = list(zip(self._pools.groups, sequence.tables, strict=True))
        if any(num_pages - len(table) > pool.num_available for pool, table in pairs):
            return False
        for pool, table in pairs:
            table.extend(pool.allocate(max(0, num_pages - len(table))) or ())
        return True

    def slide(self, sequence: Sequence) -> None:
        """Give back the pages behind the windows of what is still to compute."""
        if not self._has_windows:
            return
        behind = []
        for number, (group, table) in enumerate(zip(self._layout.groups, sequence.tables, strict=True)):
            index = group.first_seen(sequence.num_computed) // self.page_size - 1
            while index >= group.num_sink_pages(self.page_size) and table[index] != NO_PAGE:
                behind.append(Place(number, table[index]))
                table[index] = NO_PAGE
                index -= 1
        self._give_back(behind)

    def release(self, sequence: Sequence) -> None:
        """Give all its pages back."""
        held = held_places(sequence)
        sequence.tables, sequence.tail = [], None
        self.claims.forgo(sequence)
        self._give_back(held)

    def expected(self, sequence: Sequence) -> dict[PageKey, Place]:
        """The pages that a reserved sequence's sender fills: those live at the prompt's end and not cached."""
        pages = range(sequence.num_cached // self.page_size, self.num_pages(len(sequence.token_ids)))
        return dict(self._at_end(sequence, pages, as_tails=self._pools.tails is not None))

    def shippable(
        self, sequence: Sequence, first_page: int, start: int, end: int, *, as_tails: bool
    ) -> list[tuple[PageKey, Place]]:
        """The pages from index `first_page` on that a receiver gets after the chunk `start` to `end`, before `apply`.

        Those are what the chunk fills, what was found cached if it is the first, and at the prompt's end its last page;
        each if it is live at that end. `as_tails`: the receiver keeps a last page that isn't full as a tail.
        """
        first = first_page if start == sequence.num_cached else max(first_page, start // self.page_size)
        num_done = self.num_pages(end) if end == len(sequence.token_ids) else end // self.page_size
        return list(self._at_end(sequence, range(first, num_done), as_tails=as_tails))

    def commit(self, sequence: Sequence) -> None:
        """What was reserved has been received (or stays unused as yet): it becomes ordinary."""
        self._pools.commit(places(sequence.tables, sequence.num_cached // self.page_size))
        if sequence.tail is not None:
            self._pools.commit([Place(0, sequence.tail, is_tail=True)])

    def resumes_at(self, sequence: Sequence) -> int:
        """Where computing its last token begins: a page that was sealed from a tail is computed anew."""
        num_tokens = len(sequence.token_ids)
        is_sealed = self._pools.tails is not None and num_tokens % self.page_size == 0
        return num_tokens - (self.page_size if is_sealed else 1)

    def store(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the pages findable that positions `start` to `end`, now computed, have filled, or share equal ones."""
        if start // self.page_size == end // self.page_size:
            return
        self._give_back(self.claims.prefix.store(sequence, start, end))

    def fresh(self, sequence: Sequence, start: int, end: int) -> Iterator[Place]:
        """The pages that are new to the sequence when it computes `start` to `end`: whose first position is there."""
        return places(sequence.tables, self.num_pages(start), self.num_pages(end))

    def begin_step(self) -> tuple[tuple[Place, Place], ...]:
        """A step with these copies (source, target) starts."""
        self._in_step = True
        copies, self._copies = tuple(self._copies), []
        return copies

    def end_step(self) -> None:
        self._in_step = False
        self._pools.release(self._deferred)
        self._deferred = []

    def _spread(self, group: CacheGroup, num_tokens: int, first: int, pages: list[PageId]) -> list[PageId]:
        """The table from index `first` on in which `pages` lie where they are live at the end, and behind it."""
        live, rest = set(group.live_at_end(num_tokens, self.page_size)), iter(pages)
        indices = range(first, self.num_pages(num_tokens))
        return [next(rest) if index in live else NO_PAGE for index in indices] + list(rest)

    def _at_end(self, sequence: Sequence, indices: range, *, as_tails: bool) -> Iterator[tuple[PageKey, Place]]:
        """Those of the pages that are live at the prompt's end."""
        num_full = len(sequence.token_ids) // self.page_size
        for number, group in enumerate(self._layout.groups):
            for index in group.live_at_end(len(sequence.token_ids), self.page_size):
                if index in indices:
                    is_tail = as_tails and index == num_full
                    place = Place(number, sequence.tables[number][index])
                    if is_tail and sequence.tail is not None:
                        place = Place(number, sequence.tail, is_tail)
                    assert place.page != NO_PAGE, f"page {index} of group {number} is handed over, but not held"
                    yield PageKey(number, index, is_tail), place

    def _give_back(self, released: list[Place]) -> None:
        if self._in_step:
            self._deferred += released
        else:
            self._pools.release(released)
