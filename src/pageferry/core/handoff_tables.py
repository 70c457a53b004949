"""The two sides of a hand-off as tables: which event is taken in which state, and what it leads to.

A peer may be late: its events in states that no longer take them are in the table with outcome REFUSE. What is not in
the table at all is a mistake of our own.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final, Literal, TypeVar

from pageferry.core.errors import FailedPreconditionError


class Outcome(Enum):
    REFUSE = "refuse"


REFUSE: Final = Outcome.REFUSE


class TicketState(Enum):
    RESERVED = "reserved"
    FILLING = "filling"
    COMMITTED = "committed"
    CONSUMED = "already used"
    EXPIRED = "expired"
    ABORTED = "aborted"

    @property
    def is_live(self) -> bool:
        return self in (TicketState.RESERVED, TicketState.FILLING, TicketState.COMMITTED)


class TicketEvent(Enum):
    OPEN = "open"  # the peer's
    FRAME = "frame"  # the peer's; a keep-alive too
    COMMIT = "commit"  # the peer's
    CONSUME = "consume"
    ABORT = "abort"
    EXPIRE = "expire"


class SenderState(Enum):
    IDLE = "idle"
    OPENED = "opened"
    SHIPPING = "shipping"
    COMMITTING = "committing"  # Commit is written, not yet answered
    COMMITTED = "committed"
    ABORTED = "aborted"


class SenderEvent(Enum):
    OPENED = "opened"  # the peer's
    SHIP = "ship"
    ACKED = "acked"  # the peer's
    COMMIT = "commit"
    COMMITTED = "committed"  # the peer's
    ABORT = "abort"


State = TypeVar("State", TicketState, SenderState)
Event = TypeVar("Event", TicketEvent, SenderEvent)

# To a peer these are over, and so its events there are late.
_CLOSED_TICKETS = (TicketState.COMMITTED, TicketState.CONSUMED, TicketState.EXPIRED, TicketState.ABORTED)
_RECEIVED = (TicketEvent.OPEN, TicketEvent.FRAME, TicketEvent.COMMIT)
_CLOSED_SENDERS = (SenderState.COMMITTED, SenderState.ABORTED)
_ANSWERS = (SenderEvent.OPENED, SenderEvent.ACKED, SenderEvent.COMMITTED)

TICKET_TABLE: Mapping[tuple[TicketState, TicketEvent], TicketState | Literal[Outcome.REFUSE]] = {
    (TicketState.RESERVED, TicketEvent.OPEN): TicketState.FILLING,
    (TicketState.RESERVED, TicketEvent.ABORT): TicketState.ABORTED,
    (TicketState.RESERVED, TicketEvent.EXPIRE): TicketState.EXPIRED,
    (TicketState.FILLING, TicketEvent.OPEN): REFUSE,
    (TicketState.FILLING, TicketEvent.FRAME): TicketState.FILLING,
    (TicketState.FILLING, TicketEvent.COMMIT): TicketState.COMMITTED,
    (TicketState.FILLING, TicketEvent.ABORT): TicketState.ABORTED,
    (TicketState.FILLING, TicketEvent.EXPIRE): TicketState.EXPIRED,
    (TicketState.COMMITTED, TicketEvent.CONSUME): TicketState.CONSUMED,
    (TicketState.COMMITTED, TicketEvent.ABORT): TicketState.ABORTED,
    (TicketState.COMMITTED, TicketEvent.EXPIRE): TicketState.EXPIRED,
    (TicketState.CONSUMED, TicketEvent.ABORT): TicketState.CONSUMED,
    (TicketState.EXPIRED, TicketEvent.ABORT): TicketState.EXPIRED,
    (TicketState.ABORTED, TicketEvent.ABORT): TicketState.ABORTED,
    **{(state, event): REFUSE for state in _CLOSED_TICKETS for event in _RECEIVED},
}

SENDER_TABLE: Mapping[tuple[SenderState, SenderEvent], SenderState | Literal[Outcome.REFUSE]] = {
    (SenderState.IDLE, SenderEvent.OPENED): SenderState.OPENED,
    (SenderState.IDLE, SenderEvent.ACKED): REFUSE,
    (SenderState.IDLE, SenderEvent.COMMITTED): REFUSE,
    (SenderState.IDLE, SenderEvent.ABORT): SenderState.ABORTED,
    (SenderState.OPENED, SenderEvent.OPENED): REFUSE,
    (SenderState.OPENED, SenderEvent.SHIP): SenderState.SHIPPING,
    (SenderState.OPENED, SenderEvent.ACKED): REFUSE,
    (SenderState.OPENED, SenderEvent.COMMITTED): REFUSE,
    (SenderState.OPENED, SenderEvent.ABORT): SenderState.ABORTED,
    (SenderState.SHIPPING, SenderEvent.OPENED): REFUSE,
    (SenderState.SHIPPING, SenderEvent.SHIP): SenderState.SHIPPING,
    (SenderState.SHIPPING, SenderEvent.ACKED): SenderState.SHIPPING,
    (SenderState.SHIPPING, SenderEvent.COMMIT): SenderState.COMMITTING,
    (SenderState.SHIPPING, SenderEvent.COMMITTED): REFUSE,
    (SenderState.SHIPPING, SenderEvent.ABORT): SenderState.ABORTED,
    (SenderState.COMMITTING, SenderEvent.OPENED): REFUSE,
    (SenderState.COMMITTING, SenderEvent.ACKED): SenderState.COMMITTING,
    (SenderState.COMMITTING, SenderEvent.COMMITTED): SenderState.COMMITTED,
    (SenderState.COMMITTING, SenderEvent.ABORT): SenderState.ABORTED,
    (SenderState.COMMITTED, SenderEvent.ABORT): SenderState.COMMITTED,
    # Pages go on being computed for a moment after a push broke, so that shipping them is late, not wrong.
    (SenderState.ABORTED, SenderEvent.SHIP): REFUSE,
    (SenderState.ABORTED, SenderEvent.COMMIT): REFUSE,
    (SenderState.ABORTED, SenderEvent.ABORT): SenderState.ABORTED,
    **{(state, event): REFUSE for state in _CLOSED_SENDERS for event in _ANSWERS},
}


def fire(
    table: Mapping[tuple[State, Event], State | Literal[Outcome.REFUSE]], state: State, event: Event, subject: str
) -> State:
    """The state that follows. FailedPreconditionError where the table refuses, AssertionError where it has no entry.

    `subject` begins the refusal's message, e.g. "ticket 1f2e3d4c".
    """
    following = table.get((state, event))
    if following is None:
        raise AssertionError(f"{subject} is {state.value} and has no {event.value}")
    if following is REFUSE:
        raise refusal(subject, state, event.value)
    return following


def refusal(subject: str, state: TicketState | SenderState, event: str) -> FailedPreconditionError:
    reason = f"HANDOFF_{state.name}"
    return FailedPreconditionError(f"{subject} is {state.value}: {event} is refused", reason=reason)
