"""A sequence's page table: filled from the prefix cache and the pool, given back, its full pages made findable."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pageferry.core.errors import FieldViolation, InvalidArgumentError
from pageferry.core.layout import PageLayout
from pageferry.core.pool import PageId, PagePool
from pageferry.core.prefix import page_hashes
from pageferry.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Claim:
    """What a page table would take: `matched` from the prefix cache, `num_new` pages beyond, and what is lacking.

    With `copies_last`, all of the tokens are cached and one new page is a copy of the last matched page, so that the
    last token can be recomputed without writing to a page that others may read. It holds as long as the pool does
    not change.
    """

    matched: list[PageId]
    num_new: int
    num_lacking: int
    copies_last: bool = False


class PageTables:
    """Gives sequences their pages and takes them back. One per scheduler, which owns the pool's thread.

    Only full pages are ever shared, and a chunk starts behind them: so that a sequence writes to no page of another's.
    Pages released while a step is in flight return to the pool when it ends.
    """

    def __init__(self, pool: PagePool, layout: PageLayout, *, prefix_cache: bool) -> None:
        self._pool = pool
        self._page_size = layout.page_size
        self._layout_key = layout.cache_key()
        self._prefix_cache = prefix_cache
        self._in_step = False
        self._deferred: list[PageId] = []
        self._copies: list[tuple[PageId, PageId]] = []

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def in_step(self) -> bool:
        return self._in_step

    @property
    def num_available(self) -> int:
        return self._pool.num_available

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def check_fits(self, num_tokens: int, *, what: str) -> None:
        """Raise InvalidArgumentError, with both numbers, where the whole pool could not hold this many tokens."""
        needed, limit = self.num_pages(num_tokens), self._pool.num_pages
        if needed > limit:
            text = (
                f"{what} needs {needed} pages, for {num_tokens} tokens; "
                f"the pool has {limit}, for {limit * self._page_size} tokens"
            )
            violations = (FieldViolation("prompt_ids", text),)
            raise InvalidArgumentError(f"prompt_ids: {text}", reason="EXCEEDS_POOL", violations=violations)

    def num_cached(self, sequence: Sequence) -> int:
        """How many of its tokens need no computing as the prefix cache stands; takes nothing."""
        return min(len(self._match(sequence)) * self._page_size, len(sequence.token_ids) - 1)

    def claim(self, sequence: Sequence, num_spare: int = 0) -> Claim:
        """What computing the sequence here takes, with `num_spare` pages beyond its tokens."""
        matched = self._match(sequence)
        if len(matched) * self._page_size >= len(sequence.token_ids):
            claim = self._claim(matched, num_spare + 1, copies_last=True)
            if claim.num_lacking <= 0:
                return claim
            # No room for both the last page and its copy: then that page is computed anew.
            matched.pop()
        return self._claim(matched, self.num_pages(len(sequence.token_ids)) - len(matched) + num_spare)

    def claim_reserved(self, sequence: Sequence, num_spare: int) -> Claim:
        """What receiving the sequence's pages takes: the last one always comes from the sender."""
        matched = self._match(sequence)[: (len(sequence.token_ids) - 1) // self._page_size]
        return self._claim(matched, self.num_pages(len(sequence.token_ids)) - len(matched) + num_spare)

    def take(self, sequence: Sequence, claim: Claim, *, reserved: bool = False) -> None:
        """Fill the page table as claimed, and set how much of it is computed already."""
        self._pool.acquire(claim.matched)
        new = self._pool.allocate(claim.num_new, reserved=reserved)
        assert new is not None, f"a claim that lacks {claim.num_lacking} pages was taken"
        pages = list(claim.matched)
        if claim.copies_last:
            source, target = pages.pop(), new[0]
            self._copies.append((source, target))
            self._deferred.append(source)  # our reference outlives the copy
        sequence.pages = pages + new
        num_matched = len(claim.matched) * self._page_size
        sequence.num_computed = min(num_matched, len(sequence.token_ids) - 1)
        if sequence.num_preemptions == 0:
            sequence.num_cached = sequence.num_computed

    def extend(self, sequence: Sequence) -> bool:
        """Add one page; False, with nothing changed, if there is none."""
        pages = self._pool.allocate(1)
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def release(self, sequence: Sequence) -> None:
        """Give all its pages back."""
        pages, sequence.pages = sequence.pages, []
        if self._in_step:
            self._deferred += pages
        else:
            self._pool.release(pages)

    def freed_by(self, sequences: Iterable[Sequence], kept: Iterable[PageId] = ()) -> Iterator[tuple[Sequence, int]]:
        """Each sequence with how many pages become available, `kept` ones not counted, if it and those before it go."""
        references = dict.fromkeys(kept, -1)  # never as many as there are
        num_freed = 0
        for sequence in sequences:
            for page in sequence.pages:
                number = references.get(page, 0)
                if number >= 0:
                    references[page] = number + 1
                    num_freed += self._pool.ref_count(page) == number + 1
            yield sequence, num_freed

    def num_freed(self, sequences: Iterable[Sequence], kept: Iterable[PageId] = ()) -> int:
        """How many pages become available, `kept` ones not counted, if all of these sequences go."""
        return max((num_freed for _, num_freed in self.freed_by(sequences, kept)), default=0)

    def commit(self, sequence: Sequence, first_page: int) -> None:
        """The pages from `first_page` on have been received (or stay unused as yet): they become ordinary ones."""
        self._pool.commit(sequence.pages[first_page:])

    def store(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the pages findable that positions `start` to `end`, now computed, have filled."""
        first, last = start // self._page_size, end // self._page_size
        if not self._prefix_cache or first == last:
            return
        self._hash(sequence)
        for index in range(first, last):
            self._pool.store(sequence.pages[index], sequence.page_hashes[index])

    def begin_step(self) -> tuple[tuple[PageId, PageId], ...]:
        """A step with these copies (source, target) starts."""
        self._in_step = True
        copies, self._copies = tuple(self._copies), []
        return copies

    def end_step(self) -> None:
        self._in_step = False
        self._pool.release(self._deferred)
        self._deferred = []

    def _claim(self, matched: list[PageId], num_new: int, *, copies_last: bool = False) -> Claim:
        # Matched pages that nobody holds count as available until they are taken.
        num_idle = sum(self._pool.ref_count(page) == 0 for page in matched)
        return Claim(matched, num_new, num_new + num_idle - self._pool.num_available, copies_last)

    def _match(self, sequence: Sequence) -> list[PageId]:
        if not self._prefix_cache:
            return []
        self._hash(sequence)
        return self._pool.match(sequence.page_hashes)

    def _hash(self, sequence: Sequence) -> None:
        known = sequence.page_hashes
        if (len(known) + 1) * self._page_size <= len(sequence.token_ids):
            sequence.page_hashes = page_hashes(
                sequence.token_ids,
                self._page_size,
                salt=sequence.work.cache_salt,
                layout_key=self._layout_key,
                known=known,
            )
