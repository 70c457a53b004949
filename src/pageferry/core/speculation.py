"""How many drafts a sequence's chunk gets: as many as are expected to pay, and where none do, one now and then.

A draft costs a row, and what drafting takes; it gives a token with the probability that it and all before it are
accepted. A row is worth having while that is more than the tokens that its time would give otherwise.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pageferry.core.drafts import DraftSource, Match, PromptLookup
from pageferry.core.page_tables import PageTables
from pageferry.core.plan import Chunk, Plan, SampleFailure, StepResult
from pageferry.core.sequence import Sequence
from pageferry.core.step_costs import StepCosts

_CLASS_FROM = (0, 5, 12)  # tokens that a match has: longer ones are accepted more often, and each class has its rate
_FIRST_RATES = (0.5, 0.7, 0.9)
_DECAY = 0.9  # of what was tried before, for each step
_PRIOR_WEIGHT = 3.0  # tries that the worker's rate counts for in a sequence's
_WORKER_DECAY = 0.99
_MOST_RATE = 0.98
_MARGIN = 1.5  # times what it costs that a row must give
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64  # chances to let pass between probes
_DRAFT_WEIGHT = 0.2  # of a new measurement
_ROUNDS = 3  # of pricing rows by what a step gives with those that the last round chose


Cover = Callable[[Sequence, int], int]  # how many drafts a sequence may have, up to a number, with pages for them


@dataclass(slots=True)
class Rate:
    """How often drafts are accepted, where those before them are; the past counts ever less."""

    accepted: float
    tried: float

    def add(self, num_accepted: int, num_drafted: int, decay: float) -> None:
        num_tried = min(num_drafted, num_accepted + 1)
        self.accepted = self.accepted * decay + num_accepted
        self.tried = self.tried * decay + num_tried

    def given(self, prior: "Rate") -> float:
        expected = prior.accepted / prior.tried
        return min(_MOST_RATE, (self.accepted + _PRIOR_WEIGHT * expected) / (self.tried + _PRIOR_WEIGHT))


@dataclass(slots=True)
class Drafting:
    """What is known of a sequence's drafts, by class."""

    rates: list[Rate] = field(default_factory=lambda: [Rate(0.0, 0.0) for _ in _CLASS_FROM])
    pauses: list[int] = field(default_factory=lambda: [_FIRST_PAUSE for _ in _CLASS_FROM])
    num_passed: list[int] = field(default_factory=lambda: [0 for _ in _CLASS_FROM])
    chosen: int = 0  # the last drafts' class
    lookup: PromptLookup = field(default_factory=PromptLookup)


@dataclass(slots=True)
class _Candidate:
    index: int  # of its chunk
    drafting: Drafting
    rate: float
    most: int
    match: Match | None
    count: int = 0

    @property
    def expected(self) -> float:
        """Tokens of the step."""
        return sum(self.rate**i for i in range(self.count + 1))


