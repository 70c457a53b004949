"""The tickets of hand-offs and the references that copies in flight hold: the engine thread's side, and the loop's."""

from collections.abc import Callable, Iterable, Mapping, Sequence as ListLike
from dataclasses import dataclass
from typing import Any

from pageferry.core.errors import FailedPreconditionError, PageferryError, UnavailableError, invalid
from pageferry.core.handoff import Ticket, TicketTable
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.plan import SampledToken
from pageferry.core.pools import PagePools
from pageferry.core.sequence import Sequence
from pageferry.runtime.engine_thread import EngineThread
from pageferry.runtime.frames import FrameKey
from pageferry.runtime.tickets import Grant

Places = Mapping[PageKey, Place]


@dataclass(frozen=True, slots=True)
class DeskActions:
    """What the desk asks of others: which pages a sequence is to receive, to start one whose pages are all there, to
    fail one, to end an open push.
    """

    expected: Callable[[Sequence], Places]
    activate: Callable[[Sequence, SampledToken | None, float], None]
    fail: Callable[[Sequence, PageferryError], None]
    end_push: Callable[[Grant, PageferryError], None]


class TicketDesk:
    """Issues tickets and takes the commands of pushes. Runs on the engine's thread."""

    def __init__(self, tickets: TicketTable, pools: PagePools, actions: DeskActions) -> None:
        self._tickets = tickets
        self._pools = pools
        self._actions = actions
        self._live: dict[Sequence, Ticket] = {}
        self._pushes: dict[Grant, Ticket] = {}  # open ones, which hold a reference to each page to receive

    @property
    def num_live(self) -> int:
        return len(self._live)

    def issue(self, ticket_id: bytes, sequence: Sequence) -> None:
        """Issue a ticket for a sequence whose pages are reserved."""
        self._live[sequence] = self._tickets.issue(
            ticket_id,
            sequence,
            places=self._actions.expected(sequence),
            covered_tokens=len(sequence.token_ids),
            deadline=sequence.deadline,
        )

    def open(self, push: Grant, ticket_id: bytes, request_id: str, layout: CacheLayout, now: float) -> Places:
        """Open a ticket's push: the pages to receive, with a reference to each. The caller owes `close`."""
        ticket = self._tickets.open(ticket_id, request_id, layout, now)
        self._pools.acquire(ticket.places.values())
        self._pushes[push] = ticket
        return ticket.places

    def receive(self, push: Grant, frames: Iterable[FrameKey], now: float) -> None:
        """Record frames that are copied and have matched (none: a sign of life).

        What comes after the ticket's end changes nothing: the push has been told, or is about to be.
        """
        ticket = self._pushes[push]
        try:
            self._tickets.renew(ticket, now)
            for page, first_layer, num_layers in frames:
                self._tickets.receive(ticket, page, first_layer, num_layers, now)
        except FailedPreconditionError:
            return

    def commit(self, push: Grant, covered_tokens: int, first: tuple[int, SampledToken] | None, now: float) -> None:
        """Start the sequence on its pages. FailedPreconditionError, and nothing changed, where something is missing."""
        ticket = self._pushes[push]
        sequence = ticket.sequence
        if first is not None and first[0] != sequence.num_output:
            raise invalid("commit.first_tokens.position", first[0], f"must be {sequence.num_output}")
        if first is not None and sequence.work.beam is not None:
            raise invalid("commit.first_tokens", "a token", "must be empty for a beam search")
        self._tickets.commit(ticket, covered_tokens, now)
        self._tickets.consume(ticket)
        del self._live[sequence]
        self._actions.activate(sequence, first[1] if first else None, now)

    def close(self, push: Grant, error: PageferryError | None) -> None:
        """The push is over and nothing is copied any more; before its commit that breaks the ticket for good."""
        if push not in self._pushes:
            return
        ticket = self._pushes.pop(push)
        self._pools.release(ticket.places.values())
        if self._live.pop(ticket.sequence, None) is not None:
            self._tickets.abort(ticket)
            self._actions.fail(ticket.sequence, _broken(error))

    def drop(self, sequence: Sequence, error: PageferryError) -> None:
        """The sequence is over: abort its ticket, if it has a live one."""
        ticket = self._live.pop(sequence, None)
        if ticket is not None:
            self._tickets.abort(ticket)
            self._end_push(ticket, error)

    def expire(self, now: float) -> None:
        """Fail the sequences of hand-offs whose time is up."""
        for ticket in self._tickets.expire(now):
            del self._live[ticket.sequence]
            error = UnavailableError("the hand-off's sender was silent: its lease ran out", reason="HANDOFF_EXPIRED")
            self._end_push(ticket, error)
            self._actions.fail(ticket.sequence, error)

    def wait(self, now: float) -> float | None:
        """Seconds until `expire` has something to do."""
        expiry = self._tickets.next_expiry()
        return None if expiry is None else max(0.0, expiry - now)

    def _end_push(self, ticket: Ticket, error: PageferryError) -> None:
        for push, other in self._pushes.items():
            if other is ticket:
                self._actions.end_push(push, error)


class EngineDesk:
    """The runtime's TicketDesk, on the event loop: passes on what a push asks of the tickets."""

    def __init__(
        self,
        desk: TicketDesk,
        engine: EngineThread[Any],
        clock: Callable[[], float],
        *,
        lease_ms: int,
        vocab_size: int,
    ) -> None:
        self._desk = desk
        self._engine = engine
        self._clock = clock
        self._lease_ms = lease_ms
        self._vocab_size = vocab_size

    async def open(self, ticket: bytes, request_id: str, layout: CacheLayout) -> Grant:
        grant = Grant(ticket, self._lease_ms)  # known to the desk by itself, so that an end can come before its pages
        places: Places | None = None
        now = self._clock
        try:
            places = await self._engine.call(lambda: self._desk.open(grant, ticket, request_id, layout, now()))
        finally:
            if places is None:  # refused, or cancelled while the engine opened it all the same
                self._engine.post(lambda: self._desk.close(grant, None))
        grant.places = places
        return grant

    def receive(self, grant: Grant, frames: ListLike[FrameKey]) -> None:
        self._engine.post(lambda: self._desk.receive(grant, frames, self._clock()))

    async def commit(self, grant: Grant, covered_tokens: int, first: tuple[int, SampledToken] | None) -> None:
        if first is not None and first[1].token_id >= self._vocab_size:
            limit = f"must be below the vocabulary's size, {self._vocab_size}"
            raise invalid("commit.first_tokens.token_id", first[1].token_id, limit)
        await self._engine.call(lambda: self._desk.commit(grant, covered_tokens, first, self._clock()))

    def close(self, grant: Grant, error: PageferryError | None) -> None:
        self._engine.post(lambda: self._desk.close(grant, error))


def _broken(error: PageferryError | None) -> UnavailableError:
    cause = error.message if error else "it ended before its commit"
    return UnavailableError(f"the hand-off broke off: {cause}", reason=error.reason if error else "HANDOFF_BROKEN")
