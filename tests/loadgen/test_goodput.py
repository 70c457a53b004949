"""The search against servers that are a function: what share of requests keeps the limits at a rate."""

import pytest

from pageferry.loadgen.goodput import RESOLUTION, best_rate, next_rate, search
from pageferry.loadgen.result import Trial

LOW, HIGH = 0.5, 64.0


def searched(capacity: float, low: float = LOW, high: float = HIGH) -> list[Trial]:
    trials: list[Trial] = []
    while (rate := next_rate(trials, low, high)) is not None:
        trials.append(Trial(rate, 1.0 if rate <= capacity else 0.5, rate <= capacity))
        assert len(trials) < 30
    return trials


@pytest.mark.parametrize("capacity", [0.5, 0.6, 1.0, 3.3, 17.0, 63.0])
def test_the_answer_is_within_the_resolution(capacity: float) -> None:
    found = best_rate(searched(capacity))
    assert found is not None and found <= capacity < found * RESOLUTION
    assert len(searched(capacity)) <= 12


def test_rates_double_until_one_is_missed_then_halve_between() -> None:
    rates = [trial.rate for trial in searched(3.0, low=1.0)]
    assert rates[:4] == [1.0, 2.0, 4.0, pytest.approx(8**0.5)]


def test_all_rates_are_kept() -> None:
    trials = searched(1000.0, low=1.0, high=12.0)
    assert [trial.rate for trial in trials] == [1.0, 2.0, 4.0, 8.0, 12.0]
    assert best_rate(trials) == 12.0


def test_not_even_the_lowest_is_kept() -> None:
    trials = searched(0.1)
    assert [trial.rate for trial in trials] == [LOW]
    assert best_rate(trials) is None


async def test_a_search_runs_its_trials_until_one_is_broken_off() -> None:
    asked: list[float] = []

    async def run_trial(rate: float) -> Trial | None:
        asked.append(rate)
        return None if rate > 2 else Trial(rate, 1.0, True)

    found = await search(run_trial, 1.0, 64.0)
    assert asked == [1.0, 2.0, 4.0]
    assert (found.rate, len(found.trials)) == (2.0, 2)
