"""One step of a decode worker: pool, scheduler, tickets and model joined, and what it has to tell the event loop."""

from collections.abc import Callable
from dataclasses import dataclass

from pageferry.core.beam import Hypothesis
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.errors import DeadlineExceededError, PageferryError, ResourceExhaustedError
from pageferry.core.handoff import TicketTable
from pageferry.core.plan import Emitted, Ended, Output, Plan, Runner, SampledToken, StepResult
from pageferry.core.pools import PagePools
from pageferry.core.sequence import FinishReason, Sequence
from pageferry.decode_svc.desk import DeskActions, TicketDesk
from pageferry.runtime.reports import Report
from pageferry.runtime.tickets import Grant
from pageferry.runtime.worker_metrics import StepFigures
from pageferry.runtime.worker_step import ChunkDone, StepDone, WorkerStep

RESERVE_RETRY_MS = 50


@dataclass(frozen=True, slots=True)
class Figures:
    """What a sequence took, up to its end, however it ended. Times are seconds of the worker's clock."""

    ready: float  # committed, or accepted where the prompt is computed here
    first_step: float | None  # when its first step began
    first_own: float | None  # when the first token drawn here was there
    second_own: float | None
    ended: float
    forward_s: float  # in the model's forward pass, over all of its steps
    num_steps: int
    num_preemptions: int
    num_cached: int
    num_drafted: int = 0
    num_accepted: int = 0
    first_device_s: float | None = None  # of the first step, by its device's own clock


@dataclass(frozen=True, slots=True)
class Begun:
    """The first or the second token drawn here is there."""

    sequence: Sequence
    figures: Figures