class Speculation:
    """One per decode scheduler: drafts for its chunks, from what steps took and gave."""

    def __init__(self, source: DraftSource, max_drafts: int, costs: StepCosts | None = None) -> None:
        self._max_drafts = max_drafts if source.kind != "off" else 0
        self._is_lookup = source.kind == "lookup"
        self._rates = [Rate(4 * rate, 4.0) for rate in _FIRST_RATES]
        self._costs = costs or StepCosts()
        self._draft_s = 0.0  # seconds that a draft takes to make

    def add_drafts(self, chunks: list[Chunk], budget: int, cover: Cover) -> list[Chunk]:
        """The same chunks, with drafts behind those that decode, `budget` in all at most."""
        if self._max_drafts == 0 or budget <= 0:
            return chunks
        candidates = list(self._candidates(chunks, min(budget, self._max_drafts)))
        if not candidates:
            return chunks
        self._choose(candidates, sum(chunk.num_tokens for chunk in chunks))
        drafted = list(chunks)
        for one in candidates:
            wanted = min(one.count or self._probe(one), budget)
            count = cover(chunks[one.index].sequence, wanted) if wanted else 0
            if count:
                budget -= count
                drafts = one.match.drafts[:count] if one.match else ()
                drafted[one.index] = replace(chunks[one.index], num_drafts=count, drafts=drafts)
        return drafted

    def record(self, plan: Plan, result: StepResult) -> None:
        """Learn from a step, before its tokens are appended."""
        if self._max_drafts == 0:
            return
        num_drafted = result.num_drafted or (0,) * len(result.samples)
        sampling = (chunk for chunk in plan.chunks if chunk.samples)
        for chunk, samples, count in zip(sampling, result.samples, num_drafted, strict=True):
            drafting = chunk.sequence.drafting
            if count and drafting is not None:
                num_accepted = 0 if isinstance(samples, SampleFailure) else len(samples) - 1
                self._learn(drafting, num_accepted, count)
        rows = plan.num_tokens + sum(num_drafted)
        has_prompts = rows > len(plan.chunks) + sum(num_drafted)  # which cost their own
        if result.verify_s > 0 and not has_prompts:
            self._costs.add(rows, result.verify_s)
        if any(num_drafted):
            draft_s = result.draft_s / sum(num_drafted)
            self._draft_s += (_DRAFT_WEIGHT if self._draft_s else 1.0) * (draft_s - self._draft_s)

    def _candidates(self, chunks: list[Chunk], most: int) -> Iterable[_Candidate]:
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            may = sequence.work.speculate and sequence.work.beam is None
            if chunk.is_prompt or not may:
                continue
            if sequence.drafting is None:
                sequence.drafting = Drafting()
            drafting, match = sequence.drafting, None
            if self._is_lookup:
                match = drafting.lookup.find(sequence.token_ids, most)
                if match is None:
                    continue
            kind = _class_of(match)
            drafting.chosen = kind
            yield _Candidate(index, drafting, drafting.rates[kind].given(self._rates[kind]), most, match)

    def _choose(self, candidates: list[_Candidate], num_rows: int) -> None:
        """As many drafts for each as pay, given what the step then takes and gives."""
        others = num_rows - len(candidates)
        draft_s = self._costs.row_s + self._draft_s
        for _ in range(_ROUNDS):
            num_drafts = sum(one.count for one in candidates)
            seconds = self._costs.step_s(num_rows + num_drafts) + num_drafts * self._draft_s
            tokens_per_s = (others + sum(one.expected for one in candidates)) / seconds
            least = draft_s * tokens_per_s * _MARGIN
            for one in candidates:
                one.count = _num_worth(one.rate, least, one.most)

    def _probe(self, one: _Candidate) -> int:
        """One draft where none pays, after ever longer pauses."""
        drafting, kind = one.drafting, one.drafting.chosen
        drafting.num_passed[kind] += 1
        if drafting.num_passed[kind] < drafting.pauses[kind]:
            return 0
        drafting.num_passed[kind] = 0
        drafting.pauses[kind] = min(2 * drafting.pauses[kind], _LONGEST_PAUSE)
        return 1

    def _learn(self, drafting: Drafting, num_accepted: int, num_drafted: int) -> None:
        kind = drafting.chosen
        drafting.rates[kind].add(num_accepted, num_drafted, _DECAY)
        self._rates[kind].add(num_accepted, num_drafted, _WORKER_DECAY)
        if num_accepted:
            drafting.pauses[kind] = _FIRST_PAUSE


def cover_drafts(tables: PageTables, sequence: Sequence, most: int) -> int:
    """How many drafts it may have, up to `most`, with pages for them, for which nobody is preempted.

    None reaches beyond its last token. A page that is quantised as a whole is never filled from drafts, since it
    could not be opened again.
    """
    end, size = sequence.num_computed + 1, tables.page_size
    most = min(most, sequence.work.stop.max_tokens - sequence.num_output - 1)
    if sequence.tail is not None:
        most = min(most, size - 1 - end % size if end % size else 0)
    if most > 0 and not tables.cover(sequence, end + most):
        most = min(most, -end % size)
    return max(0, most)


def _class_of(match: Match | None) -> int:
    if match is None:
        return 1
    return sum(match.length >= start for start in _CLASS_FROM) - 1


def _num_worth(rate: float, least: float, most: int) -> int:
    """How many drafts have at least that probability of being accepted."""
    if rate <= 0 or rate < least:
        return 0
    return most if least <= 0 else min(most, int(math.log(least) / math.log(rate)))
