"""What a worker tells its watchers: made on the engine's thread, published on the event loop."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pageferry.core.load import ReportTimer
from pageferry.core.pool import PagePool
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.v1.inference_pb2 import WorkerLoad


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load now."""

    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Hashes that entered and left the prefix cache since the last report."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


Report = LoadReport | CacheReport


class Reporter:
    """Makes reports on the engine's thread: `fill` sets all fields of a load but those of the pool."""

    def __init__(self, pool: PagePool, fill: Callable[[WorkerLoad], None]) -> None:
        self._pool = pool
        self._fill = fill
        self._timer = ReportTimer()

    def mark_changed(self) -> None:
        self._timer.mark_changed()

    def wait(self, now: float) -> float:
        """Seconds until `take` has something."""
        return self._timer.wait(now)

    def take(self, now: float) -> list[Report]:
        """The reports that are due."""
        if not self._timer.take(now):
            return []
        reports: list[Report] = [LoadReport(self.load())]
        stored, removed = self._pool.take_cache_events()
        if stored or removed:
            reports.append(CacheReport(tuple(stored), tuple(removed)))
        return reports

    def load(self) -> WorkerLoad:
        pool = self._pool
        load = WorkerLoad(
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_reserved=pool.num_reserved,
            pages_resident=pool.num_resident,
        )
        self._fill(load)
        return load


@dataclass(slots=True)
class Publisher:
    """Passes reports on, on the event loop, and keeps the last load for snapshots."""

    hub: WorkerHub
    metrics: Metrics
    load: WorkerLoad = field(default_factory=WorkerLoad)

    def publish(self, report: Report) -> None:
        if isinstance(report, LoadReport):
            self.load = report.load
            self.hub.publish_load(report.load)
            self.metrics.set_load(report.load)
        else:
            self.hub.publish_cache(report.stored, report.removed)