@dataclass(frozen=True, slots=True)
class Completed:
    """The sequence is complete."""

    sequence: Sequence
    reason: FinishReason
    figures: Figures
    hypotheses: tuple[Hypothesis, ...] = ()  # of a beam search, which has told no tokens


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is over, and incomplete; without figures where it could not run yet."""

    sequence: Sequence
    error: PageferryError
    figures: Figures | None


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """An open push cannot succeed any more: it must be ended, and then closed at the desk."""

    push: Grant
    error: PageferryError


OwnEvent = Begun | Emitted | ChunkDone | Completed | Failed | HandoffEnded
Event = OwnEvent | StepDone | Report


@dataclass(slots=True, eq=False)
class _Job:
    """What is known of a live request beside its sequence."""

    ready: float | None  # committed, or accepted where the prompt is computed here
    first_step: float | None = None
    first_device_s: float | None = None
    first_own: float | None = None
    second_own: float | None = None
    forward_s: float = 0.0


class DecodeStep(WorkerStep[DecodeScheduler, OwnEvent]):
    """A decode worker's, with the tickets of its hand-offs."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        pools: PagePools,
        tickets: TicketTable,
        runner: Runner,
        clock: Callable[[], float],
        *,
        traces_steps: bool = False,
    ) -> None:
        super().__init__(scheduler, pools, runner, clock, lambda: self.desk.num_live, traces_steps=traces_steps)
        actions = DeskActions(
            scheduler.tables.expected,
            self._activate,
            self._fail,
            lambda push, error: self._emit(HandoffEnded(push, error)),
        )
        self.desk = TicketDesk(tickets, pools, actions)
        self._jobs: dict[Sequence, _Job] = {}

    def reserve(self, sequence: Sequence, ticket_id: bytes) -> None:
        """Hold pages for a prompt that comes from a prefill worker, and issue the ticket to fill them.

        `ticket_id` is 16 random bytes. Raises ResourceExhaustedError, with nothing changed, where there is no room now.
        """
        now = self._accept(sequence)
        if not self._scheduler.reserve(sequence, now):
            message = f"no room for the {len(sequence.token_ids)} tokens of the prompt now"
            raise ResourceExhaustedError(message, reason="NO_PAGES", retry_after_ms=RESERVE_RETRY_MS)
        self._jobs[sequence] = _Job(None)
        self.desk.issue(ticket_id, sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt that is computed here."""
        now = self._accept(sequence)
        self._scheduler.add(sequence, now)
        self._jobs[sequence] = _Job(now)

    def abort(self, sequence: Sequence, error: PageferryError) -> Figures | None:
        """Forget a sequence in any state, without an event; idempotent. `error` is what a push under way is told.

        Returns what it took, where it was live and could run.
        """
        figures = self._figures(sequence, self._clock())
        self._jobs.pop(sequence, None)
        self.desk.drop(sequence, error)
        self._scheduler.abort(sequence)
        self._reporter.mark_changed()
        return figures

    def _expire(self, now: float) -> None:
        self.desk.expire(now)

    def _next_expiry(self, now: float) -> float | None:
        return self.desk.wait(now)

    def _apply(self, plan: Plan, result: StepResult, started: float, ended: float) -> None:
        self._reporter.num_preemptions += len(plan.preempted)
        num_prefill = 0
        for sequence in {chunk.sequence.owner for chunk in plan.chunks}:
            job = self._jobs[sequence]
            if job.first_step is None:
                job.first_step, job.first_device_s = started, result.device_s
            job.forward_s += result.forward_s
        for chunk in plan.chunks:
            if chunk.samples and chunk.sequence.work.beam is not None:  # its tokens are told at its end
                self._note_own(chunk.sequence.owner, ended)
            if chunk.is_prompt:
                num_prefill += chunk.num_tokens
                done = (chunk.sequence.owner, chunk.start, chunk.num_tokens, started, ended)
                self._emit(ChunkDone(*done, device_s=result.device_s))
        num_tokens = plan.num_tokens + sum(result.num_drafted)
        self._reporter.measure(num_prefill, StepFigures(len(plan.chunks), num_tokens, ended - started))
        self._take(self._scheduler.apply(plan, result, ended), ended, own=True)

    def _activate(self, sequence: Sequence, first: SampledToken | None, now: float) -> None:
        self._jobs[sequence].ready = now
        self._take(self._scheduler.activate(sequence, first, now), now, own=False)
        self._reporter.mark_changed()

    def _take(self, output: Output, now: float, *, own: bool) -> None:
        """Hand a scheduler's output on; `own` tokens were drawn here."""
        for emitted in output.emitted:
            if own:
                self._reporter.num_generated += 1
                self._note_own(emitted.sequence, now)
            self._emit(emitted)
        for ended in output.ended:
            self._end(ended, now)

    def _note_own(self, sequence: Sequence, now: float) -> None:
        """A token was drawn here."""
        job = self._jobs[sequence]
        if job.first_own is None:
            job.first_own = now
        elif job.second_own is None:
            job.second_own = now
        else:
            return
        figures = self._figures(sequence, now)
        assert figures is not None, "a sequence ran before it was ready"
        self._emit(Begun(sequence, figures))

    def _end(self, ended: Ended, now: float) -> None:
        sequence = ended.sequence
        if ended.reason is None:
            self._fail(sequence, _error(ended))
            return
        figures = self._figures(sequence, now)
        assert figures is not None, "a sequence ran before it was ready"
        del self._jobs[sequence]
        self._reporter.num_generated += sum(len(one.token_ids) for one in ended.hypotheses)
        self._emit(Completed(sequence, ended.reason, figures, ended.hypotheses))

    def _fail(self, sequence: Sequence, error: PageferryError) -> None:
        self._emit(Failed(sequence, error, self.abort(sequence, error)))

    def _figures(self, sequence: Sequence, now: float) -> Figures | None:
        job = self._jobs.get(sequence)
        if job is None or job.ready is None:
            return None
        return Figures(
            ready=job.ready,
            first_step=job.first_step,
            first_own=job.first_own,
            second_own=job.second_own,
            ended=now,
            forward_s=job.forward_s,
            num_steps=sequence.num_steps,
            num_preemptions=sequence.num_preemptions,
            num_cached=sequence.num_cached,
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted,
            first_device_s=job.first_device_s,
        )

    def _emit(self, event: OwnEvent) -> None:
        self._pending.append(event)


def _error(ended: Ended) -> PageferryError:
    if ended.failure == "deadline":
        return DeadlineExceededError(f"the deadline passed after {ended.sequence.num_output} tokens")
    return ended.error("STEP_FAILED")
