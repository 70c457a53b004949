"""A ticket table, and tickets for sequences that need no scheduler."""

from pageferry.core.formats import PageFormat
from pageferry.core.handoff import Ticket, TicketTable
from pageferry.core.layout import PageLayout
from pageferry.core.pool import PageId
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem

LAYOUT = PageLayout("f" * 32, PageFormat.parse("fp32"), page_size=4, num_layers=3, num_kv_heads=1, head_dim=8)
LEASE_S = 30.0
ID = bytes(range(16))


def new_table(incarnation: bytes = b"d1") -> TicketTable:
    return TicketTable(incarnation, LEASE_S, LAYOUT)


def new_sequence(num_tokens: int, pages: list[PageId]) -> Sequence:
    work = WorkItem("request", tuple(range(num_tokens)), SamplingParams(), StopParams(max_tokens=2))
    return Sequence(work, arrival=0.0, pages=pages)


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
    return table.issue(
        id,
        sequence,
        first_page=num_cached_pages,
        num_pages=num_pages - num_cached_pages,
        covered_tokens=num_tokens,
        deadline=deadline,
    )


def receive_all(table: TicketTable, ticket: Ticket, now: float) -> None:
    for page_index in range(ticket.first_page, ticket.first_page + ticket.num_expected_pages):
        table.receive(ticket, page_index, 0, LAYOUT.num_layers, now)
