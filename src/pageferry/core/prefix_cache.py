"""What of a sequence's tokens the pools hold already, and the making findable of more."""

from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.pool import PageId, PagePool
from pageferry.core.pools import PagePools
from pageferry.core.prefix import page_hashes
from pageferry.core.sequence import NO_PAGE, Sequence


class PrefixCache:
    """Finds full pages by their hashes, in every cache group at once.

    A hit of some pages needs all of them in a full group, and in a window group those that whoever goes on behind them
    reads: the sinks and the last ones. Takes no references.
    """

    def __init__(self, pools: PagePools, layout: CacheLayout, *, is_on: bool) -> None:
        self._groups: tuple[tuple[CacheGroup, PagePool], ...] = tuple(zip(layout.groups, pools.groups, strict=True))
        self._page_size = layout.page_size
        self._layout_key = layout.cache_key
        self._is_on = is_on

    def num_hit(self, sequence: Sequence, limit: int, start: int | None = None) -> int:
        """Pages of the longest hit of at most `limit`, to go on at position `start`, or else right behind the hit."""
        hashes = self._hashes(sequence)[:limit]
        num = len(hashes)
        for group, pool in self._groups:
            num_leading = num if group.window is None else min(num, group.num_sink_pages(self._page_size))
            run = len(pool.match(hashes[:num_leading]))
            num = run if run < num_leading else num
        before = -1
        while num != before:
            before = num
            for group, pool in self._groups:
                num = self._window_hit(group, pool, hashes[:num], start)
        return num

    def pages(self, sequence: Sequence, num_hit: int, start: int | None = None) -> tuple[list[PageId], ...]:
        """Of each group, the pages of such a hit; NO_PAGE where they are not needed."""
        tables = []
        for group, pool in self._groups:
            table = [NO_PAGE] * num_hit
            end = num_hit * self._page_size
            for index in group.live_pages(end if start is None else start, end, self._page_size):
                (table[index],) = pool.match([sequence.page_hashes[index]])
            tables.append(table)
        return tuple(tables)

    def store(self, sequence: Sequence, start: int, end: int) -> list[Place]:
        """Make the pages findable that positions `start` to `end`, now computed, have filled.

        Where another one holds the same already, the sequence takes a reference to that instead: its own, which are
        returned, are the caller's to give back.
        """
        first, last = start // self._page_size, end // self._page_size
        hashes = self._hashes(sequence) if first < last else []
        replaced = []
        for number, ((_, pool), table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            for index in range(first, min(last, len(hashes))):
                if (page := table[index]) == NO_PAGE:
                    continue
                table[index] = pool.store(page, hashes[index])
                if table[index] != page:
                    pool.acquire([table[index]])
                    replaced.append(Place(number, page))
        return replaced

    def _window_hit(self, group: CacheGroup, pool: PagePool, hashes: list[bytes], start: int | None) -> int:
        """The longest hit in a window group, of which the sinks are there."""
        num = len(hashes)
        while group.window is not None:
            first = group.first_seen(num * self._page_size if start is None else start) // self._page_size
            missing = next((index for index in reversed(range(first, num)) if not pool.match([hashes[index]])), None)
            if missing is None:
                break
            num = missing  # no longer hit does without that page
        return num

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the full pages of its tokens; none where the cache is off."""
        known = sequence.page_hashes
        if self._is_on and (len(known) + 1) * self._page_size <= len(sequence.token_ids):
            sequence.page_hashes = page_hashes(
                sequence.token_ids,
                self._page_size,
                salt=sequence.work.cache_salt,
                layout_key=self._layout_key,
                known=known,
            )
        return sequence.page_hashes
