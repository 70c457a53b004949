"""Who makes room for whom on a decode worker."""

from collections.abc import Iterable
from itertools import islice, takewhile

from pageferry.core.page_tables import PageTables
from pageferry.core.pool import PageId
from pageferry.core.sequence import Sequence
from pageferry.core.sequence_queues import Key, SequenceQueue


def running_order(sequence: Sequence) -> Key:
    """First who gets pages first; preempted are the last."""
    return (sequence.work.priority, sequence.arrival)


def waiting_order(sequence: Sequence) -> Key:
    """First who is started first: those that were preempted go before others of their priority."""
    return (sequence.work.priority, sequence.num_preemptions == 0, sequence.arrival)


def choose_victims(
    tables: PageTables,
    candidates: Iterable[Sequence],
    *,
    num_pages: int,
    num_slots: int = 0,
    kept: Iterable[PageId] = (),
) -> list[Sequence]:
    """The first candidates that give so many pages, `kept` ones not counted, and slots; those not needed left out.

    Nobody if all of them are not enough: pages that others hold too, such as a copy in flight, are not given.
    """
    chosen: list[Sequence] = []
    num_freed = 0
    for candidate, num_freed in tables.freed_by(candidates, kept):
        chosen.append(candidate)
        if num_freed >= num_pages and len(chosen) >= num_slots:
            break
    if num_freed < num_pages or len(chosen) < num_slots:
        return []
    for candidate in reversed(chosen[:-1]):
        rest = [other for other in chosen if other is not candidate]
        if len(rest) >= num_slots and tables.num_freed(rest, kept) >= num_pages:
            chosen = rest
    return chosen


def margin(sequence: Sequence, running: SequenceQueue, tables: PageTables, headroom_pages: int) -> int:
    """Pages to leave free when a sequence starts, for the running ones that go before it and would else preempt it.

    That is the headroom of those who have none left. It doubles with each preemption of the sequence, which bounds how
    often that happens. Without anyone before it, or with someone of a lower priority to be preempted first, it is
    nothing.
    """
    if any(other.work.priority > sequence.work.priority for other in islice(reversed(running), 1)):
        return 0
    pages_each = max(1, headroom_pages) << sequence.num_preemptions if sequence.num_preemptions else headroom_pages
    order = running_order(sequence)
    before = takewhile(lambda other: running_order(other) <= order, running)
    return sum(max(0, min(pages_each, num_growth(other, tables)) - _num_spare(other, tables)) for other in before)


def max_positions(sequence: Sequence) -> int:
    """Positions whose keys and values a sequence may come to need: the last token's are never computed."""
    return max(len(sequence.token_ids), sequence.num_prompt + sequence.work.stop.max_tokens - 1)


def num_growth(sequence: Sequence, tables: PageTables) -> int:
    """Pages that a sequence may come to need beyond those of its tokens."""
    return tables.num_pages(max_positions(sequence)) - tables.num_pages(len(sequence.token_ids))


def _num_spare(sequence: Sequence, tables: PageTables) -> int:
    return len(sequence.pages) - tables.num_pages(len(sequence.token_ids))
