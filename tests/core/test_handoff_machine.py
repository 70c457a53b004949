"""Under any order of both sides' calls, the network's delays and the passing of time, only what came whole is used."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pageferry.core.claims import held_places
from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.handoff import Ticket, TicketTable
from pageferry.core.handoff_tables import SenderState, TicketState
from pageferry.core.layout import CacheLayout, PageKey
from pageferry.core.page_tables import PageTables
from pageferry.core.pool import PageState
from pageferry.core.pools import PagePools
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sender import Sender
from pageferry.core.sequence import Sequence, WorkItem

KINDS = {"full": ("0-1=full", "fp32"), "window_tails": ("0=window:3,sinks:1;1-2=full", "int8:channel")}
LEASE_S = 10.0
RESERVATION_S = 12.0
NUM_PAGES, NUM_TAILS = 9, 3
PICKS = st.integers(0, 3)
KEYS = st.builds(PageKey, st.integers(0, 2), st.integers(0, 3), st.booleans())
Frame = tuple[PageKey, int, int]  # first layer, number of layers


@dataclass(eq=False)
class Attempt:
    """One hand-off: what the machine knows of it, beside the parts under test."""

    ticket: Ticket
    expected_layers: set[tuple[PageKey, int]]
    state: TicketState = TicketState.RESERVED
    expires_at: float | None = None
    arrived: set[tuple[PageKey, int]] = field(default_factory=set)
    sender: Sender = field(default_factory=Sender)
    to_ship: list[PageKey] = field(default_factory=list)
    frames: deque[Frame] = field(default_factory=deque)  # sent, not yet there
    num_acked: int = 0

    @property
    def is_live(self) -> bool:
        return self.state in (TicketState.RESERVED, TicketState.FILLING, TicketState.COMMITTED)


def layers_of(frame: Frame) -> set[tuple[PageKey, int]]:
    key, first_layer, num_layers = frame
    return {(key, layer) for layer in range(first_layer, first_layer + num_layers)}


class HandoffMachine(RuleBasedStateMachine):
    kind = "full"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        groups, page_format = KINDS[self.kind]
        num_layers = 2 + groups.count(";")
        groups_of = parse_groups(groups, num_layers, None)
        self.layout = CacheLayout("f" * 32, PageFormat.parse(page_format), 2, 1, 8, groups_of)
        self.table = TicketTable(b"this", LEASE_S, self.layout, reservation_s=RESERVATION_S)
        self.pools = PagePools(self.layout, [NUM_PAGES] * len(groups_of), NUM_TAILS)
        self.page_tables = PageTables(self.pools, self.layout, prefix_cache=False, chunk_tokens=2)
        self.attempts: list[Attempt] = []

    def pick(self, pick: int) -> Attempt:
        return self.attempts[-1 - pick % len(self.attempts)]

    def is_due(self, attempt: Attempt) -> bool:
        return attempt.expires_at is not None and attempt.expires_at <= self.now

    def accepts(self, attempt: Attempt, state: TicketState) -> bool:
        return attempt.state is state and not self.is_due(attempt)

    def peer_calls(self, accepted: bool, call: Callable[[], object]) -> None:
        if accepted:
            call()
        else:
            with pytest.raises(FailedPreconditionError):
                call()

    def renewed(self, attempt: Attempt) -> None:
        deadline = attempt.ticket.deadline
        attempt.expires_at = min(self.now + LEASE_S, self.now + LEASE_S if deadline is None else deadline)

    def ended(self, attempt: Attempt, state: TicketState) -> None:
        if attempt.is_live:
            attempt.state = state
            self.page_tables.release(attempt.ticket.sequence)

    @rule(num_tokens=st.integers(1, 6), num_cached=st.integers(0, 2), lifetime=st.none() | st.integers(1, 15))
    def issue(self, num_tokens: int, num_cached: int, lifetime: int | None) -> None:
        work = WorkItem("request", tuple(range(num_tokens)), SamplingParams(), StopParams(max_tokens=2))
        sequence = Sequence(work, self.now)
        claim = self.page_tables.claims.to_receive(sequence, num_tokens)
        if self.page_tables.claims.is_lacking(claim):
            return
        self.page_tables.take(sequence, claim, reserved=True)
        sequence.num_cached = 2 * min(num_cached, (num_tokens - 1) // 2)  # as if so much had been found
        places = self.page_tables.expected(sequence)
        ticket_id, deadline = len(self.attempts).to_bytes(16), None if lifetime is None else self.now + lifetime
        ticket = self.table.issue(ticket_id, sequence, places=places, covered_tokens=num_tokens, deadline=deadline)
        layers = {(key, layer) for key in places for layer in range(self.layout.of(key).num_layers)}
        expires_at = self.now + RESERVATION_S if deadline is None else min(deadline, self.now + RESERVATION_S)
        self.attempts.append(Attempt(ticket, layers, expires_at=expires_at, to_ship=list(places)))

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 9.5]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = [attempt for attempt in self.attempts if attempt.is_live and self.is_due(attempt)]
        assert self.table.expire(self.now) == [attempt.ticket for attempt in due]
        for attempt in due:
            self.ended(attempt, TicketState.EXPIRED)

    @precondition(lambda self: self.attempts)
    @rule(pick=PICKS, num_steps=st.integers(1, 8), step_s=st.sampled_from([0.0, 0.5, 9.5]))
    def both_sides_go_on(self, pick: int, num_steps: int, step_s: float) -> None:
        """The steps of a hand-off in order, as far as neither side has given up."""
        attempt = self.pick(pick)
        for _ in range(num_steps):
            self.now += step_s
            self.nothing_early_or_late_is_taken()
            if attempt.state is TicketState.COMMITTED:
                self.consumed(attempt)
            elif attempt.sender.state is SenderState.ABORTED:
                self.peer_calls(False, lambda: attempt.sender.ship(PageKey(0, 0)))
            elif attempt.sender.state is SenderState.IDLE:
                self.answered(attempt, self.opened(attempt, self.layout), attempt.sender.open)
            elif attempt.frames:
                attempt.num_acked += 1
                arrived = self.frame_arrives(attempt, attempt.frames.popleft())
                self.answered(attempt, arrived, lambda: attempt.sender.acked(attempt.num_acked, self.now))
            elif attempt.to_ship:
                self.shipped(attempt)
            elif attempt.sender.state is SenderState.SHIPPING:
                attempt.sender.commit()
                committed = self.commits(attempt, attempt.ticket.covered_tokens)
                self.answered(attempt, committed, lambda: attempt.sender.committed(self.now))

    def answered(self, attempt: Attempt, accepted: bool, answer: Callable[[], None]) -> None:
        """What the sender hears of its message: the answer, or that its push is broken."""
        if accepted:
            answer()
        else:
            attempt.sender.abort()

    @precondition(lambda self: self.attempts)
    @rule(pick=PICKS, kind=st.sampled_from(["again", "other layout", "other request", "other incarnation"]))
    def a_stray_open_arrives(self, pick: int, kind: str) -> None:
        attempt = self.pick(pick)
        if kind == "other layout":
            self.opened(attempt, replace(self.layout, page_size=4))
        elif kind == "other request":
            self.peer_calls(False, lambda: self.table.open(attempt.ticket.id, "other", self.layout, self.now))
        elif kind == "again" and attempt.state is not TicketState.RESERVED:
            self.opened(attempt, self.layout)
        else:
            other = TicketTable(b"other", LEASE_S, self.layout)
            self.peer_calls(False, lambda: other.open(attempt.ticket.id, "request", self.layout, self.now))

    def opened(self, attempt: Attempt, layout: CacheLayout) -> bool:
        accepted = self.accepts(attempt, TicketState.RESERVED) and layout == self.layout
        self.peer_calls(accepted, lambda: self.table.open(attempt.ticket.id, "request", layout, self.now))
        if accepted:
            attempt.state = TicketState.FILLING
            self.renewed(attempt)
        return accepted

    def shipped(self, attempt: Attempt) -> None:
        key = attempt.to_ship.pop(0)
        attempt.sender.ship(key)
        for layer in range(self.layout.of(key).num_layers):
            attempt.sender.sent(1, self.now)
            attempt.frames.append((key, layer, 1))
        attempt.sender.compute_ended(self.now)

    @precondition(lambda self: self.attempts)
    @rule(pick=PICKS, frame=st.tuples(KEYS, st.integers(0, 2), st.integers(0, 3)))
    def a_stray_frame_arrives(self, pick: int, frame: Frame) -> None:
        if self.pick(pick).state is not TicketState.RESERVED:
            self.frame_arrives(self.pick(pick), frame)

    def frame_arrives(self, attempt: Attempt, frame: Frame) -> bool:
        layers = layers_of(frame)
        if not self.accepts(attempt, TicketState.FILLING):
            self.peer_calls(False, lambda: self.table.receive(attempt.ticket, *frame, self.now))
        elif not layers or not layers <= attempt.expected_layers or layers & attempt.arrived:
            with pytest.raises(InvalidArgumentError):
                self.table.receive(attempt.ticket, *frame, self.now)
        else:
            self.table.receive(attempt.ticket, *frame, self.now)
            attempt.arrived |= layers
            self.renewed(attempt)
            return True
        return False

    @rule()
    def keep_alives_arrive(self) -> None:
        for attempt in self.attempts:
            if attempt.state is not TicketState.RESERVED:
                self.keep_alive(attempt)

    def keep_alive(self, attempt: Attempt) -> None:
        accepted = self.accepts(attempt, TicketState.FILLING)
        self.peer_calls(accepted, lambda: self.table.renew(attempt.ticket, self.now))
        if accepted:
            self.renewed(attempt)

    @invariant()
    def nothing_early_or_late_is_taken(self) -> None:
        """A refused commit changes nothing, so it may be tried at any time."""
        for attempt in self.attempts:
            if attempt.state is TicketState.RESERVED:
                continue  # nothing comes before Open: the stream begins with it
            if attempt.arrived != attempt.expected_layers or not self.accepts(attempt, TicketState.FILLING):
                self.commits(attempt, attempt.ticket.covered_tokens)
            self.commits(attempt, attempt.ticket.covered_tokens + 1)

    def commits(self, attempt: Attempt, covered_tokens: int) -> bool:
        whole = attempt.arrived == attempt.expected_layers and covered_tokens == attempt.ticket.covered_tokens
        accepted = self.accepts(attempt, TicketState.FILLING) and whole
        self.peer_calls(accepted, lambda: self.table.commit(attempt.ticket, covered_tokens, self.now))
        if accepted:
            attempt.state = TicketState.COMMITTED
            attempt.expires_at = attempt.ticket.deadline
        return accepted

    @precondition(lambda self: self.attempts)
    @rule(pick=PICKS)
    def consumed_out_of_turn(self, pick: int) -> None:
        if self.pick(pick).state is not TicketState.COMMITTED:
            with pytest.raises(AssertionError):
                self.table.consume(self.pick(pick).ticket)

    def consumed(self, attempt: Attempt) -> None:
        self.table.consume(attempt.ticket)
        assert attempt.arrived == attempt.expected_layers
        if attempt.sender.state is SenderState.COMMITTED:
            stats = attempt.sender.stats
            assert (stats.pages, stats.bytes) == (len(attempt.ticket.places), len(attempt.expected_layers))
            assert 0 <= stats.hidden <= 1
        self.page_tables.commit(attempt.ticket.sequence)
        self.ended(attempt, TicketState.CONSUMED)  # and the sequence ends at once

    @precondition(lambda self: self.attempts)
    @rule(pick=PICKS, side=st.sampled_from(["receiver", "sender"]))
    def a_side_gives_up(self, pick: int, side: str) -> None:
        attempt = self.pick(pick)
        if side == "sender":
            attempt.sender.abort()
        else:
            self.table.abort(attempt.ticket)
            self.ended(attempt, TicketState.ABORTED)

    @invariant()
    def both_know_the_same(self) -> None:
        self.pools.check_integrity()
        live = [attempt for attempt in self.attempts if attempt.is_live]
        expiries = [attempt.expires_at for attempt in live if attempt.expires_at is not None]
        assert len(self.table) == len(live)
        assert self.table.next_expiry() == min(expiries, default=None)
        assert self.pools.num_reserved == sum(len(held_places(attempt.ticket.sequence)) for attempt in live)
        for attempt in self.attempts:
            assert attempt.ticket.state is attempt.state
            if attempt.is_live:
                places = attempt.ticket.places.values()
                assert {self.pools.of(place).state(place.page) for place in places} == {PageState.RESERVED}

    def teardown(self) -> None:
        """Time alone ends whatever waits for a peer; the rest ends with the call that owns it."""
        self.now += max(LEASE_S, 15.0)
        for attempt in self.attempts:
            waits_for_a_peer = attempt.state is TicketState.FILLING
            assert not waits_for_a_peer or self.is_due(attempt)
        self.expire()
        for attempt in self.attempts:
            self.table.abort(attempt.ticket)
            self.ended(attempt, TicketState.ABORTED)
        assert (len(self.table), self.table.next_expiry()) == (0, None)
        assert self.pools.num_free == self.pools.num_pages


SETTINGS = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("kind", KINDS)
def test_machine(kind: str) -> None:
    run_state_machine_as_test(type(f"HandoffMachine_{kind}", (HandoffMachine,), {"kind": kind}), settings=SETTINGS)
