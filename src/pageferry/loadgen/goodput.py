"""The highest rate at which enough requests keep their limits: doubling until it is too much, then halving between."""

import math
from collections.abc import Awaitable, Callable, Sequence

from pageferry.loadgen.result import GoodputSearch, Trial

RESOLUTION = 1.1  # the search ends once too much is at most this many times what was kept


def next_rate(trials: Sequence[Trial], low: float, high: float) -> float | None:
    """The rate to try after these trials, in requests/s; None once the answer is known."""
    kept = max((trial.rate for trial in trials if trial.kept), default=None)
    missed = min((trial.rate for trial in trials if not trial.kept), default=None)
    if kept is None:
        return low if missed is None else None
    if missed is None:
        return min(2 * kept, high) if kept < high else None
    return math.sqrt(kept * missed) if missed > RESOLUTION * kept else None


def best_rate(trials: Sequence[Trial]) -> float | None:
    """None where not even the lowest rate was kept."""
    return max((trial.rate for trial in trials if trial.kept), default=None)


async def search(run_trial: Callable[[float], Awaitable[Trial | None]], low: float, high: float) -> GoodputSearch:
    """Run trials, each at a rate, until the answer is known; a trial that is None ends the search at once."""
    trials: list[Trial] = []
    while (rate := next_rate(trials, low, high)) is not None:
        trial = await run_trial(rate)
        if trial is None:
            break
        trials.append(trial)
    return GoodputSearch(best_rate(trials), tuple(trials))
