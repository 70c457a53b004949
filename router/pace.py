"""How fast a line moves, and from that when to come again."""

_KEPT = 0.95  # of what was seen, with each that goes
_MIN_SEEN = 3.0
_UNKNOWN_RETRY_MS = 1000
_MIN_RETRY_MS, _MAX_RETRY_MS = 50, 60_000


def retry_ms(wait_s: float | None) -> int:
    """What to tell who is refused: never so short that coming again is all that a caller does."""
    if wait_s is None:
        return _UNKNOWN_RETRY_MS
    return round(min(max(wait_s * 1000, _MIN_RETRY_MS), _MAX_RETRY_MS))


class Pace:
    """Seconds between two that leave a line, over the times at which somebody stood in it."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._num_gone = 0.0
        self._since: float | None = None  # when the last one went, or the first came; None: nobody stands in line

    @property
    def gap_s(self) -> float | None:
        """None until some have gone."""
        return self._busy_s / self._num_gone if self._num_gone >= _MIN_SEEN else None

    def waits(self, now: float) -> None:
        """Somebody stands in line."""
        if self._since is None:
            self._since = now

    def goes(self, now: float, num_left: int) -> None:
        """One has gone where it wanted to, and so many are left."""
        if self._since is not None:
            self._busy_s = self._busy_s * _KEPT + now - self._since
            self._num_gone = self._num_gone * _KEPT + 1
        self._since = now if num_left else None

    def empties(self) -> None:
        """Nobody is left, however that came."""
        self._since = None
