"""What page tables would take of the pools, whether that is there, and what would be if others gave up theirs."""

from collections.abc import Container, Iterable, Iterator, Sequence as ListLike
from dataclasses import dataclass

from pageferry.core.errors import FieldViolation, InvalidArgumentError, invalid
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.pool import PageId
from pageferry.core.pools import PagePools
from pageferry.core.prefix_cache import PrefixCache
from pageferry.core.sequence import NO_PAGE, Sequence

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """What page tables would take; it holds as long as the pools do not change.

    With `copies_last`, all of the tokens are cached and one new page of each group is a copy of the last matched one,
    so that the last token can be recomputed without writing to a page that others may read.
    """

    matched: tuple[list[PageId], ...]  # of each group, from the prefix cache; NO_PAGE where none is needed
    num_new: Counts  # of each pool, beyond those
    promised: Counts  # of each group
    lacking: Counts  # of each pool, then of each group's promises: lacks nothing where none is above 0
    copies_last: bool = False


class Claims:
    """Makes claims, and keeps count of what window groups' pools have promised to whom.

    A sequence is promised as many pages of a window group as it can come to hold at once, in steps of at most
    `chunk_tokens`. As all promises together are within the pool, only transfers in flight can hold its pages up.
    """

    def __init__(self, pools: PagePools, layout: CacheLayout, *, prefix_cache: bool, chunk_tokens: int) -> None:
        self.prefix = PrefixCache(pools, layout, is_on=prefix_cache)
        self._pools = pools
        self._groups = layout.groups
        self._page_size = layout.page_size
        self._full = [number for number, group in enumerate(layout.groups) if group.window is None]
        self._chunk_tokens = chunk_tokens
        self._promised: dict[Sequence, Counts] = {}
        self._num_promised = [0] * len(layout.groups)

    @property
    def num_promised(self) -> Counts:
        """Pages of each group that running sequences may come to hold; of a full group none, as they are taken."""
        return tuple(self._num_promised)

    @property
    def can_grow(self) -> bool:
        """Whether a sequence may come to need pages that it was not promised."""
        return bool(self._full)

    def num_spare(self, sequence: Sequence) -> int:
        """Pages that it holds in each full group beyond those of its tokens."""
        needed = self._last_index(sequence) + 1
        if sequence.beams:
            return 0
        return min((len(sequence.tables[number]) for number in self._full), default=needed) - needed

    def has_more_room(self, num_tokens: int) -> bool:
        """Whether the full groups could take so many tokens and more."""
        return all(
            -(-num_tokens // self._page_size) < self._pools.groups[number].num_available for number in self._full
        )

    def check_fits(self, num_tokens: int, *, what: str, num_beams: int = 1, num_shared: int = 0) -> None:
        """Raise InvalidArgumentError, with both numbers, where a group's whole pool could not hold this many tokens.

        In each of `num_beams`, of which the first `num_shared` tokens are the same.
        """
        num_spared = (num_beams - 1) * (num_shared // self._page_size)  # pages of full groups
        for group, pool in zip(self._groups, self._pools.groups, strict=True):
            needed, limit = group.most_live(num_tokens, self._chunk_tokens, self._page_size), pool.num_pages
            needed = num_beams * needed - (num_spared if group.window is None else 0)
            if needed > limit:
                is_full = group.window is None
                where = f" of layers {group}" if len(self._groups) > 1 or not is_full else ""
                chunks = "" if is_full else f" in chunks of {self._chunk_tokens}"
                reach = f", for {limit * self._page_size} tokens" if is_full else ""
                beams = f" in each of {num_beams} beams" if num_beams > 1 else ""
                lacks = f"{needed} pages{where}, for {num_tokens} tokens{beams}{chunks}; the pool has {limit}{reach}"
                text = f"{what} needs {lacks}"
                violations = (FieldViolation("prompt_ids", text),)
                raise InvalidArgumentError(f"prompt_ids: {text}", reason="EXCEEDS_POOL", violations=violations)
        if self._pools.tails is not None and num_beams > self._pools.tails.num_pages:
            most = f"must be at most {self._pools.tails.num_pages}, the open pages of the pool"
            raise invalid("beam.width", num_beams, most, reason="EXCEEDS_POOL")

    def num_cached(self, sequence: Sequence) -> int:
        """How many of its tokens need no computing as the prefix cache stands; takes nothing."""
        if self._is_hit_whole(sequence):
            return len(sequence.token_ids) - 1
        return self._num_hit(sequence, self._last_index(sequence)) * self._page_size

    def to_compute(self, sequence: Sequence, num_positions: int, num_spare: int = 0) -> Claim:
        """What computing the sequence here takes, up to `num_positions` in the end.

        `num_spare` are pages of each full group beyond those of its tokens.
        """
        num_pages = self._last_index(sequence) + 1
        if self._is_hit_whole(sequence):
            matched = self.prefix.pages(sequence, num_pages, (num_pages - 1) * self._page_size)
            num_new = [1 + num_spare * (group.window is None) for group in self._groups]
            claim = self._claim(sequence, matched, num_new, num_positions, copies_last=True)
            if not self.is_lacking(claim):
                return claim
            # No room for both the last pages and their copies: then those pages are computed anew.
        num_hit = self._num_hit(sequence, num_pages - 1)
        num_new = [(num_pages - num_hit + num_spare) * (group.window is None) for group in self._groups]
        return self._claim(sequence, self.prefix.pages(sequence, num_hit), num_new, num_positions)

    def to_receive(self, sequence: Sequence, num_positions: int, num_spare: int = 0) -> Claim:
        """What receiving the sequence's pages takes: the last one always comes from the sender.

        Of window groups only pages that are live at the prompt's end count, for a hit too.
        """
        last = self._last_index(sequence)
        num_hit = self.prefix.num_hit(sequence, last, last * self._page_size)
        num_new = []
        for group in self._groups:
            live = group.live_at_end(len(sequence.token_ids), self._page_size)
            num_new.append(sum(index >= num_hit for index in live) + num_spare * (group.window is None))
        matched = self.prefix.pages(sequence, num_hit, last * self._page_size)
        return self._claim(sequence, matched, num_new, num_positions)

    def is_lacking(self, claim: Claim, num_kept_free: int = 0) -> bool:
        """Whether it can't be taken, or not with so many pages of each full group left."""
        return any(num + num_kept_free * (pool in self._full) > 0 for pool, num in enumerate(claim.lacking))

    def promise(self, sequence: Sequence, claim: Claim) -> None:
        """The claim is taken."""
        self._promised[sequence] = claim.promised
        self._num_promised = [num + more for num, more in zip(self._num_promised, claim.promised, strict=True)]

    def forgo(self, sequence: Sequence) -> None:
        """The sequence gives all its pages back, if it has any."""
        for number, num in enumerate(self._promised.pop(sequence, ())):
            self._num_promised[number] -= num

    def growth_lacking(self, growth: ListLike[int]) -> Counts:
        """What so many pages of each pool lack in full groups, and of tails, as a claim has it."""
        counts = [0] * (len(self._pools.all) + len(self._groups))
        for number in (*self._full, *range(len(self._groups), len(self._pools.all))):
            counts[number] = max(0, growth[number] - self._pools.all[number].num_available)
        return tuple(counts)

    def freed_by(self, sequences: Iterable[Sequence], kept: Claim | None) -> Iterator[tuple[Sequence, Counts]]:
        """Each sequence with what becomes available, as a claim lacks it, if it and those before it go.

        Pages that `kept` has matched are not counted, nor those that others hold too, such as a copy in flight.
        """
        references = dict.fromkeys(places(kept.matched) if kept else (), -1)  # never as many as there are
        num_pools = len(self._pools.all)
        freed = [0] * (num_pools + len(self._groups))
        for sequence in sequences:
            for place in held_places(sequence):
                number = references.get(place, 0)
                if number >= 0:
                    references[place] = number + 1
                    pool = num_pools - 1 if place.is_tail else place.group
                    freed[pool] += self._pools.of(place).ref_count(place.page) == number + 1
            for entry, num_promised in enumerate(self._promised[sequence], num_pools):
                freed[entry] += num_promised
            yield sequence, tuple(freed)

    def _claim(
        self,
        sequence: Sequence,
        matched: tuple[list[PageId], ...],
        num_new: list[int],
        num_positions: int,
        *,
        copies_last: bool = False,
    ) -> Claim:
        num_tails = [1] if self._pools.tails is not None else []
        lacking = [
            # Matched pages that nobody holds count as available until they are taken.
            num + sum(page != NO_PAGE and pool.ref_count(page) == 0 for page in pages) - pool.num_available
            for pool, pages, num in zip(self._pools.all, (*matched, []), num_new + num_tails, strict=False)
        ]
        promised = []
        for number, (group, pool) in enumerate(zip(self._groups, self._pools.groups, strict=True)):
            at_once = sum(page != NO_PAGE for page in matched[number]) + num_new[number]
            most = max(at_once, group.most_live(num_positions, self._chunk_tokens, self._page_size))
            promised.append(0 if group.window is None else most * sequence.num_slots)  # for each of its beams
            lacking.append(promised[number] + self._num_promised[number] - pool.num_pages)
        return Claim(matched, (*num_new, *num_tails), tuple(promised), tuple(lacking), copies_last)

    def _num_hit(self, sequence: Sequence, most: int) -> int:
        """Pages from its first on that are cached; none where its whole prompt is to be computed."""
        return 0 if sequence.wants_prompt_logprobs else self.prefix.num_hit(sequence, most)

    def _last_index(self, sequence: Sequence) -> int:
        """Index of the page that its last token lies in."""
        return (len(sequence.token_ids) - 1) // self._page_size

    def _is_hit_whole(self, sequence: Sequence) -> bool:
        """Whether all of its tokens are cached, so that its last page can be copied."""
        num_pages, rest = divmod(len(sequence.token_ids), self._page_size)
        if rest or self._pools.tails is not None or sequence.wants_prompt_logprobs:
            return False
        return self.prefix.num_hit(sequence, num_pages, (num_pages - 1) * self._page_size) == num_pages


def places(tables: Iterable[ListLike[PageId]], start: int = 0, end: int | None = None) -> Iterator[Place]:
    """Of the pages at indices `start` to `end` of each table."""
    for number, table in enumerate(tables):
        for page in table[start:end]:
            if page != NO_PAGE:
                yield Place(number, page)


def spread(pages: Iterable[PageId], indices: Iterable[int], live: Container[int]) -> Iterator[PageId]:
    """A table's entries at the indices, with pages where they are live, and the pages that are left behind them."""
    rest = iter(pages)
    for index in indices:
        yield next(rest) if index in live else NO_PAGE
    yield from rest


def held_places(sequence: Sequence, *, with_beams: bool = True) -> list[Place]:
    """All that it holds, and each of its beams; of a tail one place alone."""
    held = list(places(sequence.tables))
    if sequence.tail is not None:
        held.append(Place(0, sequence.tail, is_tail=True))
    for beam in sequence.beams if with_beams else ():
        held += held_places(beam)
    return held
