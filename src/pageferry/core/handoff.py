"""The receiving side of a hand-off: tickets, each the right to fill one sequence's pages, once."""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pageferry.core.errors import FailedPreconditionError, invalid
from pageferry.core.handoff_tables import TICKET_TABLE, TicketEvent, TicketState, fire, refusal
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.sequence import Sequence

TICKET_BYTES = 16
MAX_REMEMBERED = 1024  # tickets that are over, kept so that a late peer hears why


class Arrivals:
    """Which layers of the pages to receive have come; `len` is the number of pages of which some have."""

    def __init__(self, pages: Collection[PageKey], layout: CacheLayout) -> None:
        self._pages = pages
        self._layout = layout
        self._layers: dict[PageKey, int] = {}  # bit set

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def num_whole(self) -> int:
        return sum(layers + 1 == 1 << self._layout.of(key).num_layers for key, layers in self._layers.items())

    def add(self, key: PageKey, first_layer: int, num_layers: int) -> None:
        """InvalidArgumentError, and nothing changed, for what is not to come, or has come before."""
        if key not in self._pages:
            raise invalid("frame.page_index", str(key), f"must be one of the {len(self._pages)} pages to receive")
        num_all = self._layout.of(key).num_layers
        if num_layers < 1 or first_layer < 0 or first_layer + num_layers > num_all:
            layers = (first_layer, num_layers)
            raise invalid("frame.first_layer, num_layers", layers, f"must be at least one layer of {num_all}")
        bits = ((1 << num_layers) - 1) << first_layer
        if self._layers.get(key, 0) & bits:
            last = first_layer + num_layers - 1
            raise invalid("frame.page_index", str(key), f"but some of its layers {first_layer} to {last} came before")
        self._layers[key] = self._layers.get(key, 0) | bits


@dataclass(slots=True, eq=False)
class Ticket:
    """The right to fill one sequence's pages, once. Changed by its table only, on the engine's thread."""

    id: bytes
    sequence: Sequence
    places: Mapping[PageKey, Place]  # the pages to receive
    covered_tokens: int  # that they and what is cached hold
    arrived: Arrivals
    deadline: float | None
    expires_at: float | None
    state: TicketState = TicketState.RESERVED

    def lease_to(self, time: float) -> None:
        """Let it end then, or at its deadline if that is before."""
        self.expires_at = time if self.deadline is None else min(time, self.deadline)

    def __str__(self) -> str:
        return f"ticket {self.id[:4].hex()}"  # it is a secret: never whole


