"""What the router remembers for its page: the last requests, without their text, and figures of the last minutes."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from pageferry.router.timeline import Timeline

KEPT_REQUESTS = 1000
KEPT_POINTS = 300
INTERVAL_S = 2.0  # between points
CANCELLED = "cancelled"  # an outcome that nothing here has failed for
_MAX_PAIRS = 4096  # of workers; where they come and go, the first are forgotten
_MAX_SAMPLES = 5000  # of a kind in a point; the newest count, and streams wait while they are sorted


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """A request that is over; each is equal to itself only, so that what is made of it can be looked up fast."""

    number: int  # counts from 1
    request_id: str
    trace_id: str  # empty of one that was not sampled
    model: str
    profile: str  # as asked for
    arrived: float  # Unix seconds
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None  # None where no token came
    per_token_s: float | None
    total_s: float
    outcome: str  # a finish reason, or a status code in lower case
    reason: str  # of a failure
    prefill: str  # addresses of the last try's workers
    decode: str
    tries: int


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of an interval; None where nothing was measured. Queue and running are those at its end."""

    time: float  # Unix seconds, of its end
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    tokens_per_s: float
    requests_per_s: float
    failures_per_s: float
    queued: int
    running: int


@dataclass(slots=True)
class Transfers:
    """What one prefill worker has handed over to one decode worker, for requests of this router."""

    handoffs: int = 0
    pages: int = 0
    num_bytes: int = 0


class Record:
    """Bounded; filled as requests go, on the router's event loop."""

    def __init__(self, *, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self.started = wall()
        self.transfers: dict[tuple[str, str], Transfers] = {}  # by prefill and decode worker
        self.ttfts: deque[float] = deque(maxlen=_MAX_SAMPLES)  # of the interval that is under way
        self.gaps: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.num_tokens = 0
        self._num_ended = self._num_failed = 0
        self._wall = wall
        self._clock = clock
        self._since = clock()
        self._requests: deque[Past] = deque(maxlen=KEPT_REQUESTS)
        self._points: deque[Point] = deque(maxlen=KEPT_POINTS)
        self.num_requests = 0

    def transferred(self, prefill: str, decode: str, pages: int, num_bytes: int) -> None:
        """A hand-off is complete."""
        transfers = self.transfers.setdefault((prefill, decode), Transfers())
        if len(self.transfers) > _MAX_PAIRS:
            del self.transfers[next(iter(self.transfers))]
        transfers.handoffs += 1
        transfers.pages += pages
        transfers.num_bytes += num_bytes

    def ended(self, timeline: Timeline, model: str, trace_id: str, outcome: str, reason: str, now: float) -> None:
        """A request is over; `now` is a time of its timeline's clock, `reason` empty where it did not fail."""
        self.num_requests += 1
        self._num_ended += 1
        self._num_failed += bool(reason) and outcome != CANCELLED
        total_s = now - timeline.arrival
        prefill, decode = timeline.workers
        usage = timeline.usage
        past = Past(
            number=self.num_requests,
            request_id=timeline.request_id,
            trace_id=trace_id,
            model=model,
            profile=timeline.profile_name,
            arrived=self._wall() - total_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_s=timeline.ttft_s if timeline.first_token is not None else None,
            per_token_s=timeline.per_token_s,
            total_s=total_s,
            outcome=outcome,
            reason=reason,
            prefill=prefill,
            decode=decode,
            tries=timeline.num_tries,
        )
        self._requests.append(past)

    def requests(self, after: int, limit: int) -> list[Past]:
        """Those with a number above `after`, newest first, at most `limit`."""
        return list(islice(reversed(self._requests), min(limit, max(0, self.num_requests - after))))

    def points(self, after: float) -> list[Point]:
        """Those that ended after a time, oldest first."""
        return [point for point in self._points if point.time > after]

    def close_point(self, queued: int, running: int) -> None:
        """The interval that is under way ends here."""
        now = self._clock()
        seconds = now - self._since
        if seconds <= 0:
            return
        point = Point(
            round(self._wall(), 3),
            *_quantiles(self.ttfts),
            *_quantiles(self.gaps),
            tokens_per_s=self.num_tokens / seconds,
            requests_per_s=self._num_ended / seconds,
            failures_per_s=self._num_failed / seconds,
            queued=queued,
            running=running,
        )
        self._points.append(point)
        self.ttfts.clear()
        self.gaps.clear()
        self.num_tokens = self._num_ended = self._num_failed = 0
        self._since = now

    async def keep(self, load: Callable[[], tuple[int, int]]) -> None:
        """Close a point after each interval, for ever; `load` tells what is queued and what runs."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.close_point(*load())


def _quantiles(samples: Iterable[float]) -> tuple[float | None, float | None]:
    """The median and the 99th percentile, by nearest rank."""
    ordered = sorted(samples)
    if not ordered:
        return None, None
    last = len(ordered) - 1
    return ordered[last * 50 // 100], ordered[-(-last * 99 // 100)]
