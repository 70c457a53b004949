"""What a device's work takes by its own clock, between two points of a stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point of the current stream, as `torch.cuda.Event` is one."""

    def record(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to there; both must be over."""
        ...


class DeviceTimes:
    """Of one thing after another; whoever uses it sees to it that they don't overlap.

    `last_s` are the seconds of the last one, `total_s` those of all: read them where it is made.
    """

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self.last_s = 0.0
        self.total_s = 0.0
        self._start, self._end = make_event(), make_event()

    @classmethod
    def of(cls, device: torch.device) -> "DeviceTimes | None":
        """None where the device is a processor, which has no clock of its own."""
        return cls(lambda: torch.cuda.Event(enable_timing=True)) if device.type == "cuda" else None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What the block puts on the current stream. The caller waits for it, and calls `take` then."""
        self._start.record()
        yield
        self._end.record()

    def take(self) -> None:
        """What was measured last is over on the device."""
        self.last_s = self._start.elapsed_time(self._end) / 1000
        self.total_s += self.last_s


def device_name(device: torch.device) -> str:
    """As spans have it, e.g. "cuda:0 NVIDIA H200"; empty for a processor."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