class TicketTable:
    """The tickets of one incarnation of a decode worker. Live ones are never forgotten; expiry is by time alone.

    While a ticket is COMMITTED it lives to its deadline, since the Decode call that owns it ends it. Before that it
    depends on a peer: while it is RESERVED it also ends `reservation_s`, if there is one, after its request's arrival,
    and while it is FILLING, `lease_s` after the peer's last message.
    """

    def __init__(
        self, incarnation: bytes, lease_s: float, layout: CacheLayout, *, reservation_s: float | None = None
    ) -> None:
        self.incarnation = incarnation
        self._lease_s = lease_s
        self._reservation_s = reservation_s
        self._layout = layout
        self._live: dict[bytes, Ticket] = {}
        self._over: OrderedDict[bytes, TicketState] = OrderedDict()

    def __len__(self) -> int:
        """Tickets that are live: RESERVED, FILLING or COMMITTED."""
        return len(self._live)

    def issue(
        self,
        ticket_id: bytes,
        sequence: Sequence,
        *,
        places: Mapping[PageKey, Place],
        covered_tokens: int,
        deadline: float | None,
    ) -> Ticket:
        """A ticket for the pages of the first `covered_tokens` that are to be received, the last one of them at least.

        `ticket_id` is 16 random bytes that the caller drew. The caller aborts or consumes the ticket in the end.
        """
        if len(ticket_id) != TICKET_BYTES or ticket_id in self._live or ticket_id in self._over:
            raise AssertionError(f"a ticket's id must be {TICKET_BYTES} bytes that were never used")
        last = self._layout.num_pages(covered_tokens) - 1
        is_tail = bool(self._layout.tails) and covered_tokens % self._layout.page_size > 0
        ends = {PageKey(group, last, is_tail) for group in range(len(self._layout.groups))}
        if not ends <= places.keys() or any(key.index > last or (key.is_tail and key not in ends) for key in places):
            raise AssertionError(f"{covered_tokens} tokens end with {sorted(ends)}, not with {sorted(places)}")
        arrived = Arrivals(places.keys(), self._layout)
        ticket = Ticket(ticket_id, sequence, dict(places), covered_tokens, arrived, deadline, deadline)
        if self._reservation_s is not None:
            ticket.lease_to(sequence.arrival + self._reservation_s)
        self._live[ticket_id] = ticket
        return ticket

    def open(self, ticket_id: bytes, request_id: str, layout: CacheLayout, now: float) -> Ticket:
        """Begin a peer's push. FailedPreconditionError if the ticket isn't waiting for one, or the layouts differ.

        A ticket of another request, or layouts that differ, leave the ticket as it is.
        """
        ticket = self._live.get(ticket_id)
        if ticket is None:
            raise self._unknown(ticket_id)
        if request_id != ticket.sequence.work.request_id:
            raise FailedPreconditionError(f"{ticket} is of another request", reason="TICKET_OF_ANOTHER_REQUEST")
        state = self._following(ticket, TicketEvent.OPEN, now)
        self._layout.check_equal(layout, ours="receiver", theirs="sender")
        ticket.state = state
        ticket.lease_to(now + self._lease_s)
        return ticket

    def renew(self, ticket: Ticket, now: float) -> None:
        """Any message of the push came: its lease begins anew."""
        ticket.state = self._following(ticket, TicketEvent.FRAME, now)
        ticket.lease_to(now + self._lease_s)

    def receive(self, ticket: Ticket, key: PageKey, first_layer: int, num_layers: int, now: float) -> None:
        """Record that a frame's bytes lie in their page and matched their checksum.

        InvalidArgumentError, and nothing changed, if it isn't one of the ticket's or has come before.
        """
        state = self._following(ticket, TicketEvent.FRAME, now)
        ticket.arrived.add(key, first_layer, num_layers)
        ticket.state = state
        ticket.lease_to(now + self._lease_s)

    def commit(self, ticket: Ticket, covered_tokens: int, now: float) -> None:
        """The peer says that all is there. FailedPreconditionError, and nothing changed, where it is not so."""
        state = self._following(ticket, TicketEvent.COMMIT, now)
        if covered_tokens != ticket.covered_tokens:
            message = f"{ticket}: covered_tokens is {covered_tokens}, {ticket.covered_tokens} are expected"
            raise FailedPreconditionError(message, reason="COVERED_TOKENS_MISMATCH")
        if ticket.arrived.num_whole != len(ticket.places):
            message = f"{ticket}: {ticket.arrived.num_whole} of {len(ticket.places)} pages came whole"
            raise FailedPreconditionError(message, reason="PAGES_MISSING")
        ticket.state = state
        ticket.expires_at = ticket.deadline

    def consume(self, ticket: Ticket) -> None:
        """The sequence runs on the pages from now on; raises AssertionError the second time."""
        self._end(ticket, TicketEvent.CONSUME)

    def abort(self, ticket: Ticket) -> None:
        """Give the ticket up, in any state; what ended before stays as it ended."""
        self._end(ticket, TicketEvent.ABORT)

    def expire(self, now: float) -> list[Ticket]:
        """End the tickets whose time is up, and return them; the caller ends their sequences."""
        expired = [ticket for ticket in self._live.values() if _is_due(ticket, now)]
        for ticket in expired:
            self._end(ticket, TicketEvent.EXPIRE)
        return expired

    def next_expiry(self) -> float | None:
        return min((ticket.expires_at for ticket in self._live.values() if ticket.expires_at is not None), default=None)

    def _following(self, ticket: Ticket, event: TicketEvent, now: float) -> TicketState:
        """The state after a peer's event; one whose time is up is refused even before `expire` has seen it."""
        if ticket.state.is_live and _is_due(ticket, now):
            raise refusal(str(ticket), TicketState.EXPIRED, event.value)
        return fire(TICKET_TABLE, ticket.state, event, str(ticket))

    def _end(self, ticket: Ticket, event: TicketEvent) -> None:
        ticket.state = fire(TICKET_TABLE, ticket.state, event, str(ticket))
        if self._live.pop(ticket.id, None) is not None:
            self._over[ticket.id] = ticket.state
            if len(self._over) > MAX_REMEMBERED:
                self._over.popitem(last=False)

    def _unknown(self, ticket_id: bytes) -> FailedPreconditionError:
        subject = f"ticket {ticket_id[:4].hex()}"
        state = self._over.get(ticket_id)
        if state is not None:
            return refusal(subject, state, TicketEvent.OPEN.value)
        return FailedPreconditionError(
            f"{subject} is unknown to incarnation {self.incarnation.hex()}: it is over, or of an earlier incarnation",
            reason="UNKNOWN_TICKET",
        )


def _is_due(ticket: Ticket, now: float) -> bool:
    return ticket.expires_at is not None and ticket.expires_at <= now
