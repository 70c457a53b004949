"""How many drafts a chunk gets: more where they are accepted, none where they don't pay, and one now and then."""

from collections.abc import Callable

from scheduling import sequence

from pageferry.core.drafts import DraftSource
from pageferry.core.plan import Chunk, Plan, SampledToken, StepResult
from pageferry.core.sequence import Sequence
from pageferry.core.speculation import Speculation
from pageferry.core.step_costs import StepCosts

LAYERS = DraftSource("layers", num_layers=2)


class Worker:
    """Steps of `start_s + row_s * rows`; `accepts` says of each sequence how many of its drafts are accepted."""

    def __init__(self, row_s: float, accepts: Callable[[Sequence, int], int], *, draft_s: float = 0.0) -> None:
        self.speculation = Speculation(LAYERS, 8)
        self.row_s, self.draft_s, self.accepts = row_s, draft_s, accepts

    def step(self, sequences: list[Sequence], budget: int = 100) -> list[int]:
        """How many drafts each has got."""
        chunks = [Chunk(one, len(one.token_ids) - 1, 1, samples=True) for one in sequences]
        chunks = self.speculation.add_drafts(chunks, budget, lambda _, most: most)
        counts = [chunk.num_drafts for chunk in chunks]
        samples = tuple(
            (SampledToken(5),) * (1 + min(count, self.accepts(one, count)))
            for one, count in zip(sequences, counts, strict=True)
        )
        seconds = 0.01 + self.row_s * (len(chunks) + sum(counts))
        result = StepResult(samples, num_drafted=tuple(counts), draft_s=self.draft_s * sum(counts), verify_s=seconds)
        self.speculation.record(Plan(tuple(chunks)), result)
        return counts


def run(worker: Worker, sequences: list[Sequence], num_steps: int = 200) -> list[list[int]]:
    return [worker.step(sequences) for _ in range(num_steps)]


def test_what_is_accepted_gets_the_most() -> None:
    counts = run(Worker(0.0005, lambda _, count: count), [sequence([1, 2, 3], 1000)])
    assert all(count == [8] for count in counts[20:])


def test_what_is_never_accepted_costs_less_than_a_twentieth() -> None:
    counts = run(Worker(0.001, lambda *_: 0), [sequence([1, 2, 3], 1000)])
    num_rows = sum(count for (count,) in counts)
    assert 0 < num_rows * 0.001 < 0.05 * 200 * 0.011
    late = [count for (count,) in counts[100:]]
    assert 1 <= sum(late) <= 3, "a probe now and then"


def test_each_sequence_has_its_own_number() -> None:
    good, bad = sequence([1, 2, 3], 1000), sequence([4, 5, 6], 1000)
    counts = run(Worker(0.001, lambda one, count: count if one is good else 0), [good, bad])
    last = counts[-50:]
    assert min(of_good for of_good, _ in last) >= 5
    assert sum(of_bad for _, of_bad in last) <= 3


def test_rows_that_cost_as_much_as_steps_get_no_drafts() -> None:
    """Half of the drafts are accepted: that pays where rows are cheap, and not where a draft's row costs a step."""
    cheap, dear = Worker(0.0003, lambda _, count: count // 2), Worker(0.05, lambda _, count: count // 2)
    assert sum(count for (count,) in run(cheap, [sequence([1], 1000)])[-20:]) > 20
    assert sum(count for (count,) in run(dear, [sequence([1], 1000)])[-20:]) <= 3


def test_drafts_that_take_long_to_make_are_not_made() -> None:
    worker = Worker(0.0001, lambda _, count: count, draft_s=0.05)
    assert sum(count for (count,) in run(worker, [sequence([1], 1000)])[-20:]) <= 3


def test_a_text_that_becomes_easy_is_noticed() -> None:
    rights = {"accepted": 0}
    worker, one = Worker(0.0005, lambda _, count: min(count, rights["accepted"])), sequence([1], 10_000)
    run(worker, [one])
    rights["accepted"] = 8
    assert any(count == [8] for count in run(worker, [one], 400))


def test_the_budget_is_of_all() -> None:
    worker = Worker(0.0001, lambda _, count: count)
    sequences = [sequence([number], 1000) for number in range(5)]
    for _ in range(30):
        assert sum(worker.step(sequences, budget=11)) <= 11
    assert worker.step(sequences, budget=0) == [0] * 5


def test_who_may_not_speculate_does_not() -> None:
    worker = Worker(0.0001, lambda _, count: count)
    assert worker.step([sequence([1], 100, speculate=False), sequence([2], 100)])[0] == 0


def test_costs_are_of_the_quietest_steps_and_follow_longer_texts() -> None:
    costs = StepCosts()
    for number in range(200):
        for rows in (1, 4, 9):
            costs.add(rows, (0.01 + 0.001 * rows) * (3.0 if number % 4 else 1.0))
    assert 0.0005 < costs.row_s < 0.0025
    assert 0.009 < costs.step_s(1) < 0.025
    for _ in range(200):
        for rows in (1, 4, 9):
            costs.add(rows, 0.02 + 0.004 * rows)
    assert 0.003 < costs.row_s < 0.005
