"""When a profile's requests are served as another profile's: by load or by the time of day, with hysteresis.

A rule looks at one thing. It turns on once that has been above its upper bound for `for_s`, and off once it has been
below its lower bound for as long; in between it stays as it is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from pageferry.core.errors import invalid

_MAX_SECONDS = 86_400.0
_MAX_QUEUED = 2**31
_HOURS = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")
_OFFSET = re.compile(r"([+-])([01][0-9]|2[0-3]):([0-5][0-9])")


@dataclass(frozen=True, slots=True)
class Reading:
    """What rules look at, at one moment."""

    queued: int  # requests in the router's queue
    busy: float  # share of the decode workers' slots in use
    wall_s: float  # seconds since 1970, for the time of day
    now: float  # seconds of a clock that is never put back, for durations


@dataclass(frozen=True, slots=True)
class SwitchRule:
    """One `[[profiles.NAME.switch]]`; looks at the queue, at slots or at the clock, at one of them."""

    use: str = ""  # the profile that takes the place
    queued_above: int = 0
    queued_below: int = 0
    busy_above: float = 0.0  # from 0 to 1
    busy_below: float = 0.0
    hours: str = ""  # as 22:00-06:00; the last minute is not in it
    timezone: str = "UTC"  # or a name as Europe/Berlin, or an offset as +05:30
    for_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.use:
            raise invalid("use", self.use, "must name a profile")
        if (bool(self.queued_above), bool(self.busy_above), bool(self.hours)).count(True) != 1:
            given = f"{self.queued_above}, {self.busy_above} and {self.hours!r}"
            raise invalid("queued_above, busy_above, hours", given, "but one of them must be set, and one only")
        if self.queued_above and not 1 <= self.queued_below <= self.queued_above <= _MAX_QUEUED:
            raise invalid("queued_below", self.queued_below, f"must be from 1 to queued_above, {self.queued_above}")
        if self.busy_above and not 0 < self.busy_below <= self.busy_above < 1:
            raise invalid("busy_below", self.busy_below, f"must be above 0, to busy_above, {self.busy_above}, below 1")
        if not 0 <= self.for_s <= _MAX_SECONDS:
            raise invalid("for_s", self.for_s, f"must be from 0 to {_MAX_SECONDS}")
        if self.hours:
            _span(self.hours)
        _zone(self.timezone)

    def wants(self, reading: Reading) -> bool | None:
        """Whether it should be on; None between the bounds, where either will do."""
        if self.hours:
            return self._is_within(reading.wall_s)
        value = reading.queued if self.queued_above else reading.busy
        above, below = (self.queued_above or self.busy_above), (self.queued_below or self.busy_below)
        return True if value > above else False if value < below else None

    def _is_within(self, wall_s: float) -> bool:
        begin, end = _span(self.hours)
        clock = datetime.fromtimestamp(wall_s, _zone(self.timezone)).time()
        return begin <= clock < end if begin < end else clock >= begin or clock < end


@dataclass(slots=True)
class Switch:
    """One rule's state."""

    rule: SwitchRule
    is_on: bool = False
    _since: float | None = field(default=None, init=False)  # when it was first wanted otherwise

    def look(self, reading: Reading) -> None:
        """Turn on or off where that has been wanted for long enough."""
        wanted = self.rule.wants(reading)
        if wanted is None or wanted is self.is_on:
            self._since = None
            return
        if self._since is None:
            self._since = reading.now
        if reading.now - self._since >= self.rule.for_s:
            self.is_on, self._since = wanted, None


def in_effect(name: str, switches: Sequence[Switch]) -> str:
    """The profile that serves requests for this one: that of its first rule that is on. Its own rules don't count."""
    return next((switch.rule.use for switch in switches if switch.is_on), name)


def _span(hours: str) -> tuple[time, time]:
    match = _HOURS.fullmatch(hours)
    if match is None or match.group(1, 2) == match.group(3, 4):
        raise invalid("hours", hours, "must be HH:MM-HH:MM, two times that differ")
    return time(int(match[1]), int(match[2])), time(int(match[3]), int(match[4]))


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    if match := _OFFSET.fullmatch(name):
        offset = timedelta(hours=int(match[2]), minutes=int(match[3]))
        return timezone(offset if match[1] == "+" else -offset)
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError):  # of which its own error is one
        raise invalid("timezone", name, "must be UTC, an offset as +05:30, or a name that this system knows") from None
