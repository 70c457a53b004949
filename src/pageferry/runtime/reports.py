"""What a worker tells its watchers: made on the engine's thread, published on the event loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pageferry.core.load import ReportTimer, Smoothed
from pageferry.core.pool import PagePool
from pageferry.core.pools import PagePools
from pageferry.core.scheduler import Scheduler
from pageferry.runtime.push_report import PushFigures
from pageferry.runtime.worker_hub import WorkerHub
from pageferry.runtime.worker_metrics import StepFigures, WorkerMetrics
from pageferry.v1.inference_pb2 import PoolLoad, PriorityLoad, WorkerLoad

_WHOLE_STEP_TOKENS = 64  # from which on a step's speed counts in full


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Hashes that entered and left the prefix cache since the last report."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StepsReport:
    """The steps since the last report."""

    steps: tuple[StepFigures, ...]


Report = WorkerLoad | CacheReport | StepsReport


class Reporter:
    """Counts what steps have done, and makes reports of it, on the engine's thread."""

    def __init__(self, pools: PagePools, scheduler: Scheduler, num_tickets: Callable[[], int] = lambda: 0) -> None:
        self.num_generated = 0
        self.num_preemptions = 0
        self._num_prefilled = 0
        self._pools = pools
        self._scheduler = scheduler
        self._num_tickets = num_tickets
        self._timer = ReportTimer()
        self._rate = Smoothed()
        self._step_s = Smoothed()
        self._steps: list[StepFigures] = []

    def measure(self, num_prompt_tokens: int, step: StepFigures) -> None:
        """A step has run that computed so much of prompts."""
        seconds = step.seconds
        self._steps.append(step)
        self._num_prefilled += num_prompt_tokens
        self._step_s.add(seconds)
        if num_prompt_tokens and seconds > 0:
            # What a step costs apart from its tokens makes small ones seem slow, which tells nothing of long prompts.
            self._rate.add(num_prompt_tokens / seconds, min(1.0, num_prompt_tokens / _WHOLE_STEP_TOKENS))

    def mark_changed(self) -> None:
        self._timer.mark_changed()

    def wait(self, now: float) -> float:
        """Seconds until `take` has something."""
        return self._timer.wait(now)

    def take(self, now: float) -> list[Report]:
        """The reports that are due."""
        if not self._timer.take(now):
            return []
        reports: list[Report] = [self.load()]
        stored, removed = self._pools.take_cache_events()
        if stored or removed:
            reports.append(CacheReport(tuple(stored), tuple(removed)))
        if self._steps:
            reports.append(StepsReport(tuple(self._steps)))
            self._steps.clear()
        return reports

    def load(self) -> WorkerLoad:
        pools, scheduler = self._pools, self._scheduler
        return WorkerLoad(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            tickets=self._num_tickets(),
            **_pages(pools),
            queued_prompt_tokens=scheduler.queued_prompt_tokens,
            prefill_tokens_per_s=self._rate.value,
            step_s=self._step_s.value,
            preemptions=self.num_preemptions,
            generated_tokens=self.num_generated,
            prefill_tokens=self._num_prefilled,
            pools=_pool_loads(pools, scheduler.tables.claims.num_promised),
            least_priority=scheduler.least_priority,
            priorities=[
                PriorityLoad(priority=priority, waiting=num_waiting, queued_prompt_tokens=num_tokens)
                for priority, (num_waiting, num_tokens) in scheduler.prompts_by_priority.items()
            ],
        )


def _pages(pool: PagePool | PagePools) -> dict[str, Any]:
    states = ("free", "cached", "reserved", "resident")
    return {"pages_total": pool.num_pages, **{f"pages_{state}": getattr(pool, f"num_{state}") for state in states}}


def _pool_loads(pools: PagePools, num_promised: Sequence[int]) -> list[PoolLoad]:
    loads = [
        PoolLoad(group=group, **_pages(pool), pages_promised=promised)
        for group, (pool, promised) in enumerate(zip(pools.groups, num_promised, strict=True))
    ]
    return loads if pools.tails is None else [*loads, PoolLoad(**_pages(pools.tails))]


@dataclass(slots=True)
class HandoffTotals:
    """Of a worker since its start: what it has sent, or received."""

    handoffs: int = 0
    pages: int = 0
    num_bytes: int = 0
    failures: int = 0

    def add(self, push: PushFigures) -> None:
        if push.failure is not None:
            self.failures += 1
            return
        self.handoffs += 1
        self.pages += push.pages
        self.num_bytes += push.num_bytes


@dataclass(slots=True)
class Publisher:
    """Passes reports on, on the event loop."""

    hub: WorkerHub
    metrics: WorkerMetrics
    handoffs: HandoffTotals = field(default_factory=HandoffTotals)
    _stalled: bool = False

    def publish(self, report: Report) -> None:
        match report:
            case WorkerLoad():
                report.stalled = self._stalled
                report.handoffs, report.handoff_failures = self.handoffs.handoffs, self.handoffs.failures
                report.handoff_pages, report.handoff_bytes = self.handoffs.pages, self.handoffs.num_bytes
                self.hub.publish_load(report)
                self.metrics.set_load(report)
            case StepsReport():
                self.metrics.count_steps(report.steps)
            case CacheReport():
                self.hub.publish_cache(report.stored, report.removed)

    def count_push(self, push: PushFigures) -> None:
        """A push of pages is over, however it ended; loads tell it from the next one on."""
        self.handoffs.add(push)
        self.metrics.count_push(push)

    def set_stalled(self, stalled: bool) -> None:
        """Say with all loads, from the last one on, whether the engine that tells them makes progress."""
        self._stalled = stalled
        if self.hub.load is not None:
            load = WorkerLoad()
            load.CopyFrom(self.hub.load)
            self.publish(load)
