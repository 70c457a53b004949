"""What schedulers have in common, and what they do with chunks: their lengths, their plan, what a step has changed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass

from pageferry.core.beam import Candidates
from pageferry.core.config import SchedulerConfig
from pageferry.core.layout import CacheLayout, Place
from pageferry.core.page_tables import PageTables
from pageferry.core.plan import Chunk, Emitted, Ended, Plan, SampleFailure, Samples, StepResult
from pageferry.core.pools import PagePools
from pageferry.core.sequence import FinishReason, Sequence, SequenceStatus
from pageferry.core.sequence_queues import DeadlineQueue, Key, SequenceQueue

MAX_PROMPT_ROWS = 64  # of a step, whose logits are kept to report prompt tokens


class Scheduler(ABC):
    """What both schedulers keep, and how a sequence leaves them before its end.

    `tables` has what is received or shipped of a sequence's pages. `chunk_tokens` are the most of a step.
    """

    _running: Sized  # sequences, in an order of each kind's own

    def __init__(self, config: SchedulerConfig, pools: PagePools, layout: CacheLayout, chunk_tokens: int) -> None:
        self._config = config
        self.tables = PageTables(pools, layout, prefix_cache=config.prefix_cache, chunk_tokens=chunk_tokens)
        self._waiting = SequenceQueue()
        self._deadlines = DeadlineQueue()
        self._is_blocked = False  # whether nothing could run for lack of pages

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def least_priority(self) -> int | None:
        """The largest number of a running sequence's, whose place more urgent work may take; None where none may."""
        return None

    @property
    def prompts_by_priority(self) -> Mapping[int, tuple[int, int]]:
        """Prompts that wait, and tokens still to compute, of each priority in order; empty where that says nothing."""
        return {}

    @property
    @abstractmethod
    def queued_prompt_tokens(self) -> int:
        """Tokens still to compute before their sequences can decode."""

    @abstractmethod
    def schedule(self, now: float) -> Plan | None:
        """The next step; None where there is nothing to run now. `apply` follows before anything else is scheduled."""

    def abort(self, sequence: Sequence) -> None:
        """Drop the sequence, whatever its state, and free what it holds; again does nothing."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._end(sequence)

    def expire(self, now: float) -> tuple[Ended, ...]:
        """Drop the sequences whose deadline has passed."""
        expired = self._deadlines.expired(now)
        for sequence in expired:
            self._end(sequence)
        return tuple(Ended(sequence, failure="deadline") for sequence in expired)

    def next_wakeup(self, now: float) -> float | None:
        """Seconds until `expire` and `schedule` have something to do; None: not before something is added."""
        work_s, deadline = self._next_work(now), self._deadlines.next_deadline()
        times = [work_s, None if deadline is None else max(0.0, deadline - now)]
        return min((time for time in times if time is not None), default=None)

    @abstractmethod
    def _next_work(self, now: float) -> float | None:
        """Seconds until `schedule` has something to do."""

    @abstractmethod
    def _end(self, sequence: Sequence) -> None:
        """Drop a sequence in any state, and free what it holds."""


def prefill_order(sequence: Sequence, num_remaining: int, ageing_tokens_per_s: float) -> Key:
    """The order of prompts: by priority, then the least left to compute, less what it has gained by waiting.

    All gain at the same rate, so that the order of two that wait never changes and `now` is not needed.
    """
    return (sequence.work.priority, num_remaining + ageing_tokens_per_s * sequence.arrival)


def prompt_chunk(
    sequence: Sequence, budget: int, tables: PageTables, *, is_first: bool, final_tokens: int = 0
) -> Chunk | None:
    """The sequence's next chunk of at most `budget` tokens; None if it sits the step out, also for lack of pages.

    It ends with a page or with the tokens, so that whole pages can be shipped. Where the budget doesn't reach the end
    of a page, a chunk that is first in its plan ends anywhere, and another is left for a later step. With
    `final_tokens`, a chunk more than twice as long doesn't end the prompt: so many are left for one more chunk. Of a
    beam the last token is left for the step that all beams take; it goes on page by page where it lacks pages, so that
    it never waits for several at once. With log-probabilities of the prompt, it is short and the first of its plan, as
    logits of all its tokens are kept.
    """
    if sequence.wants_prompt_logprobs:
        if not is_first:
            return None
        budget = min(budget, MAX_PROMPT_ROWS)
    last = len(sequence.token_ids) - (sequence.root is not None)
    start, end = sequence.num_computed, min(last, sequence.num_computed + budget)
    if end == last and end - start > 2 * final_tokens > 0:
        end -= final_tokens
    if end < last:
        aligned = end - end % tables.page_size
        if aligned <= start and not is_first:
            return None
        end = aligned if aligned > start else end
    if sequence.root is not None and end > start and not tables.cover(sequence, end):
        end = min(end, start - start % tables.page_size + tables.page_size)
    if end <= start or not tables.cover(sequence, end):
        return None
    return Chunk(sequence, start, end - start, samples=end == len(sequence.token_ids))


def start_step(chunks: list[Chunk], preempted: tuple[Sequence, ...], tables: PageTables, now: float) -> Plan:
    """The plan of the chunks; from here to `end_step` released pages stay out of the pool."""
    fresh: list[Place] = []
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.num_tokens + chunk.num_drafts
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
        if tables.num_pages(start) != tables.num_pages(end):
            fresh += tables.fresh(sequence, start, end)
    return Plan(tuple(chunks), tuple(fresh), tables.begin_step(), preempted)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a sequence got: tokens, which are appended to it, and whether they end it; or why it got none."""

    sequence: Sequence
    emitted: tuple[Emitted, ...] = ()
    candidates: Candidates = ()  # instead, of a beam search
    reason: FinishReason | None = None
    failure: str = ""


