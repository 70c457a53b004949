"""A model whose keys and values are a chain over the tokens, so that any mix-up of pages shows.

The value of position p depends on all tokens up to p. A page that was evicted in use, given back while its window is
still read, shared in the wrong place or not blanked fails an assertion in the model, or gives tokens other than
`golden`'s.
"""

from collections import defaultdict

from pageferry.core.beam import BeamSearch, Hypothesis, num_candidates
from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.plan import Chunk, Plan, SampledToken, SampleFailure, Samples, StepResult
from pageferry.core.pool import PageState
from pageferry.core.pools import PagePools
from pageferry.core.sequence import NO_PAGE, Sequence, WorkItem

VOCABULARY = 50_000


def _value(parent: int, token_id: int) -> int:
    return (parent * 1_000_003 + token_id * 97 + 1) % (2**61 - 1)


def _draw(value: int, num_output: int) -> int:
    """The next token depends on the context, and on how much of it is output, as it does with penalties."""
    return (value // 7 + num_output) % VOCABULARY


def golden(work: WorkItem) -> list[int]:
    """The output, without any scheduler."""
    value = 0
    for token_id in (*work.prompt_ids, *work.output_ids):
        value = _value(value, token_id)
    output = list(work.output_ids)
    while len(output) < work.stop.max_tokens and not (output and output[-1] in work.stop.stop_token_ids):
        output.append(_draw(value, len(output)))
        value = _value(value, output[-1])
    return output


class ChainModel:
    """A Runner that checks everything that it reads and writes."""

    def __init__(self, pools: PagePools, layout: CacheLayout) -> None:
        self._pools = pools
        self._layout = layout
        self.pages: dict[Place, list[int | None]] = defaultdict(lambda: [-1] * layout.page_size)
        self._chains: dict[Sequence, list[int]] = {}
        self._guessed: set[int] = set()  # values of drafts: they may be written over
        self.failing: set[Sequence] = set()

    def chain(self, sequence: Sequence) -> list[int]:
        values = self._chains.setdefault(sequence, [])
        for token_id in sequence.token_ids[len(values) :]:
            values.append(_value(values[-1] if values else 0, token_id))
        return values

    def run(self, plan: Plan) -> StepResult:
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks) > 0
        assert len(set(plan.fresh)) == len(plan.fresh)
        for place in plan.fresh:
            self.pages[place] = [None] * self._layout.page_size
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        self._check_writers(plan)
        samples: list[Samples] = []
        num_drafted = []
        for chunk in plan.chunks:
            drafts = chunk.drafts or self.guess(chunk.sequence, chunk.num_drafts)
            values = self._with_drafts(chunk, drafts)
            for number, group in enumerate(self._layout.groups):
                of_group = [2 * value + number for value in values]  # so that groups' chains can't be mixed up
                self._guessed.update(of_group[len(chunk.sequence.token_ids) :])
                self._compute(chunk.sequence, number, group, chunk.start, of_group)
            assert chunk.samples == (chunk.start + chunk.num_tokens == len(chunk.sequence.token_ids))
            if chunk.samples:
                samples.append(self._verified(chunk.sequence, drafts))
                num_drafted.append(len(drafts))
        return StepResult(tuple(samples), num_drafted=tuple(num_drafted), verify_s=0.01)

    def guess(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """What comes next, but for each fifth token."""
        drafts: list[int] = []
        value = self.chain(sequence)[-1]
        for position in range(sequence.num_output, sequence.num_output + count):
            drafts.append(_draw(value, position) if position % 5 else 1)
            value = _value(value, drafts[-1])
        return tuple(drafts)

    def _with_drafts(self, chunk: Chunk, drafts: tuple[int, ...]) -> list[int]:
        """The chain to the chunk's end and on over the drafts, none of which closes a page that is sealed whole."""
        end = chunk.start + chunk.num_tokens
        values = self.chain(chunk.sequence)[:end]
        for token_id in drafts:
            values.append(_value(values[-1], token_id))
        size = self._layout.page_size
        assert not (drafts and self._layout.tails) or (end - 1) // size == len(values) // size
        return values

    def _verified(self, sequence: Sequence, drafts: tuple[int, ...]) -> Samples:
        first = self.sample(sequence)
        if isinstance(first, SampleFailure):
            return first
        tokens, value = [first], self.chain(sequence)[-1]
        for position, draft in enumerate(drafts, sequence.num_output + 1):
            if tokens[-1].token_id != draft:
                break
            value = _value(value, draft)
            tokens.append(SampledToken(_draw(value, position)))
        return tuple(tokens)

    def sample(self, sequence: Sequence) -> SampledToken | SampleFailure:
        if sequence.owner in self.failing:
            return SampleFailure("logits are not numbers")
        if sequence.work.beam is not None:
            likely = candidates(self.chain(sequence)[-1], sequence.work)
            return SampledToken(likely[0][0], top=likely)
        return SampledToken(_draw(self.chain(sequence)[-1], sequence.num_output))

    def receive(self, sequence: Sequence, expected: dict[PageKey, Place]) -> None:
        """Fill a reserved sequence's pages as a sender would."""
        for key, place in expected.items():
            assert self._pools.of(place).state(place.page) is PageState.RESERVED
            self.pages[place] = self.content(sequence, key)

    def content(self, sequence: Sequence, key: PageKey) -> list[int | None]:
        """What the page holds once all of the tokens are computed."""
        size = self._layout.page_size
        values = self._values(sequence, key.group)[key.index * size : (key.index + 1) * size]
        return [*values, *[None] * (size - len(values))]

    def _values(self, sequence: Sequence, group: int) -> list[int]:
        return [2 * value + group for value in self.chain(sequence)]

    def _check_writers(self, plan: Plan) -> None:
        """No two sequences of a step write to one page."""
        size, written = self._layout.page_size, set()
        for chunk in plan.chunks:
            for number, table in enumerate(chunk.sequence.tables):
                end = chunk.start + chunk.num_tokens + chunk.num_drafts
                for page in table[chunk.start // size : self._layout.num_pages(end)]:
                    place = Place(number, page)
                    assert place not in written, f"{place} has two writers"
                    written.add(place)

    def _compute(self, sequence: Sequence, number: int, group: CacheGroup, start: int, values: list[int]) -> None:
        """Positions from `start` on, with the chain's `values` of the group up to the last."""
        end, size = len(values), self._layout.page_size
        assert sequence.num_computed == start < end
        for index in group.live_pages(start, end, size):
            first = index * size
            assert sequence.tables[number][index] != NO_PAGE, f"page {index} of group {number} is needed"
            place = Place(number, sequence.tables[number][index])
            assert self._pools.of(place).state(place.page) is PageState.RESIDENT
            is_open = bool(self._layout.tails) and first + size > start  # in the tail until it is full
            source = self._tail(sequence, number) if is_open else place
            known = values[first : min(max(start, first), first + size)]
            assert self.pages[source][: len(known)] == known, f"{source} is another's"
            content: list[int | None] = list(self.pages[place])
            for slot in range(len(known), min(end - first, size)):
                is_free = content[slot] in (None, values[first + slot]) or content[slot] in self._guessed
                assert is_open or is_free, f"{place} is written over"
                content[slot] = values[first + slot]
            if not is_open or first + size <= end:
                self.pages[place] = [*known, *content[len(known) :]]
            else:
                open_part = [*known, *content[len(known) : end - first]]
                self.pages[self._tail(sequence, number)] = open_part + [None] * (size - len(open_part))

    def _tail(self, sequence: Sequence, group: int) -> Place:
        assert sequence.tail is not None
        return Place(group, sequence.tail, is_tail=True)


def candidates(value: int, work: WorkItem) -> tuple[tuple[int, float], ...]:
    """Continuations of a beam, likeliest first; often equal tokens after different beams, some of them stop ids."""
    num = num_candidates(work)
    likely = {(value // 3 + 5 * rank) % 64: 0.0 for rank in range(num)}
    values = {token_id: -0.01 - (value // (token_id + 1) % 997) / 300 for token_id in likely}
    return tuple(sorted(values.items(), key=lambda item: -item[1]))


def golden_beams(work: WorkItem) -> tuple[Hypothesis, ...]:
    """The hypotheses, without any scheduler."""
    assert work.beam is not None
    search = BeamSearch(work.beam, work.stop)
    while not search.is_over:
        search.advance([candidates(_chained((*work.prompt_ids, *beam.token_ids)), work) for beam in search.running])
    return tuple(search.hypotheses)


def _chained(token_ids: tuple[int, ...]) -> int:
    value = 0
    for token_id in token_ids:
        value = _value(value, token_id)
    return value
