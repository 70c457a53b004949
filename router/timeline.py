"""Where a request's time goes: its parts as they are learned, for client and span.

Only durations come from workers, since clocks of hosts differ. Times are seconds of the router's clock. Two sums hold:

    time to first token = tokenise + queue + reserve + prefill queue + prefill + delivery
    second token's gap = transfer tail + decode queue + first step + delivery

Each "delivery" is the remainder: the way from the workers, and what tries that failed took. The second token's is what
its way took longer than the first one's, which can be less than nothing.
"""

import time
from dataclasses import dataclass, field

from pageferry.core.layout import CacheLayout
from pageferry.core.sender import hidden_share
from pageferry.router.metrics import FIRST_TOKEN_PARTS
from pageferry.router.profiles import Chosen
from pageferry.v1.decode_pb2 import Completed, FirstSteps, Reserved
from pageferry.v1.inference_pb2 import HandoffStats, Timings
from pageferry.v1.prefill_pb2 import FirstToken, Shipped
from pageferry.v1.types_pb2 import Usage

_TOLD_PARTS = {part: f"{part}_ms" for part in FIRST_TOKEN_PARTS if part != "delivery"}  # fields of Timings


@dataclass(slots=True)
class Timeline:
    """Filled by a request's tries as they go; what a failed try took is in no part but the remainder."""

    arrival: float
    arrival_ns: int = field(default_factory=time.time_ns)  # on the wall clock
    parts: Timings = field(default_factory=Timings)  # all but those that follow from the others
    first_step_ms: float = 0.0  # the decode worker's, for the second token
    first_token: float | None = None
    second_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were not computed
    pages: HandoffStats = field(default_factory=HandoffStats)
    profile: Chosen | None = None  # once it is known
    request_id: str = ""
    usage: Usage = field(default_factory=Usage)  # of all answers, once they are over
    num_tries: int = 0
    workers: tuple[str, str] = ("", "")  # addresses of the last try's prefill and decode worker, or empty

    def note_tokens(self, now: float, num_tokens: int) -> float | None:
        """Tokens have come; returns the gap to the ones before, None for the first."""
        gap = None if self.last_token is None else now - self.last_token
        if self.first_token is None:
            self.first_token = now
        if self.second_token is None and self.num_tokens + num_tokens > 1:
            self.second_token = now
        self.last_token = now
        self.num_tokens += num_tokens
        return gap

    def wall_ns(self, moment: float) -> int:
        """A time of the router's clock on the wall clock, as the request's spans have it."""
        return self.arrival_ns + round((moment - self.arrival) * 1e9)

    @property
    def ttft_s(self) -> float:
        return 0.0 if self.first_token is None else self.first_token - self.arrival

    @property
    def profile_name(self) -> str:
        return self.profile.name if self.profile is not None else ""

    @property
    def per_token_s(self) -> float | None:
        """Mean gap between tokens; None of fewer than two."""
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    def objectives(self) -> dict[str, bool]:
        """Whether each of its profile's objectives was met, as far as that can be told: "ttft" and "token"."""
        if self.profile is None or self.first_token is None:
            return {}
        profile = self.profile.profile
        seen = (("ttft", self.ttft_s, profile.ttft_slo_ms), ("token", self.per_token_s, profile.token_slo_ms))
        return {
            name: seconds * 1000 <= limit_ms for name, seconds, limit_ms in seen if limit_ms and seconds is not None
        }

    def second_token_ms(self) -> dict[str, float]:
        """The gap between the first two tokens, and its parts; empty where they came together, or one did not."""
        if self.first_token is None or self.second_token is None or self.second_token == self.first_token:
            return {}
        gap_ms = (self.second_token - self.first_token) * 1000
        known = {
            "transfer_tail": self.parts.transfer_tail_ms,
            "decode_queue": self.parts.decode_queue_ms,
            "first_step": self.first_step_ms,
        }
        return {"gap": gap_ms, **known, "delivery": gap_ms - sum(known.values())}

    def first_token_ms(self) -> dict[str, float]:
        """The parts of the time to the first token.

        A decode worker that computes the prompt itself begins while its word of the pages is on its way here: so long
        as that way took, it is no longer reserving.
        """
        parts = {part: getattr(self.parts, name) for part, name in _TOLD_PARTS.items()}
        left_ms = self.ttft_s * 1000 - sum(parts.values())
        if self.first_token is not None:
            parts["reserve"] = max(0.0, parts["reserve"] + min(0.0, left_ms))
        return {**parts, "delivery": max(0.0, left_ms)}

    def total_ms(self, now: float) -> float:
        return ((self.last_token or now) - self.arrival) * 1000

    def timings(self, now: float) -> Timings:
        timings = Timings()
        timings.CopyFrom(self.parts)
        timings.ttft_ms = self.ttft_s * 1000
        first = self.first_token_ms()
        timings.reserve_ms, timings.delivery_ms = first["reserve"], first["delivery"]
        timings.total_ms = self.total_ms(now)
        return timings


class TryTimes:
    """What one try at a request adds to its timeline: to what makes up tokens' times only if it brings the first one.

    A second token that another try brings waited for that one's beginning, and is not the decode worker's first.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._brings_first_token = timeline.first_token is None
        if self._brings_first_token:  # a try before may have told its own
            old = timeline.parts
            timeline.parts, timeline.pages = Timings(tokenize_ms=old.tokenize_ms, queue_ms=old.queue_ms), HandoffStats()

    def reserved(self, reserved: Reserved, layout: CacheLayout | None, waited_s: float) -> None:
        """Pages are held on a decode worker of that layout."""
        if self._brings_first_token:
            self._timeline.parts.reserve_ms = waited_s * 1000
        pages = self._timeline.pages
        pages.format = reserved.layout.format
        pages.page_format = str(layout.format) if layout is not None else ""
        pages.cached = reserved.cached_pages

    def prefilled(self, first: FirstToken) -> None:
        self._prefilled(first.queue_ms, first.prefill_ms, first.cached_tokens)

    def shipped(self, shipped: Shipped) -> None:
        if self._brings_first_token:
            self._timeline.parts.transfer_tail_ms = shipped.tail_ms
        pages = self._timeline.pages
        pages.shipped, pages.bytes = shipped.pages, shipped.bytes
        pages.hidden = hidden_share(shipped.tail_ms, shipped.in_flight_ms)

    def first_steps(self, told: FirstSteps | Completed, *, is_local: bool) -> None:
        """Told anew as more is known. `is_local`: the decode worker has computed the prompt itself."""
        if is_local:
            self._prefilled(told.queue_ms, max(0.0, told.prefill_ms - told.queue_ms), told.cached_tokens)
        if not self._brings_first_token:
            return
        waited_ms = self._timeline.parts.decode_queue_ms = 0.0 if is_local else told.queue_ms
        self._timeline.first_step_ms = max(0.0, told.first_step_ms - waited_ms)

    def _prefilled(self, queue_ms: float, prefill_ms: float, cached_tokens: int) -> None:
        if self._brings_first_token:
            self._timeline.cached_tokens = cached_tokens
            self._timeline.parts.prefill_queue_ms, self._timeline.parts.prefill_ms = queue_ms, prefill_ms
