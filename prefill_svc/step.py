"""One step of a prefill worker: pool, scheduler and model joined, and what it has to tell the event loop."""

from collections.abc import Callable
from dataclasses import dataclass

from pageferry.core.errors import DeadlineExceededError, PageferryError
from pageferry.core.layout import PageKey, Place
from pageferry.core.plan import Chunk, Emitted, Ended, Plan, Runner, SampledToken, StepResult
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sequence import FinishReason, Sequence
from pageferry.runtime.reports import Report
from pageferry.runtime.worker_metrics import StepFigures
from pageferry.runtime.worker_step import ChunkDone, StepDone, WorkerStep


@dataclass(frozen=True, slots=True)
class Drawn:
    """The prompt is computed and the first token drawn; `reason` where that token ends the generation.

    For a beam search none is drawn.
    """

    sequence: Sequence
    position: int
    token: SampledToken | None
    reason: FinishReason | None
    time: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is over, without a token."""

    sequence: Sequence
    error: PageferryError


Event = ChunkDone | Drawn | Failed | StepDone | Report


class PrefillStep(WorkerStep[PrefillScheduler, ChunkDone | Drawn | Failed]):
    """A prefill worker's: each chunk's pages come with its event."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        pools: PagePools,
        runner: Runner,
        clock: Callable[[], float],
        *,
        traces_steps: bool = False,
    ) -> None:
        super().__init__(scheduler, pools, runner, clock, traces_steps=traces_steps)
        self._shipped: dict[Sequence, tuple[int, bool]] = {}  # sequences whose pages are: `first_page`, `as_tails`

    def add(self, sequence: Sequence, first_page: int | None, *, as_tails: bool = False) -> None:
        """Queue a prompt; pages from `first_page` on come with the events of its chunks, none where it is None.

        Those are the pages that live at the prompt's end. `as_tails`: the last one, not full, is named a tail.

        Raises DeadlineExceededError without any work where the deadline has passed, and what the scheduler raises.
        """
        self._scheduler.add(sequence, self._accept(sequence))
        if first_page is not None:
            self._shipped[sequence] = (first_page, as_tails)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence in any state; idempotent. Pages that events carried keep their references."""
        self._shipped.pop(sequence, None)
        self._scheduler.abort(sequence)
        self._reporter.mark_changed()

    def release_pages(self, places: list[Place]) -> None:
        """Give back references that an event carried."""
        self._pools.release(places)
        self._reporter.mark_changed()

    def _apply(self, plan: Plan, result: StepResult, started: float, ended: float) -> None:
        self._reporter.measure(plan.num_tokens, StepFigures(len(plan.chunks), plan.num_tokens, ended - started))
        # Taken before `apply` lets go of the pages of sequences that are done.
        taken = {chunk.sequence: self._take_pages(chunk) for chunk in plan.chunks}
        output = self._scheduler.apply(plan, result, ended)
        over = {end.sequence: end for end in output.ended}
        drawn = {emitted.sequence: emitted for emitted in output.emitted}
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, over.get(chunk.sequence)
            pages = taken[sequence]
            if end is not None and (end.failure or end.reason is not None):  # nobody will read them
                self._pools.release([place for _, place in pages])
                pages = ()
            done = ChunkDone(sequence, chunk.start, chunk.num_tokens, started, ended, pages, result.device_s)
            self._pending.append(done)
            if end is not None and not end.failure:
                self._draw(drawn.get(sequence), end, ended)
            elif end is not None:
                self._end(end, ended)

    def _take_pages(self, chunk: Chunk) -> tuple[tuple[PageKey, Place], ...]:
        """Acquire the pages that are complete once `chunk` is, and that were not before, but for cached ones."""
        if chunk.sequence not in self._shipped:
            return ()
        first_page, as_tails = self._shipped[chunk.sequence]
        end = chunk.start + chunk.num_tokens
        pages = self._scheduler.tables.shippable(chunk.sequence, first_page, chunk.start, end, as_tails=as_tails)
        self._pools.acquire(place for _, place in pages)
        return tuple(pages)

    def _draw(self, emitted: Emitted | None, end: Ended, now: float) -> None:
        sequence, token = end.sequence, None
        self._shipped.pop(sequence, None)
        if emitted is not None:
            self._reporter.num_generated += 1
            token = emitted.token
        self._pending.append(Drawn(sequence, len(sequence.work.output_ids), token, end.reason, now))

    def _end(self, ended: Ended, now: float) -> None:
        """Without a token."""
        self._shipped.pop(ended.sequence, None)
        error = ended.error("SAMPLING_FAILED")
        if ended.failure == "deadline":
            error = DeadlineExceededError("the deadline passed before the first token was drawn")
        self._pending.append(Failed(ended.sequence, error))
