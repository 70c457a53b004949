"""One step of a prefill worker: page pool, scheduler and model joined, on the engine's thread, without I/O."""

from collections.abc import Callable
from dataclasses import dataclass

from pageferry.core.errors import DeadlineExceededError, InternalError, PageferryError
from pageferry.core.layout import PageLayout
from pageferry.core.plan import Chunk, Emitted, Ended, Plan, Runner, SampledToken
from pageferry.core.pool import PageId, PagePool
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sequence import FinishReason, Sequence
from pageferry.runtime.reports import Report, Reporter
from pageferry.v1.inference_pb2 import WorkerLoad


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A chunk is computed. Each of `pages` (index in the page table, page) comes with a reference: the receiver of the
    event owes `release_pages` for it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    started: float
    ended: float
    pages: tuple[tuple[int, PageId], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """The prompt is computed and the first token drawn; `reason` where that token ends the generation."""

    sequence: Sequence
    position: int
    token: SampledToken
    reason: FinishReason | None
    time: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is over, without a token."""

    sequence: Sequence
    error: PageferryError


Event = ChunkDone | Drawn | Failed | Report


class PrefillStep:
    """The engine thread's stepper. Every method runs on that thread."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        pool: PagePool,
        runner: Runner,
        layout: PageLayout,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._runner = runner
        self._layout = layout
        self._clock = clock
        self._next_page: dict[Sequence, int] = {}  # of sequences whose pages are shipped: the first not handed over yet
        self._reporter = Reporter(pool, scheduler)

    def add(self, sequence: Sequence, first_page: int | None) -> None:
        """Queue a prompt; pages from `first_page` on come with the events of its chunks, none where it is None.

        Raises DeadlineExceededError without any work where the deadline has passed, and what the scheduler raises.
        """
        now = self._clock()
        if sequence.deadline is not None and sequence.deadline <= now:
            raise DeadlineExceededError("the deadline passed before the prompt was queued")
        self._scheduler.add(sequence, now)
        if first_page is not None:
            self._next_page[sequence] = first_page
        self._reporter.mark_changed()

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence in any state; idempotent. Pages that events carried keep their references."""
        self._next_page.pop(sequence, None)
        self._scheduler.abort(sequence)
        self._reporter.mark_changed()

    def release_pages(self, pages: list[PageId]) -> None:
        """Give back references that an event carried."""
        self._pool.release(pages)
        self._reporter.mark_changed()

    def load(self) -> WorkerLoad:
        return self._reporter.load()

    def step(self, now: float) -> list[Event]:
        events: list[Event] = [self._failed(ended) for ended in self._scheduler.expire(now)]
        plan = self._scheduler.schedule(now)
        if plan is not None:
            events += self._run(plan)
        if events:
            self._reporter.mark_changed()
        return events + self._reporter.take(self._clock())

    def next_wakeup(self, now: float) -> float:
        report = self._reporter.wait(now)
        work = self._scheduler.next_wakeup(now)
        return report if work is None else min(report, work)

    def _run(self, plan: Plan) -> list[Event]:
        started = self._clock()
        result = self._runner.run(plan)
        ended = self._clock()
        self._reporter.measure(plan.num_tokens, ended - started)
        # Taken before `apply` lets go of the pages of sequences that are done.
        taken = {chunk.sequence: self._take_pages(chunk) for chunk in plan.chunks}
        output = self._scheduler.apply(plan, result, ended)
        over = {end.sequence: end for end in output.ended}
        drawn = {emitted.sequence: emitted for emitted in output.emitted}
        events: list[Event] = []
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, over.get(chunk.sequence)
            pages = taken[sequence]
            if end is not None and (end.failure or end.reason is not None):  # nobody will read them
                self._pool.release([page for _, page in pages])
                pages = ()
            events.append(ChunkDone(sequence, chunk.start, chunk.num_tokens, started, ended, pages))
            if end is not None:
                events.append(self._drawn(drawn[sequence], end, ended) if not end.failure else self._failed(end))
        return events

    def _take_pages(self, chunk: Chunk) -> tuple[tuple[int, PageId], ...]:
        """Acquire the pages that are complete once `chunk` is, and that were not handed over yet."""
        sequence = chunk.sequence
        first = self._next_page.get(sequence)
        if first is None:
            return ()
        covered = chunk.start + chunk.num_tokens
        end = self._layout.num_pages(covered) if chunk.samples else covered // self._layout.page_size
        pages = tuple((index, sequence.pages[index]) for index in range(first, end))
        self._pool.acquire(page for _, page in pages)
        self._next_page[sequence] = max(first, end)
        return pages

    def _drawn(self, emitted: Emitted, end: Ended, now: float) -> Drawn:
        self._next_page.pop(emitted.sequence, None)
        self._reporter.num_generated += 1
        return Drawn(emitted.sequence, emitted.position, emitted.token, end.reason, now)

    def _failed(self, ended: Ended) -> Failed:
        self._next_page.pop(ended.sequence, None)
        if ended.failure == "deadline":
            return Failed(ended.sequence, DeadlineExceededError("the deadline passed before the first token was drawn"))
        return Failed(ended.sequence, InternalError(ended.failure, reason="SAMPLING_FAILED"))
