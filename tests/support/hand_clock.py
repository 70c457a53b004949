"""A clock that stands until a test moves it."""


class HandClock:
    """Seconds, as `time.monotonic`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
