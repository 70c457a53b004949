"""Which prompts a prefill worker computes next, in which chunks."""

from collections import deque

from pageferry.core.config import SchedulerConfig
from pageferry.core.layout import CacheLayout
from pageferry.core.plan import Chunk, Emitted, Ended, Output, Plan, StepResult
from pageferry.core.pools import PagePools
from pageferry.core.scheduler import Scheduler, end_step, prefill_order, prompt_chunk, start_step
from pageferry.core.sequence import Sequence, SequenceStatus
from pageferry.core.sequence_queues import RETRY_S, Key


class PrefillScheduler(Scheduler):
    """Shares each step's `chunk_tokens` over the prompts that have the least left; long ones gain by waiting.

    A step is for prompts of one priority: less urgent ones would make it longer for those that it is for. They go on
    with the next one.

    A prompt takes all its pages of full groups when it starts, and is promised those of window groups, so that prompts
    that have started can always finish. It ends here with its first token. Pages go back with the step that ends it:
    who still reads them holds references of its own, acquired between the run of a step and `apply`.
    """

    def __init__(self, config: SchedulerConfig, pools: PagePools, layout: CacheLayout) -> None:
        super().__init__(config, pools, layout, config.chunk_tokens)
        self._max_running = min(config.max_prefills, config.max_num_seqs)
        self._waiting_tokens = 0
        self._running: dict[Sequence, None] = {}
        self._window_start = 0.0

    @property
    def queued_prompt_tokens(self) -> int:
        """Tokens still to compute, those that the prefix cache is expected to give left out."""
        return self._waiting_tokens + sum(sequence.num_remaining for sequence in self._running)

    @property
    def prompts_by_priority(self) -> dict[int, tuple[int, int]]:
        loads: dict[int, tuple[int, int]] = {}
        for sequence in (*self._waiting, *self._running):
            waits = sequence.status is SequenceStatus.WAITING
            num_waiting, num_tokens = loads.get(sequence.work.priority, (0, 0))
            num_left = self._num_expected(sequence) if waits else sequence.num_remaining
            loads[sequence.work.priority] = (num_waiting + waits, num_tokens + num_left)
        return dict(sorted(loads.items()))

    def add(self, sequence: Sequence, now: float) -> None:
        """Take a sequence on. Raises InvalidArgumentError if the pool is too small, ResourceExhaustedError if full."""
        self.tables.claims.check_fits(len(sequence.token_ids), what=f"a prompt of {len(sequence.token_ids)} tokens")
        self._waiting.check_not_full(self._config.max_waiting)
        if not self._waiting:
            self._window_start = now
        sequence.num_cached = self.tables.claims.num_cached(sequence)  # what is expected; `take` sets what is found
        self._waiting.add(sequence, self._order(sequence))
        self._waiting_tokens += self._num_expected(sequence)
        self._deadlines.add(sequence)
        self._is_blocked = False

    def schedule(self, now: float) -> Plan | None:
        """The next step; None where there is no work, it waits for company, or pages are lacking."""
        if self._window_left(now) > 0:
            return None
        chunks: list[Chunk] = []
        budget, may_start = self._config.chunk_tokens, True
        running = deque(sorted(self._running, key=self._order))
        while budget > 0:
            if may_start and self._waiting and (not running or self._waiting.head_key < self._order(running[0])):
                sequence = self._waiting.head
                if _is_behind(sequence, chunks):
                    break
                may_start = self._start(sequence)
                if not may_start:
                    continue
            elif running:
                sequence = running.popleft()
                if _is_behind(sequence, chunks):
                    break
            else:
                break
            final = self._config.final_chunk_tokens
            chunk = prompt_chunk(sequence, budget, self.tables, is_first=not chunks, final_tokens=final)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.num_tokens
        self._is_blocked = not chunks and bool(self._waiting or self._running)
        return start_step(chunks, (), self.tables, now) if chunks else None

    def apply(self, plan: Plan, result: StepResult, now: float) -> Output:
        """Record what the plan's run gave. A sequence that sampled its token has ended here and holds no pages."""
        emitted: list[Emitted] = []
        ended = []
        for drawn in end_step(plan, result, self.tables):
            emitted += drawn.emitted
            if drawn.emitted:
                drawn.sequence.first_token_time = now
            ended.append(Ended(drawn.sequence, drawn.reason, drawn.failure))
            self._end(drawn.sequence)
        return Output(tuple(emitted), tuple(ended))

    def _next_work(self, now: float) -> float | None:
        if not self._running and not self._waiting:
            return None
        return RETRY_S if self._is_blocked else max(0.0, self._window_left(now))

    def _order(self, sequence: Sequence) -> Key:
        num_remaining = len(sequence.token_ids) - max(sequence.num_computed, sequence.num_cached)
        return prefill_order(sequence, num_remaining, self._config.ageing_tokens_per_s)

    def _num_expected(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - sequence.num_cached

    def _window_left(self, now: float) -> float:
        """Seconds for which a step is better put off, so that prompts that are about to come can share it."""
        could_join = (
            not self._running
            and 0 < len(self._waiting) < min(self._max_running, self._config.max_waiting)
            and self._waiting_tokens < self._config.chunk_tokens
            and self.tables.claims.has_more_room(self._waiting_tokens)
        )
        return self._window_start + self._config.batch_window_ms / 1000 - now if could_join else 0.0

    def _start(self, sequence: Sequence) -> bool:
        """Move the sequence from waiting to running; False where a slot or pages are lacking."""
        if len(self._running) >= self._max_running:
            return False
        claim = self.tables.claims.to_compute(sequence, len(sequence.token_ids))
        if self.tables.claims.is_lacking(claim):
            return False
        self._leave_queue(sequence)
        self.tables.take(sequence, claim)
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence] = None
        return True

    def _leave_queue(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._waiting_tokens -= self._num_expected(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._leave_queue(sequence)
        self._running.pop(sequence, None)
        self.tables.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._is_blocked = False


def _is_behind(sequence: Sequence, chunks: list[Chunk]) -> bool:
    """Whether it is less urgent than what the step has begun with."""
    return bool(chunks) and sequence.work.priority > chunks[0].sequence.work.priority
