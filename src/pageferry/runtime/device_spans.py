"""What spans say of a device that is no processor: which one, and what it took by its own clock."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pageferry.core.page_io import DeviceClock


def device_attributes(name: str, seconds: float | None, *, of: str = "") -> dict[str, str | float]:
    """Of a span: the device, and what work `of` the span took by the device's own clock; nothing of a processor."""
    return {} if seconds is None else {"pageferry.device": name, f"pageferry.{of}device_ms": seconds * 1000}


class CopyTimes:
    """What a push's copies from or to a device have taken by its own clock, of those that it counts."""

    def __init__(self, clock: DeviceClock | None) -> None:
        self._clock = clock
        self._seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """On the one thread that makes the copies, for all pushes."""
        before = self._clock.copied_s if self._clock is not None else None
        yield
        if self._clock is not None and before is not None:
            self._seconds += (self._clock.copied_s or 0.0) - before

    @property
    def attributes(self) -> Mapping[str, str | float]:
        """Of the push's span."""
        if self._clock is None or self._clock.copied_s is None:
            return {}
        return device_attributes(self._clock.device_name, self._seconds)
