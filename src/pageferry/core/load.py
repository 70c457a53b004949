"""Figures that a worker reports about itself, and when a report is due."""

MIN_REPORT_S = 0.05
MAX_REPORT_S = 0.5


class Smoothed:
    """An exponentially smoothed figure; 0 while nothing was measured."""

    __slots__ = ("_weight", "value")

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self.value = 0.0

    def add(self, sample: float, share: float = 1.0) -> None:
        """`share` is how much the sample counts beside others."""
        self.value = sample if self.value == 0 else self.value + self._weight * share * (sample - self.value)


class ReportTimer:
    """Says when to report: `MIN_REPORT_S` after the last report where something changed, else `MAX_REPORT_S`."""

    __slots__ = ("_changed", "_last")

    def __init__(self) -> None:
        self._changed = True
        self._last = float("-inf")

    def mark_changed(self) -> None:
        self._changed = True

    def wait(self, now: float) -> float:
        """Seconds until the next report is due."""
        return max(0.0, self._last + (MIN_REPORT_S if self._changed else MAX_REPORT_S) - now)

    def take(self, now: float) -> bool:
        """Whether a report is due now; the caller then makes it."""
        if self.wait(now) > 0:
            return False
        self._changed = False
        self._last = now
        return True
