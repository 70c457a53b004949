import os
import subprocess
import sys

import pytest
from fake_target import FakeTarget

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen import observe
from pageferry.loadgen.observe import Observer, Processes, machine
from pageferry.loadgen.target import ServerLoad


def burn(seconds: float) -> None:
    end_s = observe.process_time() + seconds
    while observe.process_time() < end_s:
        pass


def test_processes_and_their_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        processes = Processes([os.getpid()])
        before_s = processes.cpu_s()
        burn(0.05)
        assert processes.cpu_s() >= before_s + 0.03  # counted in ticks of 10 ms
        assert child.pid in processes._processes
    finally:
        child.communicate(b"\n")
    assert processes.cpu_s() >= before_s + 0.03  # of a process that has ended, as it was last seen


def test_no_processes() -> None:
    assert not Processes([]) and Processes([]).cpu_s() == 0


@pytest.mark.parametrize("pid", [2**22 + 1, -1, 2**70])
def test_a_process_that_is_not_there(pid: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--pid is {pid}, is no process"):
        Processes([pid])


async def test_samples_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "PERIOD_S", 0.0)
    monkeypatch.setattr(observe, "_MIN_PERIOD_S", 0.0)
    target = FakeTarget()
    target.load = ServerLoad(running=3, waiting=1, batch_sizes=(2, 1, 0), pages_used=5, pages_total=64)
    observer = Observer(target, Processes([os.getpid()]))
    async with observer.watching():
        burn(0.05)
        while len(observer.samples) < 3:
            await observe.asyncio.sleep(0)
    sample, observed = observer.samples[0], observer.observed([1.0])
    assert (sample.running, sample.waiting, sample.pages_used) == (3, 1, 5)
    assert observer.samples[-1].running is None  # the last one is taken without asking the server
    counts = observed.batch_counts
    assert counts is not None and counts.keys() == {1, 2} and counts[1] == counts[2] >= 2
    assert observed.pages_total == 64 and observed.send_lags_ms == [1.0]
    assert observed.client_cpu_s >= 0.05 and observed.wall_s >= 0.05
    assert observed.server_cpu_s is not None and observed.server_cpu_s >= 0.03


async def test_what_is_not_known_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_MIN_PERIOD_S", 0.0)
    observer = Observer(FakeTarget(), Processes([]))
    async with observer.watching():
        pass
    (sample,), observed = observer.samples, observer.observed([])
    assert sample.server_cpu_percent is None and sample.running is None
    assert (observed.server_cpu_s, observed.batch_counts, observed.send_lags_ms) == (None, None, None)


def test_the_machine() -> None:
    found = machine()
    assert found.cores >= 1 and found.memory_bytes > 2**20 and found.cpu and found.platform


class FakeNvml:
    NVMLError = OSError

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int):
        return type("Memory", (), {"used": 100 + handle})

    def nvmlDeviceGetUtilizationRates(self, handle: int):
        return type("Rates", (), {"gpu": 50 * handle})


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    gpus = observe.Gpus()
    assert gpus.percent() == 25.0 and gpus.memory_bytes_max == 201


def test_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus = observe.Gpus()
    assert gpus.percent() is None and gpus.memory_bytes_max is None
