"""Who makes room for whom on a decode worker."""

from collections.abc import Iterable
from itertools import islice, takewhile

from pageferry.core.claims import Claim, Counts
from pageferry.core.page_tables import PageTables
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
    lacking: Counts,
    *,
    num_slots: int = 0,
    kept: Claim | None = None,
) -> list[Sequence]:
    """The first candidates that give what is lacking, and slots; those not needed left out.

    Nobody if all of them are not enough: pages that `kept` has matched, or that others hold too, such as a copy in
    flight, are not given.
    """
    chosen: list[Sequence] = []
    is_enough = False
    for candidate, freed in tables.claims.freed_by(candidates, kept):
        chosen.append(candidate)
        is_enough = _covers(freed, lacking) and _num_slots(chosen) >= num_slots
        if is_enough:
            break
    if not is_enough:
        return []
    for candidate in reversed(chosen[:-1]):
        rest = [other for other in chosen if other is not candidate]
        *_, (_, freed) = tables.claims.freed_by(rest, kept)
        if _num_slots(rest) >= num_slots and _covers(freed, lacking):
            chosen = rest
    return chosen


def _num_slots(sequences: list[Sequence]) -> int:
    return sum(sequence.num_slots for sequence in sequences)


def _covers(freed: Counts, lacking: Counts) -> bool:
    return all(num >= needed for num, needed in zip(freed, lacking, strict=True))


def margin(sequence: Sequence, running: SequenceQueue, tables: PageTables, headroom_pages: int) -> int:
    """Pages of each full group to leave free when a sequence starts.

    They are for the running ones that go before it and would else preempt it: the headroom of those who have none left.
    It doubles with each preemption of the sequence, which bounds how often that happens. Without anyone before it, or
    with someone of a lower priority to be preempted first, it is nothing.
    """
    has_lower = any(other.work.priority > sequence.work.priority for other in islice(reversed(running), 1))
    if has_lower or not tables.claims.can_grow:
        return 0
    pages_each = max(1, headroom_pages) << sequence.num_preemptions if sequence.num_preemptions else headroom_pages
    order = running_order(sequence)
    before = takewhile(lambda other: running_order(other) <= order, running)
    return sum(max(0, min(pages_each, num_growth(other, tables)) - tables.claims.num_spare(other)) for other in before)


def max_positions(sequence: Sequence) -> int:
    """Positions whose keys and values a sequence may come to need: the last token's are never computed."""
    return max(len(sequence.token_ids), sequence.num_prompt + sequence.work.stop.max_tokens - 1)


def num_growth(sequence: Sequence, tables: PageTables) -> int:
    """Pages that a sequence may come to need beyond those of its tokens."""
    num_now, num_shared = len(sequence.token_ids), len(sequence.token_ids) // tables.page_size
    num_each = tables.num_pages(max_positions(sequence)) - num_shared
    return num_shared + sequence.num_slots * num_each - tables.num_pages(num_now)
