from dataclasses import replace

import pytest
from ticket_parts import ID, LAYOUT, LEASE_S, issue, new_sequence, new_table, receive_all

from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError
from pageferry.core.handoff import MAX_REMEMBERED, TicketTable
from pageferry.core.handoff_tables import SENDER_TABLE, TICKET_TABLE, SenderState, TicketEvent, TicketState, fire
from pageferry.core.layout import PageKey, Place
from pageferry.core.pool import PageId


def test_a_hand_off_from_ticket_to_use() -> None:
    table = new_table()
    ticket = issue(table)
    assert (ticket.state, len(table)) == (TicketState.RESERVED, 1)
    assert table.open(ID, "request", LAYOUT, now=1.0) is ticket
    table.receive(ticket, PageKey(0, 1), 0, 2, now=2.0)
    table.receive(ticket, PageKey(0, 1), 2, 1, now=3.0)
    table.receive(ticket, PageKey(0, 2), 0, 3, now=4.0)
    table.commit(ticket, covered_tokens=10, now=5.0)
    assert (ticket.state, len(table)) == (TicketState.COMMITTED, 1)
    table.consume(ticket)
    assert (ticket.state, len(table)) == (TicketState.CONSUMED, 0)


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 127, 128])
@pytest.mark.parametrize("num_cached_pages", [0, 3])
def test_both_sides_count_the_pages_of_the_prompt_alone(num_tokens: int, num_cached_pages: int) -> None:
    layout = replace(LAYOUT, page_size=16)
    table = TicketTable(b"d1", LEASE_S, layout)
    num_pages = -(-num_tokens // 16)
    sequence = new_sequence(num_tokens, [PageId(index) for index in range(num_pages + 1)])
    places = {PageKey(0, index): Place(0, PageId(index)) for index in range(num_cached_pages, num_pages)}
    last = PageKey(0, num_pages - 1)
    without_last = {key: place for key, place in places.items() if key != last}
    for wrong in (without_last, {**places, PageKey(0, num_pages): Place(0, PageId(num_pages))}):
        with pytest.raises(AssertionError, match=f"{num_tokens} tokens end with .*index={num_pages - 1}"):
            table.issue(ID, sequence, places=wrong, covered_tokens=num_tokens, deadline=None)
    ticket = table.issue(ID, sequence, places=places, covered_tokens=num_tokens, deadline=None)
    sequence.append(7)  # the token that the sender sampled is in no page yet
    table.open(ID, "request", layout, now=0.0)
    for page_index in range(num_cached_pages, num_pages):
        table.receive(ticket, PageKey(0, page_index), 0, layout.num_layers, now=0.0)
    with pytest.raises(FailedPreconditionError, match=f"covered_tokens is {num_tokens + 1}, {num_tokens} are expected"):
        table.commit(ticket, num_tokens + 1, now=0.0)
    table.commit(ticket, num_tokens, now=0.0)


@pytest.mark.parametrize("bad_id", [b"", ID[:15], ID + b"x"])
def test_an_id_has_16_bytes(bad_id: bytes) -> None:
    with pytest.raises(AssertionError, match="must be 16 bytes that were never used"):
        issue(new_table(), id=bad_id)


def test_an_id_is_never_used_again() -> None:
    table = new_table()
    ticket = issue(table)
    with pytest.raises(AssertionError, match="never used"):
        issue(table)
    table.abort(ticket)
    with pytest.raises(AssertionError, match="never used"):
        issue(table)


def test_a_ticket_is_opened_once() -> None:
    table = new_table()
    ticket = issue(table)
    table.open(ID, "request", LAYOUT, now=0.0)
    with pytest.raises(FailedPreconditionError, match="ticket 00010203 is filling: open is refused") as caught:
        table.open(ID, "request", LAYOUT, now=1.0)
    assert caught.value.reason == "HANDOFF_FILLING"
    receive_all(table, ticket, now=2.0)  # the first push goes on
    table.commit(ticket, 10, now=3.0)


def test_a_ticket_of_an_older_incarnation_is_unknown() -> None:
    issue(new_table(b"d1"))
    with pytest.raises(FailedPreconditionError, match="ticket 00010203 is unknown to incarnation 6432") as caught:
        new_table(b"d2").open(ID, "request", LAYOUT, now=0.0)
    assert caught.value.reason == "UNKNOWN_TICKET"
    assert ID.hex() not in caught.value.message  # it is a secret


def test_layouts_that_differ_are_refused_with_both_values() -> None:
    table = new_table()
    ticket = issue(table)
    with pytest.raises(FailedPreconditionError, match=r"page_size 4 \(receiver\) and 8 \(sender\)") as caught:
        table.open(ID, "request", replace(LAYOUT, page_size=8), now=0.0)
    assert caught.value.reason == "LAYOUT_MISMATCH"
    assert ticket.state is TicketState.RESERVED


def test_a_ticket_opens_for_its_own_request_only() -> None:
    table = new_table()
    ticket = issue(table)
    for other in ("another", ""):
        with pytest.raises(FailedPreconditionError, match="is of another request") as caught:
            table.open(ID, other, LAYOUT, now=0.0)
        assert caught.value.reason == "TICKET_OF_ANOTHER_REQUEST"
        assert ID.hex() not in caught.value.message
    assert ticket.state is TicketState.RESERVED
    assert table.open(ID, "request", LAYOUT, now=0.0) is ticket


@pytest.mark.parametrize(
    ("page_index", "first_layer", "num_layers", "field"),
    [
        (0, 0, 3, "frame.page_index is 'page 0 of group 0', must be one of the 2 pages"),
        (3, 0, 3, "frame.page_index is 'page 3 of group 0', must be one of the 2 pages"),
        (1, 0, 4, r"frame.first_layer, num_layers is \(0, 4\)"),
        (1, 3, 1, r"frame.first_layer, num_layers is \(3, 1\)"),
        (1, -1, 2, r"frame.first_layer, num_layers is \(-1, 2\)"),
        (1, 1, 0, r"frame.first_layer, num_layers is \(1, 0\)"),
    ],
)
def test_a_frame_out_of_range_is_refused(page_index: int, first_layer: int, num_layers: int, field: str) -> None:
    table = new_table()
    ticket = issue(table)
    table.open(ID, "request", LAYOUT, now=0.0)
    with pytest.raises(InvalidArgumentError, match=field):
        table.receive(ticket, PageKey(0, page_index), first_layer, num_layers, now=0.0)
    assert len(ticket.arrived) == 0


@pytest.mark.parametrize(("first_layer", "num_layers"), [(0, 2), (1, 1), (0, 3), (1, 2)])
def test_a_layer_that_comes_twice_is_refused(first_layer: int, num_layers: int) -> None:
    table = new_table()
    ticket = issue(table)
    table.open(ID, "request", LAYOUT, now=0.0)
    table.receive(ticket, PageKey(0, 1), 0, 2, now=0.0)
    with pytest.raises(InvalidArgumentError, match=r"page 1 of group 0', but some of its layers . to . came before"):
        table.receive(ticket, PageKey(0, 1), first_layer, num_layers, now=0.0)
    table.receive(ticket, PageKey(0, 1), 2, 1, now=0.0)


def test_a_hand_off_that_lacks_a_page_is_never_committed() -> None:
    table = new_table()
    ticket = issue(table, num_tokens=24, num_cached_pages=0)
    table.open(ID, "request", LAYOUT, now=0.0)
    for page_index in (0, 1, 2, 4, 5):
        table.receive(ticket, PageKey(0, page_index), 0, 3, now=0.0)
    table.receive(ticket, PageKey(0, 3), 0, 2, now=0.0)
    with pytest.raises(FailedPreconditionError, match="5 of 6 pages came whole") as caught:
        table.commit(ticket, 24, now=0.0)
    assert caught.value.reason == "PAGES_MISSING"
    with pytest.raises(AssertionError, match="is filling and has no consume"):
        table.consume(ticket)


def test_a_ticket_is_consumed_once() -> None:
    table = new_table()
    ticket = issue(table)
    with pytest.raises(AssertionError, match="is reserved and has no consume"):
        table.consume(ticket)
    table.open(ID, "request", LAYOUT, now=0.0)
    receive_all(table, ticket, now=0.0)
    table.commit(ticket, 10, now=0.0)
    with pytest.raises(FailedPreconditionError, match="is committed: commit is refused"):
        table.commit(ticket, 10, now=0.0)
    table.consume(ticket)
    with pytest.raises(AssertionError, match="is already used and has no consume"):
        table.consume(ticket)
    with pytest.raises(FailedPreconditionError, match="is already used: open is refused"):
        table.open(ID, "request", LAYOUT, now=1.0)


def test_what_is_over_is_remembered_within_bounds() -> None:
    table = new_table()
    for number in range(MAX_REMEMBERED + 1):
        table.abort(issue(table, id=number.to_bytes(16)))
    for number, reason in ((0, "UNKNOWN_TICKET"), (1, "HANDOFF_ABORTED"), (MAX_REMEMBERED, "HANDOFF_ABORTED")):
        with pytest.raises(FailedPreconditionError) as caught:
            table.open(number.to_bytes(16), "request", LAYOUT, now=0.0)
        assert caught.value.reason == reason


def test_in_every_state_the_peers_late_events_are_in_the_tables() -> None:
    over = (TicketState.CONSUMED, TicketState.EXPIRED, TicketState.ABORTED)
    peers = (TicketEvent.OPEN, TicketEvent.FRAME, TicketEvent.COMMIT)
    for state in over:
        assert not state.is_live
        for event in peers:
            with pytest.raises(FailedPreconditionError):
                fire(TICKET_TABLE, state, event, "ticket")
        assert fire(TICKET_TABLE, state, TicketEvent.ABORT, "ticket") is state
        for event in (TicketEvent.CONSUME, TicketEvent.EXPIRE):
            with pytest.raises(AssertionError):
                fire(TICKET_TABLE, state, event, "ticket")
    assert {state for state, _ in TICKET_TABLE} == set(TicketState)
    assert {state for state, _ in SENDER_TABLE} == set(SenderState)
