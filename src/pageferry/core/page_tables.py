"""A sequence's page tables, one for each cache group: filled from the prefix cache and the pools, and given back.

Pages of a full group are taken before they are needed, for the whole prompt when it starts and one by one behind it.
Those of a window group are promised when a sequence starts, as many as it can come to hold at once; it takes them
chunk by chunk, and gives those behind the window back at the end of the step.
"""

from collections import Counter
from collections.abc import Iterator

from pageferry.core.claims import Claim, Claims, Counts, held_places, places, spread
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.pools import PagePools
from pageferry.core.sequence import NO_PAGE, Sequence, page_table


class PageTables:
    """Gives sequences their pages and takes them back. One per scheduler, which owns the pools' thread.

    Only full pages are ever shared, and a chunk starts behind them: so that a sequence writes to no page of another's.
    But for beams: they share their open pages and tails too, each of which is copied before the next one writes to it.
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
        self._copies: dict[Place, Place] = {}  # of each target its source, to which the copy holds a reference

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
                self._copies[Place(number, pages[0])] = Place(number, table.pop())  # with our reference
            indices = range(len(table), self.num_pages(len(sequence.token_ids)))
            live = set(group.live_at_end(len(sequence.token_ids), self.page_size))
            table.extend(spread(pages, indices, live) if reserved else pages)
        self.claims.promise(sequence, claim)
        sequence.num_computed = min(len(claim.matched[0]) * self.page_size, len(sequence.token_ids) - 1)
        if sequence.num_preemptions == 0:
            sequence.num_cached = sequence.num_computed

    def cover(self, sequence: Sequence, end: int) -> bool:
        """Take the pages that computing up to position `end` lacks. False, with nothing changed, if there are none.

        For those of window groups, which were promised, that is only while transfers in flight hold such pages.
        """
        num_pages = self.num_pages(end)
        if sequence.root is not None:
            return self._cover_apart([(sequence, end)])
        if len(min(sequence.tables, key=len)) >= num_pages:  # as mostly: a page is lacking once in page_size steps
            return True
        pairs = list(zip(self._pools.groups, sequence.tables, strict=True))
        if any(num_pages - len(table) > pool.num_available for pool, table in pairs):
            return False
        for pool, table in pairs:
            table.extend(pool.allocate(max(0, num_pages - len(table))) or ())
        return True

    def cover_next(self, sequence: Sequence) -> bool:
        """`cover` the next position, of a beam search in all of its beams, or in none."""
        if not sequence.beams:
            return self.cover(sequence, sequence.num_computed + 1)
        return self._cover_apart([(beam, beam.num_computed + 1) for beam in sequence.beams])

    def next_lacking(self, sequence: Sequence) -> Counts:
        """What `cover_next` lacks in full groups, and of tails, as a claim has it."""
        wanted = [(one, one.num_computed + 1) for one in sequence.members]
        return self.claims.growth_lacking(self._growth(wanted, self._shared_open(sequence.beams)))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give a new beam, whose tokens begin with all that the parent has computed, a reference to each of its pages.

        Pages beyond those, which the parent has for its growth, stay with it.
        """
        child.tables = [page_table(table[: self.num_pages(parent.num_computed)]) for table in parent.tables]
        child.tail, child.page_hashes = parent.tail, list(parent.page_hashes)
        child.num_computed = parent.num_computed
        self._pools.acquire(held_places(child))

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
        """Give all its pages back, and its beams' ones."""
        self.claims.forgo(sequence)
        for one in (sequence, *sequence.beams):
            self.give_up(one)

    def give_up(self, sequence: Sequence) -> None:
        """Give back the pages that it holds itself; what it was promised stays its own."""
        held = held_places(sequence, with_beams=False)
        sequence.tables, sequence.tail = [], None
        undone = [self._copies.pop(place) for place in held if place in self._copies] if self._copies else []
        self._give_back(held + undone)

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
        copies, self._copies = self._copies, {}
        self._deferred += copies.values()
        return tuple(
            (source._replace(group=group), target._replace(group=group))
            for target, source in copies.items()
            for group in (range(len(self._layout.groups)) if target.is_tail else (target.group,))
        )

    def end_step(self) -> None:
        self._in_step = False
        self._pools.release(self._deferred)
        self._deferred = []

    def _cover_apart(self, wanted: list[tuple[Sequence, int]]) -> bool:
        """`cover` beams up to their ends, in pages that they can write to. False, with nothing changed, if it can't."""
        shared = self._shared_open([beam for beam, _ in wanted])
        growth = self._growth(wanted, shared)
        if any(num > pool.num_available for pool, num in zip(self._pools.all, growth, strict=True)):
            return False
        for beam, place in shared:
            (page,) = self._pools.of(place).allocate(1) or (NO_PAGE,)
            if place.is_tail:
                beam.tail = page
            else:
                beam.tables[place.group][beam.num_computed // self.page_size] = page
            self._copies[place._replace(page=page)] = place  # with the beam's reference
        for beam, end in wanted:
            for pool, table in zip(self._pools.groups, beam.tables, strict=True):
                table.extend(pool.allocate(max(0, self.num_pages(end) - len(table))) or ())
        return True

    def _shared_open(self, beams: list[Sequence]) -> list[tuple[Sequence, Place]]:
        """The open pages and tails that others hold too; where all holders are among `beams`, the last keeps it."""
        taken = Counter(self._copies.values())  # references of copies that are to be made
        shared = []
        for beam in beams:
            for place in self._open_places(beam):
                if self._pools.of(place).ref_count(place.page) - taken[place] > 1:
                    taken[place] += 1
                    shared.append((beam, place))
        return shared

    def _open_places(self, sequence: Sequence) -> Iterator[Place]:
        """What holds a part of the page that it writes to next."""
        if sequence.num_computed % self.page_size:
            index = sequence.num_computed // self.page_size
            yield from places(sequence.tables, index, index + 1)
        if sequence.tail is not None:
            yield Place(0, sequence.tail, is_tail=True)

    def _growth(self, wanted: list[tuple[Sequence, int]], copied: list[tuple[Sequence, Place]]) -> list[int]:
        """Pages of each pool that sequences lack up to their ends, and that copies take."""
        counts = [0] * len(self._pools.all)
        for sequence, end in wanted:
            for number, table in enumerate(sequence.tables):
                counts[number] += max(0, self.num_pages(end) - len(table))
        for _, place in copied:
            counts[-1 if place.is_tail else place.group] += 1
        return counts

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
