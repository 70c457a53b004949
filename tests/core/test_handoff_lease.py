"""What ends a ticket that its peer doesn't: time, and the call that owns it."""

from collections.abc import Callable

import pytest
from ticket_parts import ID, LAYOUT, issue, new_sequence, new_table, receive_all

from pageferry.core.errors import FailedPreconditionError
from pageferry.core.handoff import Ticket, TicketTable
from pageferry.core.handoff_tables import TicketState
from pageferry.core.layout import PageKey, Place
from pageferry.core.pool import PagePool
from pageferry.core.sequence import Sequence


def first_three(sequence: Sequence) -> dict[PageKey, Place]:
    return {PageKey(0, index): Place(0, sequence.tables[0][index]) for index in range(3)}


def late_messages_are_refused(table: TicketTable, ticket: Ticket, state: str) -> None:
    messages: list[Callable[[], object]] = [
        lambda: table.open(ticket.id, "request", LAYOUT, now=50.0),
        lambda: table.receive(ticket, PageKey(0, 1), 0, 3, now=50.0),
        lambda: table.renew(ticket, now=50.0),
        lambda: table.commit(ticket, 10, now=50.0),
    ]
    for message in messages:
        with pytest.raises(FailedPreconditionError, match=f"is {state}: .* is refused"):
            message()


def test_before_open_only_the_deadline_ends_a_ticket() -> None:
    table = new_table()
    forever, bounded = issue(table), issue(table, deadline=1000.0, id=bytes(16))
    assert table.next_expiry() == 1000.0
    assert table.expire(999.9) == []
    assert table.expire(1000.0) == [bounded]
    assert table.next_expiry() is None
    assert forever.state is TicketState.RESERVED


def test_a_push_must_begin_before_the_reservation_ends() -> None:
    table = TicketTable(b"d1", 30.0, LAYOUT, reservation_s=60.0)
    late = issue(table)
    hasty = issue(table, deadline=10.0, id=bytes(16))
    assert (late.expires_at, hasty.expires_at) == (60.0, 10.0)
    assert table.expire(10.0) == [hasty]
    assert table.expire(59.9) == []
    with pytest.raises(FailedPreconditionError, match="is expired: open is refused"):
        table.open(ID, "request", LAYOUT, now=60.0)
    assert table.expire(60.0) == [late]


def test_a_push_that_began_is_bound_by_its_lease_alone() -> None:
    table = TicketTable(b"d1", 30.0, LAYOUT, reservation_s=60.0)
    ticket = issue(table)
    table.open(ID, "request", LAYOUT, now=59.0)
    assert ticket.expires_at == 89.0
    receive_all(table, ticket, now=80.0)
    table.commit(ticket, 10, now=100.0)
    assert table.next_expiry() is None


def test_every_message_renews_the_lease_but_not_beyond_the_deadline() -> None:
    table = new_table()
    ticket = issue(table, deadline=70.0)
    table.open(ID, "request", LAYOUT, now=0.0)
    assert table.next_expiry() == 30.0
    table.renew(ticket, now=20.0)
    assert table.next_expiry() == 50.0
    table.receive(ticket, PageKey(0, 1), 0, 3, now=35.0)
    assert table.next_expiry() == 65.0
    table.receive(ticket, PageKey(0, 2), 0, 3, now=60.0)
    assert table.next_expiry() == 70.0


def test_a_committed_ticket_depends_on_no_peer() -> None:
    table = new_table()
    ticket = issue(table)
    table.open(ID, "request", LAYOUT, now=0.0)
    receive_all(table, ticket, now=0.0)
    table.commit(ticket, 10, now=0.0)
    assert table.next_expiry() is None
    assert table.expire(1e9) == []
    table.consume(ticket)


def test_a_commit_after_the_lease_is_refused_even_before_expiry_is_noticed() -> None:
    table = TicketTable(b"d1", 1.0, LAYOUT)
    pool = PagePool(4)
    pages = pool.allocate(4, reserved=True)
    assert pages is not None
    sequence = new_sequence(10, pages)
    ticket = table.issue(ID, sequence, places=first_three(sequence), covered_tokens=10, deadline=None)
    table.open(ID, "request", LAYOUT, now=0.0)
    receive_all(table, ticket, now=0.5)
    with pytest.raises(FailedPreconditionError, match="is expired: commit is refused") as caught:
        table.commit(ticket, 10, now=5.0)
    assert caught.value.reason == "HANDOFF_EXPIRED"
    assert [expired.sequence for expired in table.expire(5.0)] == [sequence]
    pool.release(sequence.tables[0])
    assert set(pool.allocate(4) or ()) == set(pages)  # others have them now
    late_messages_are_refused(table, ticket, "expired")
    with pytest.raises(AssertionError, match="is expired and has no consume"):
        table.consume(ticket)
    pool.check_integrity()


def test_a_cancel_in_mid_transfer_ends_the_ticket_and_late_messages_are_refused() -> None:
    table = new_table()
    pool = PagePool(4)
    for attempt in range(20):
        pages = pool.allocate(4, reserved=True)
        assert pages is not None
        ticket_id = attempt.to_bytes(16)
        sequence = new_sequence(10, pages)
        ticket = table.issue(ticket_id, sequence, places=first_three(sequence), covered_tokens=10, deadline=None)
        table.open(ticket_id, "request", LAYOUT, now=attempt)
        table.receive(ticket, PageKey(0, 0), 0, 3, now=attempt)
        table.abort(ticket)
        table.abort(ticket)
        pool.release(pages)
        late_messages_are_refused(table, ticket, "aborted")
        pool.check_integrity()
        assert (len(table), pool.num_free) == (0, 4)
    assert table.expire(1e9) == []