def take_samples(sequence: Sequence, samples: Samples) -> Drawn:
    """Append the tokens, up to one that ends the sequence."""
    if isinstance(samples, SampleFailure):
        return Drawn(sequence, failure=samples.message)
    if sequence.work.beam is not None:
        return Drawn(sequence, candidates=samples[-1].top)
    emitted = []
    for token in samples:
        emitted.append(Emitted(sequence, sequence.num_output, token))
        sequence.append(token.token_id)
        if (reason := sequence.finish_reason()) is not None:
            return Drawn(sequence, tuple(emitted), reason=reason)
    return Drawn(sequence, tuple(emitted))


def end_step(plan: Plan, result: StepResult, tables: PageTables) -> Iterator[Drawn]:
    """Record the chunks as computed and yield what was sampled, skipping sequences that were aborted meanwhile.

    The caller ends those whose last token was among it.
    """
    samples, counts = iter(result.samples), iter(result.num_drafted)
    for sequence, tokens in result.prompt_logprobs:
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += tokens
    for chunk in plan.chunks:
        sequence = chunk.sequence
        sampled = next(samples) if chunk.samples else None
        num_drafted = next(counts, 0) if chunk.samples else 0
        if sequence.status is SequenceStatus.FINISHED:
            continue
        end = chunk.start + chunk.num_tokens
        drawn = None if sampled is None else take_samples(sequence, sampled)
        sequence.num_drafted += num_drafted
        if drawn is not None and drawn.emitted:
            num_accepted = len(drawn.emitted) - 1  # the last token is not computed
            sequence.num_accepted += num_accepted
            end += num_accepted
        sequence.num_computed = end
        sequence.num_steps += 1
        if drawn is None or not drawn.failure:  # else its pages may hold what is not a number
            tables.store(sequence, chunk.start, end)
        if drawn is not None:
            yield drawn
        if sequence.tables:  # else that token was its last
            tables.slide(sequence)
    tables.end_step()


class LocalPrefill:
    """The prompts that a decode worker computes beside decoding, in chunks so short that streams hardly notice.

    Shares `local_chunk_tokens` of each step over the running sequences that have more than a token to compute.
    """

    def __init__(self, config: SchedulerConfig, tables: PageTables) -> None:
        self._tables = tables
        self._chunk_tokens = config.local_chunk_tokens
        self._ageing_tokens_per_s = config.ageing_tokens_per_s

    def chunks(self, running: Iterable[Sequence]) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self._chunk_tokens
        for sequence in sorted(_prompts(running), key=lambda one: self._order(one, one.num_remaining)):
            chunk = prompt_chunk(sequence, budget, self._tables, is_first=not chunks)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.num_tokens
        return chunks

    def has_room_for(self, waiting: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a step's tokens reach one that waits, after those that are computed before it."""
        prompts = _prompts(running)
        if not prompts:
            return True
        order = self._order(waiting, len(waiting.token_ids) - self._tables.claims.num_cached(waiting))
        before = sum(one.num_remaining for one in prompts if self._order(one, one.num_remaining) <= order)
        return before < self._chunk_tokens

    def _order(self, sequence: Sequence, num_remaining: int) -> Key:
        return prefill_order(sequence, num_remaining, self._ageing_tokens_per_s)


def _prompts(running: Iterable[Sequence]) -> list[Sequence]:
    return [one for sequence in running for one in sequence.members if one.num_remaining > 1]
