"""What a device's work takes by its own clock; the device's events are made up."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pageferry.engine.device_times import DeviceTimes, device_name
from pageferry.engine.gpu_pages import Staging


@dataclass
class FakeStream:
    """A device's time, in milliseconds."""

    now: float = 0.0


class FakeEvent:
    """Notes the stream's time when the stream comes to it."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self.time: float | None = None

    def record(self) -> None:
        self.time = self._stream.now

    def elapsed_time(self, end_event: Any) -> float:
        assert self.time is not None
        assert end_event.time is not None
        return float(end_event.time - self.time)


def test_times_are_those_between_the_events_and_add_up() -> None:
    stream = FakeStream()
    times = DeviceTimes(lambda: FakeEvent(stream))
    for milliseconds in (20.0, 5.0):
        stream.now += 1000  # between two things
        with times.measured():
            stream.now += milliseconds
        times.take()
        assert times.last_s == pytest.approx(milliseconds / 1000)
    assert times.total_s == pytest.approx(0.025)


def test_copies_of_pages_are_measured() -> None:
    stream = FakeStream()

    class SlowEvent(FakeEvent):
        def record(self) -> None:
            stream.now += 3
            super().record()

    times = DeviceTimes(lambda: SlowEvent(stream))
    staging = Staging(torch.device("cpu"), 64, times)
    memory = torch.arange(64, dtype=torch.uint8)
    payload = staging.read(memory, [(8, 16), (32, 40)])
    assert times.total_s == pytest.approx(0.003)
    staging.write(memory, [(0, 16)], payload)
    assert memory[:16].tolist() == [*range(8, 16), *range(32, 40)]
    assert times.total_s == pytest.approx(0.006)


def test_a_processor_has_no_clock_of_its_own() -> None:
    assert DeviceTimes.of(torch.device("cpu")) is None
    assert device_name(torch.device("cpu")) == ""
