"""What the machine, the server's processes, its GPU and this process do while a run goes on."""

import asyncio
import contextlib
import platform
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from time import perf_counter, process_time
from typing import Any

import psutil

from pageferry.core.errors import invalid
from pageferry.loadgen.result import Machine, Sample
from pageferry.loadgen.summary import Observed
from pageferry.loadgen.target import Target

PERIOD_S = 0.25
_MIN_PERIOD_S = 0.1  # the machine's counters tick too slowly for less


class Processes:
    """The processes of these ids, and those that they have started so far. Raises InvalidArgumentError."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._last_s: dict[int, float] = {}
        for pid in pids:
            try:
                parent = psutil.Process(pid)
                self._processes |= {process.pid: process for process in (parent, *parent.children(recursive=True))}
            except (psutil.Error, ValueError, OverflowError):
                raise invalid("--pid", pid, "is no process that can be looked at here") from None

    def __bool__(self) -> bool:
        return bool(self._processes)

    def cpu_s(self) -> float:
        """Seconds of CPU that they have used since they started; of one that has ended, as it was last seen."""
        for pid, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._last_s[pid] = times.user + times.system
        return sum(self._last_s.values())


class Gpus:
    """All NVIDIA GPUs, if nvidia-ml-py is installed and there are any."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self.memory_bytes_max: int | None = None
        with contextlib.suppress(Exception):  # no library, no driver, no GPU: the module's own errors are many
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]

    def percent(self) -> float | None:
        """Mean utilisation; notes the memory in use, too."""
        if not self._handles:
            return None
        try:
            used = sum(self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles)
            busy = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
        except self._nvml.NVMLError:
            return None
        self.memory_bytes_max = max(self.memory_bytes_max or 0, used)
        return float(sum(busy) / len(busy))


class Observer:
    """Takes a sample every PERIOD_S between `watching`'s begin and end."""

    def __init__(self, target: Target, processes: Processes) -> None:
        self.samples: list[Sample] = []
        self._target = target
        self._processes = processes
        self._gpus = Gpus()
        self._cores = psutil.cpu_count() or 1
        self._batch_counts: Counter[int] = Counter()
        self._pages_total: int | None = None
        self._start_s = self._last_s = 0.0
        self._server_last_s = 0.0
        self._wall_s = self._client_cpu_s = 0.0
        self._server_cpu_s: float | None = None

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """The start of the block is time 0 of the samples."""
        psutil.cpu_percent()  # which later calls count from
        self._start_s = self._last_s = perf_counter()
        server_start_s = self._server_last_s = self._processes.cpu_s()
        client_start_s = process_time()
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._sample(asks_server=False)
            self._wall_s = perf_counter() - self._start_s
            self._client_cpu_s = process_time() - client_start_s
            self._server_cpu_s = self._processes.cpu_s() - server_start_s if self._processes else None

    def observed(self, send_lags_ms: Sequence[float]) -> Observed:
        """Over the block."""
        return Observed(
            wall_s=self._wall_s,
            cores=self._cores,
            client_cpu_s=self._client_cpu_s,
            server_cpu_s=self._server_cpu_s,
            batch_counts=self._batch_counts or None,
            pages_total=self._pages_total,
            gpu_memory_bytes_max=self._gpus.memory_bytes_max,
            send_lags_ms=send_lags_ms or None,
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._sample()

    async def _sample(self, *, asks_server: bool = True) -> None:
        server = await self._target.server_load() if asks_server else None
        now_s = perf_counter()
        passed_s = now_s - self._last_s
        if passed_s < _MIN_PERIOD_S:
            return
        server_cpu_s = self._processes.cpu_s()
        self.samples.append(
            Sample(
                t_s=now_s - self._start_s,
                machine_cpu_percent=psutil.cpu_percent(),
                server_cpu_percent=self._percent(server_cpu_s, passed_s) if self._processes else None,
                running=None if server is None else server.running,
                waiting=None if server is None else server.waiting,
                pages_used=None if server is None else server.pages_used,
                gpu_percent=self._gpus.percent(),
            )
        )
        self._last_s, self._server_last_s = now_s, server_cpu_s
        if server is not None:
            self._batch_counts.update(size for size in server.batch_sizes if size)
            self._pages_total = server.pages_total

    def _percent(self, server_cpu_s: float, passed_s: float) -> float:
        """Of all cores."""
        return 100 * (server_cpu_s - self._server_last_s) / (passed_s * self._cores)


def machine() -> Machine:
    """The one that this process runs on."""
    return Machine(
        cpu=_cpu_name(),
        cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        platform=platform.platform(),
        python=sys.version.split()[0],
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
