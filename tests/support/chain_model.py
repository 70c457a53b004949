"""A model whose keys and values are a chain over the tokens, so that any mix-up of pages shows.

The value of position p depends on all tokens up to p. A page that was evicted in use, given back while its window is
still read, shared in the wrong place or not blanked fails an assertion in the model, or gives tokens other than
`golden`'s.
"""

from collections import defaultdict

from pageferry.core.beam import BeamSearch, Hypothesis, num_candidates
from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.plan import Plan, SampledToken, SampleFailure, Samples, StepResult
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
        for chunk in plan.chunks:
            for number, group in enumerate(self._layout.groups):
                self._compute(chunk.sequence, number, group, chunk.start, chunk.start + chunk.num_tokens)
            assert chunk.samples == (chunk.start + chunk.num_tokens == len(chunk.sequence.token_ids))
            if chunk.samples:
                drawn = self.sample(chunk.sequence)
                samples.append(drawn if isinstance(drawn, SampleFailure) else (drawn,))
        return StepResult(tuple(samples))

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
        """A chain for each group, so that they can't be mixed up."""
        return [2 * value + group for value in self.chain(sequence)]

    def _check_writers(self, plan: Plan) -> None:
        """No two sequences of a step write to one page."""
        size, written = self._layout.page_size, set()
        for chunk in plan.chunks:
            for number, table in enumerate(chunk.sequence.tables):
                for page in table[chunk.start // size : self._layout.num_pages(chunk.start + chunk.num_tokens)]:
                    place = Place(number, page)
                    assert place not in written, f"{place} has two writers"
                    written.add(place)

    def _compute(self, sequence: Sequence, number: int, group: CacheGroup, start: int, end: int) -> None:
        values, size = self._values(sequence, number), self._layout.page_size
        assert sequence.num_computed == start < end <= len(values)
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
                assert is_open or content[slot] in (None, values[first + slot]), f"{place} is written over"
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
