"""A ticket table, and tickets for sequences that need no scheduler."""

from pageferry.core.formats import PageFormat
from pageferry.core.groups import full_group
from pageferry.core.handoff import Ticket, TicketTable
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem

LAYOUT = CacheLayout("f" * 32, PageFormat.parse("fp32"), 4, num_kv_heads=1, head_dim=8, groups=(full_group(3),))
LEASE_S = 30.0
ID = bytes(range(16))


def new_table(incarnation: bytes = b"d1") -> TicketTable:
    return TicketTable(incarnation, LEASE_S, LAYOUT)


def new_sequence(num_tokens: int, pages: list[PageId]) -> Sequence:
    work = WorkItem("request", tuple(range(num_tokens)), SamplingParams(), StopParams(max_tokens=2))
    return Sequence(work, arrival=0.0, tables=[pages])


def issue(
    table: TicketTable,
    *,
    num_tokens: int = 10,
    num_cached_pages: int = 1,
    deadline: float | None = None,
    id: bytes = ID,
) -> Ticket:
    """A ticket for a prompt's pages that aren't cached; the page table has one page of headroom."""
    num_pages = LAYOUT.num_pages(num_tokens)
    sequence = new_sequence(num_tokens, [PageId(10 + index) for index in range(num_pages + 1)])
    places = {PageKey(0, index): Place(0, sequence.tables[0][index]) for index in range(num_cached_pages, num_pages)}
    return table.issue(id, sequence, places=places, covered_tokens=num_tokens, deadline=deadline)


def receive_all(table: TicketTable, ticket: Ticket, now: float) -> None:
    for key in ticket.places:
        table.receive(ticket, key, 0, LAYOUT.num_layers, now)
