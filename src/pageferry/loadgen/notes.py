"""Sentences that a reader of a run's figures must know."""

from collections.abc import Iterator

from pageferry.loadgen.drive import Driven
from pageferry.loadgen.result import GoodputSearch, Summary
from pageferry.loadgen.summary import Observed

_BUSY_CLIENT = 0.5  # of a core
_SHORT_S = 1.0  # a run that is shorter has no time to settle
_LATE_MS = 50.0
_CACHED_SHARE = 0.1  # of the prompts' tokens beyond what is shared


def of_run(driven: Driven, summary: Summary, observed: Observed, shared_tokens: int) -> Iterator[str]:
    """`shared_tokens`: the most that prompts were meant to have in common."""
    if driven.interrupted:
        yield f"interrupted, with {driven.num_dropped} requests in flight that are not counted"
    for what, count in (("prompts", driven.num_other_inputs), ("outputs", driven.num_other_outputs)):
        if count:
            yield f"{count} of {summary.completed} {what} have another length than asked for"
    unexplained = (summary.cached_tokens or 0) - shared_tokens * summary.completed
    if unexplained > _CACHED_SHARE * summary.input_tokens:
        yield f"{summary.cached_tokens} tokens of prompts were cached by the server: has it had this seed before?"
    lag = summary.send_lag_ms
    if lag is not None and lag.p99 is not None and lag.p99 > _LATE_MS:
        yield f"requests were sent up to {lag.max:.0f} ms late: the load was less than asked for"
    cores = observed.client_cpu_s / max(observed.wall_s, _SHORT_S)
    if cores > _BUSY_CLIENT:
        yield f"this client used {cores:.0%} of a core; near 100% its own delays are in the times"


def of_search(found: GoodputSearch, low: float, high: float) -> Iterator[str]:
    if found.rate is None and found.trials:
        yield f"not even {low:g} requests/s keep the limits; the figures are of the last trial"
    if found.rate == high:
        yield f"the highest rate tried, {high:g} requests/s, keeps the limits; raise --rate-range"
