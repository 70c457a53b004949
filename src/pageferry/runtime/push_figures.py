"""What a push of pages came to, as both of its ends tell it when it is over."""

from dataclasses import dataclass

from pageferry.core.sender import HandoffStats

SENT, RECEIVED = "sent", "received"


@dataclass(frozen=True, slots=True)
class PushFigures:
    direction: str  # SENT or RECEIVED
    transport: str
    pages: int
    num_bytes: int
    stalled_s: float = 0.0  # that the sender waited for the receiver
    stats: HandoffStats | None = None  # of a sender whose push is committed
    failure: str | None = None  # the reason of what broke it off
    exemplar: dict[str, str] | None = None  # its trace
