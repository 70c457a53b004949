"""The sending side of a hand-off: what was shipped, what is in flight, and what of it compute hid."""

from dataclasses import dataclass

from pageferry.core.errors import FailedPreconditionError
from pageferry.core.handoff_tables import SENDER_TABLE, SenderEvent, SenderState, fire
from pageferry.core.layout import PageKey


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """What a hand-off took. `hidden` is the share of the transfer that cost nothing, as compute went on beside it."""

    pages: int
    bytes: int
    tail_s: float  # from the end of compute to the answered commit
    in_flight_s: float  # with at least one frame sent and not acknowledged

    @property
    def hidden(self) -> float:
        return hidden_share(self.tail_s, self.in_flight_s)


def hidden_share(tail: float, in_flight: float) -> float:
    """The share of a transfer that went on behind compute, from the same unit of time twice."""
    return min(1.0, max(0.0, 1 - tail / in_flight)) if in_flight > 0 else 1.0


class Sender:
    """One push as its sender sees it; times are the sender's own clock."""

    def __init__(self) -> None:
        self.state = SenderState.IDLE
        self._pages: set[PageKey] = set()
        self._num_bytes = 0
        self._num_sent = 0
        self._num_acked = 0
        self._in_flight_s = 0.0
        self._in_flight_since = 0.0
        self._compute_ended: float | None = None
        self._committed: float | None = None

    def open(self) -> None:
        """The receiver has answered Open."""
        self._fire(SenderEvent.OPENED)

    def ship(self, key: PageKey) -> None:
        """A page is about to be sent. FailedPreconditionError once the push is aborted."""
        self._fire(SenderEvent.SHIP)
        if key in self._pages:
            raise AssertionError(f"{key} is shipped twice")
        self._pages.add(key)

    def sent(self, num_bytes: int, now: float, num_frames: int = 1) -> None:
        """Frames with that much payload, all together, are written."""
        if self._num_sent == self._num_acked:
            self._in_flight_since = now
        self._num_sent += num_frames
        self._num_bytes += num_bytes

    def acked(self, num_frames: int, now: float) -> None:
        """The receiver has taken that many frames since Open. FailedPreconditionError if that can't be."""
        self._fire(SenderEvent.ACKED)
        if not self._num_acked <= num_frames <= self._num_sent:
            message = f"acked.frames is {num_frames}, must be from {self._num_acked} to {self._num_sent}"
            raise FailedPreconditionError(message, reason="BAD_ACK")
        self._take_acks(num_frames, now)

    def compute_ended(self, now: float) -> None:
        """The last page's bytes are computed: from here on the transfer is waited for."""
        self._compute_ended = now

    def commit(self) -> None:
        """Commit is about to be sent. FailedPreconditionError once the push is aborted."""
        self._fire(SenderEvent.COMMIT)

    def committed(self, now: float) -> None:
        """The receiver has answered Commit."""
        self._fire(SenderEvent.COMMITTED)
        self._take_acks(self._num_sent, now)
        self._committed = now

    def abort(self) -> None:
        """Give the push up, in any state; a committed one stays committed."""
        self._fire(SenderEvent.ABORT)

    @property
    def num_in_flight(self) -> int:
        """Frames sent and not acknowledged."""
        return self._num_sent - self._num_acked

    @property
    def shipped(self) -> tuple[int, int]:
        """Pages of which some was sent, or is about to be, and bytes that were."""
        return len(self._pages), self._num_bytes

    @property
    def stats(self) -> HandoffStats:
        """Of a committed push."""
        if self._committed is None or self._compute_ended is None:
            raise AssertionError(f"the push is {self.state.value}: its figures are not complete")
        tail_s = max(0.0, self._committed - self._compute_ended)
        return HandoffStats(len(self._pages), self._num_bytes, tail_s, self._in_flight_s)

    def _fire(self, event: SenderEvent) -> None:
        self.state = fire(SENDER_TABLE, self.state, event, "push")

    def _take_acks(self, num_frames: int, now: float) -> None:
        if self._num_acked < self._num_sent == num_frames:
            self._in_flight_s += now - self._in_flight_since
        self._num_acked = num_frames
