"""One step of a worker: scheduler and model joined, on the engine's thread, without I/O."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pageferry.core.errors import DeadlineExceededError
from pageferry.core.layout import PageKey, Place
from pageferry.core.plan import Ended, Plan, Runner, StepResult
from pageferry.core.pools import PagePools
from pageferry.core.scheduler import Scheduler
from pageferry.core.sequence import Sequence
from pageferry.runtime.reports import Report, Reporter
from pageferry.v1.inference_pb2 import WorkerLoad

S = TypeVar("S", bound=Scheduler)
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A chunk is computed. Each of `pages` comes with a reference to its place: the receiver of the event owes
    `release_pages` for it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    started: float
    ended: float
    pages: tuple[tuple[PageKey, Place], ...] = ()
    device_s: float | None = None  # of the whole step, by its device's own clock


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step of a batch is over; only told where steps are traced."""

    sequences: frozenset[Sequence]
    started: float
    ended: float
    num_tokens: int
    num_prompt_tokens: int  # of them
    num_preempted: int
    num_pages_used: int  # while it ran
    forward_s: float
    device_s: float | None


class WorkerStep(ABC, Generic[S, E]):
    """The engine thread's stepper; `E` are its events beside reports. Every method runs on that thread."""

    def __init__(
        self,
        scheduler: S,
        pools: PagePools,
        runner: Runner,
        clock: Callable[[], float],
        num_tickets: Callable[[], int] = lambda: 0,
        *,
        traces_steps: bool = False,
    ) -> None:
        """`traces_steps`: steps themselves are events too."""
        self._scheduler = scheduler
        self._pools = pools
        self._traces_steps = traces_steps
        self._runner = runner
        self._clock = clock
        self._reporter = Reporter(pools, scheduler, num_tickets)
        # Events, for `step` to hand on; those of commands wait for the next one.
        self._pending: list[E | StepDone | Report] = []

    def load(self) -> WorkerLoad:
        return self._reporter.load()

    def step(self, now: float) -> list[E | StepDone | Report]:
        for ended in self._scheduler.expire(now):  # first, so that a deadline isn't reported as a lost lease
            self._end(ended, now)
        self._expire(now)
        plan = self._scheduler.schedule(now)
        if plan is not None:
            started = self._clock()
            result = self._runner.run(plan)
            over = self._clock()
            if self._traces_steps and plan.chunks:
                self._pending.append(self._step_done(plan, result, started, over))
            self._apply(plan, result, started, over)
        events, self._pending = self._pending, []
        if events:
            self._reporter.mark_changed()
        return events + self._reporter.take(self._clock())

    def next_wakeup(self, now: float) -> float | None:
        waits = (self._scheduler.next_wakeup(now), self._next_expiry(now), self._reporter.wait(now))
        return 0.0 if self._pending else min(wait for wait in waits if wait is not None)

    def _step_done(self, plan: Plan, result: StepResult, started: float, ended: float) -> StepDone:
        return StepDone(
            frozenset(chunk.sequence.owner for chunk in plan.chunks),
            started,
            ended,
            num_tokens=plan.num_tokens,
            num_prompt_tokens=sum(chunk.num_tokens for chunk in plan.chunks if chunk.is_prompt),
            num_preempted=len(plan.preempted),
            num_pages_used=self._pools.num_resident,
            forward_s=result.forward_s,
            device_s=result.device_s,
        )

    def _accept(self, sequence: Sequence) -> float:
        """The time now. Raises DeadlineExceededError, before any work, where the deadline has passed."""
        now = self._clock()
        if sequence.deadline is not None and sequence.deadline <= now:
            raise DeadlineExceededError("the deadline passed before the request was accepted")
        self._reporter.mark_changed()
        return now

    @abstractmethod
    def _apply(self, plan: Plan, result: StepResult, started: float, ended: float) -> None:
        """Record what the plan's run gave."""

    @abstractmethod
    def _end(self, ended: Ended, now: float) -> None:
        """Tell of a sequence that the scheduler has ended."""

    def _expire(self, now: float) -> None:
        """End what else has run out."""

    def _next_expiry(self, now: float) -> float | None:
        """Seconds until `_expire` has something to do."""
        return None
