"""Which sequences a decode worker steps, whom it takes on, and who must make room."""

from collections.abc import Iterable
from functools import partial
from itertools import islice, takewhile
from operator import is_not

from pageferry.core.beam_groups import BeamGroups
from pageferry.core.claims import Claim
from pageferry.core.config import SchedulerConfig
from pageferry.core.errors import invalid
from pageferry.core.layout import CacheLayout
from pageferry.core.plan import Chunk, Emitted, Ended, Output, Plan, SampledToken, StepResult
from pageferry.core.pools import PagePools
from pageferry.core.preemption import choose_victims, margin, max_positions, num_growth, running_order, waiting_order
from pageferry.core.scheduler import Drawn, LocalPrefill, Scheduler, end_step, start_step, take_samples
from pageferry.core.sequence import Sequence, SequenceStatus
from pageferry.core.sequence_queues import RETRY_S, SequenceQueue
from pageferry.core.speculation import Speculation, cover_drafts


class DecodeScheduler(Scheduler):
    """Steps every running sequence by one token, or several where drafts are accepted, and beside them computes
    prompts in short chunks.

    A sequence comes in by `add`, its prompt to be computed here, or by `reserve` and, once its pages are received,
    `activate`. Who gets pages and slots first goes by priority, then arrival. Where pages run short in a step, the last
    running sequences behind the one in need are preempted: they give all pages back, wait at the front of their
    priority, and are recomputed, prompt and output, without emitting anything again. A sequence with nobody behind it
    sits the step out. For a slot or pages of newcomers only sequences of lower priority are preempted.

    A beam search takes a slot for each of its beams, which are stepped, preempted and dropped together.
    """

    def __init__(
        self, config: SchedulerConfig, pools: PagePools, layout: CacheLayout, speculation: Speculation | None = None
    ) -> None:
        super().__init__(config, pools, layout, config.local_chunk_tokens)  # those that wait are in `waiting_order`
        self._speculation = speculation
        self._prefill = LocalPrefill(config, self.tables)
        self._beams = BeamGroups(self.tables)
        self._running: SequenceQueue = SequenceQueue()  # by priority, arrival
        self._receiving: set[Sequence] = set()
        self._preempted: list[Sequence] = []  # since the last plan
        self._lacks_room = False  # whether the first that waits did, at the last step

    @property
    def num_running(self) -> int:
        """Slots that are taken."""
        return sum(sequence.num_slots for sequence in self._running)

    @property
    def queued_prompt_tokens(self) -> int:
        """Tokens to compute before the sequences here can decode, cached ones of those that wait included."""
        waiting = sum(len(sequence.token_ids) for sequence in self._waiting)
        return waiting + sum(one.num_remaining - 1 for sequence in self._running for one in sequence.members)

    @property
    def least_priority(self) -> int | None:
        return max((sequence.work.priority for sequence in self._running), default=None)

    def add(self, sequence: Sequence, now: float) -> None:
        """Take on a sequence whose prompt is computed here.

        Raises InvalidArgumentError if the pool can never hold it with all its tokens, ResourceExhaustedError if too
        many wait.
        """
        self._check_fits(sequence)
        self._waiting.check_not_full(self._config.max_waiting)
        self._waiting.add(sequence, waiting_order(sequence))
        self._deadlines.add(sequence)
        self._is_blocked = False

    def reserve(self, sequence: Sequence, now: float) -> bool:
        """Take a slot, references on cached pages, and reserved pages for the other tokens plus headroom.

        `tables.expected` are the sender's to fill. False, with nothing changed, where there is no room now. Raises
        InvalidArgumentError if there never will be. The caller activates or aborts it.
        """
        self._check_fits(sequence)
        if self._goes_after_waiting(sequence):
            return False
        before = islice(self._waiting, self._waiting.num_up_to(waiting_order(sequence)))
        num_taken = self._num_receiving + sum(other.num_slots for other in before)
        claim = self._make_room(sequence, num_taken, reserved=True)
        if claim is None:
            return False
        self.tables.take(sequence, claim, reserved=True)
        sequence.num_computed = sequence.num_cached
        sequence.status = SequenceStatus.RECEIVING
        self._receiving.add(sequence)
        self._deadlines.add(sequence)
        return True

    def activate(self, sequence: Sequence, first: SampledToken | None, now: float) -> Output:
        """Run a reserved sequence, all of whose pages are filled; `first` is the sender's token and is emitted here.

        It may end the sequence at once. Without it, the last token is computed again and the next one sampled here.
        """
        assert sequence.status is SequenceStatus.RECEIVING, f"{sequence.status} cannot be activated"
        self.tables.commit(sequence)
        sequence.num_computed = self.tables.resumes_at(sequence) if first is None else len(sequence.token_ids)
        self.tables.store(sequence, sequence.num_cached, sequence.num_computed)
        self.tables.slide(sequence)
        self._receiving.remove(sequence)
        self._run(sequence)
        return Output() if first is None else self._emit([take_samples(sequence, (first,))], now)

    def schedule(self, now: float) -> Plan | None:
        """The next step; None where there is no work or pages are lacking."""
        self._grow()
        self._admit()
        chunks = [
            Chunk(one, one.num_computed, 1, samples=True)
            for sequence in self._running
            if all(one.num_remaining == 1 for one in sequence.members) and self.tables.cover_next(sequence)
            for one in sequence.members
        ]
        chunks += self._prefill.chunks(self._running)
        if self._speculation is not None:
            budget = self._config.local_chunk_tokens - 1 - sum(chunk.num_tokens for chunk in chunks if chunk.is_prompt)
            chunks = self._speculation.add_drafts(chunks, budget, partial(cover_drafts, self.tables))
        self._is_blocked = not chunks
        if not chunks:
            return None
        preempted, self._preempted = tuple(self._preempted), []
        return start_step(chunks, preempted, self.tables, now)

    def apply(self, plan: Plan, result: StepResult, now: float) -> Output:
        """Record what the plan's run gave. Sequences that ended hold no pages any more."""
        if self._speculation is not None:
            self._speculation.record(plan, result)
        return self._emit(end_step(plan, result, self.tables), now)

    @property
    def _num_receiving(self) -> int:
        """Slots of those that are received."""
        return sum(sequence.num_slots for sequence in self._receiving)

    def _next_work(self, now: float) -> float | None:
        if not self._running and not self._waiting:
            return None
        return RETRY_S if self._is_blocked else 0.0

    def _emit(self, drawn: Iterable[Drawn], now: float) -> Output:
        emitted: list[Emitted] = []
        ended = []
        for one in drawn:
            if one.candidates:
                end = self._beams.take(one.sequence, one.candidates)
                if end is not None:
                    end.sequence.first_token_time = now
                    ended.append(end)
                    self._end(end.sequence)
                continue
            emitted += one.emitted
            if one.emitted and one.sequence.first_token_time is None:
                one.sequence.first_token_time = now
            if one.reason is not None or one.failure:
                ended.append(Ended(one.sequence.owner, one.reason, one.failure))
                self._end(one.sequence.owner)
        return Output(tuple(emitted), tuple(ended))

    def _grow(self) -> None:
        """Give each sequence that needs it pages for its next position, as far as there are any."""
        for sequence in list(self._running):
            if sequence.status is not SequenceStatus.RUNNING or self.tables.cover_next(sequence):
                continue
            lacking = self.tables.next_lacking(sequence)
            behind = takewhile(partial(is_not, sequence), reversed(self._running))
            if any(lacking):
                self._preempt(choose_victims(self.tables, behind, lacking))
                self.tables.cover_next(sequence)

    def _admit(self) -> None:
        """Start those that wait, in their order, as far as slots, pages and the step's prompt tokens go."""
        self._lacks_room = False
        while self._waiting and self._prefill.has_room_for(self._waiting.head, self._running):
            sequence = self._waiting.head
            claim = self._make_room(sequence, self._num_receiving)
            if claim is None:
                self._lacks_room = True
                break
            self._waiting.remove(sequence)
            self.tables.take(sequence, claim)
            self._run(sequence)

    def _make_room(self, sequence: Sequence, num_taken: int, *, reserved: bool = False) -> Claim | None:
        """A claim that can be taken, with a slot beside `num_taken` ones, after preempting lower priorities if need be.

        None, with nothing changed, where that isn't enough.
        """
        claim = self._claim(sequence, reserved)
        num_slots = self.num_running + num_taken + sequence.num_slots - self._config.max_num_seqs
        num_kept_free = margin(sequence, self._running, self.tables, self._config.headroom_pages)
        if num_slots <= 0 and not self.tables.claims.is_lacking(claim, num_kept_free):
            return claim
        if self.tables.in_step:  # pages would not be back before its end
            return None
        lower = takewhile(lambda other: other.work.priority > sequence.work.priority, reversed(self._running))
        victims = choose_victims(self.tables, lower, claim.lacking, num_slots=num_slots, kept=claim)
        self._preempt(victims)
        return self._claim(sequence, reserved) if victims else None

    def _claim(self, sequence: Sequence, reserved: bool) -> Claim:
        num_wanted = self._config.headroom_pages + self._beams.num_apart(sequence)
        num_spare = min(num_wanted, num_growth(sequence, self.tables))
        make = self.tables.claims.to_receive if reserved else self.tables.claims.to_compute
        return make(sequence, max_positions(sequence), num_spare)

    def _preempt(self, victims: list[Sequence]) -> None:
        for victim in victims:
            self._running.remove(victim)
            self.tables.release(victim)
            self._beams.preempted(victim)
            victim.num_computed = victim.num_draft_computed = 0
            victim.num_preemptions += 1
            victim.status = SequenceStatus.WAITING
            self._waiting.add(victim, waiting_order(victim))
            self._preempted.append(victim)

    def _goes_after_waiting(self, sequence: Sequence) -> bool:
        """Whether someone of its priority or a better one was preempted, or is first and found no room."""
        if not self._waiting or self._waiting.head.work.priority > sequence.work.priority:
            return False
        return self._lacks_room or self._waiting.head.num_preemptions > 0

    def _check_fits(self, sequence: Sequence) -> None:
        stop, num_beams = sequence.work.stop, sequence.num_slots
        if num_beams > self._config.max_num_seqs:
            raise invalid("beam.width", num_beams, f"must be at most max_num_seqs, {self._config.max_num_seqs}")
        what = f"a prompt of {sequence.num_prompt} tokens with max_tokens {stop.max_tokens}"
        self.tables.claims.check_fits(
            max_positions(sequence), what=what, num_beams=num_beams, num_shared=sequence.num_prompt
        )

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self._running.add(sequence, running_order(sequence))
        self._is_blocked = False

    def _end(self, sequence: Sequence) -> None:
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
        self._receiving.discard(sequence)
        self.tables.release(sequence)
        self._beams.end(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._lacks_room = self._is_blocked = False
