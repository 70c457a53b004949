"""When a request's first token can be expected, and the early refusal of what would come too late."""

from collections.abc import Sequence
from dataclasses import dataclass

from pageferry.core.errors import ResourceExhaustedError
from pageferry.router.candidates import DecodeState, Demand, PrefillState
from pageferry.router.pace import retry_ms


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds; what is not known counts as nothing, so that nobody is refused for it."""

    queue_s: float  # behind those that go first
    worker_s: float  # then at the worker that is soonest done with the prompt
    has_company: bool  # whether anything is to be computed before it

    def check(self, left_s: float) -> None:
        """Raise ResourceExhaustedError where the first token would come later than in `left_s`.

        What has nothing before it is let in whatever the figures say: else a speed that was measured wrongly would
        never be measured again.
        """
        late_s = self.queue_s + self.worker_s - left_s
        if late_s <= 0 or not self.has_company:
            return
        raise ResourceExhaustedError(
            f"the first token is expected in {self.queue_s + self.worker_s:.1f} s, {self.queue_s:.1f} s of them in the "
            f"router's queue, and the deadline is in {left_s:.1f} s",
            reason="TTFT_BEYOND_DEADLINE",
            retry_after_ms=retry_ms(late_s),
        )


def forecast(
    demand: Demand,
    prefills: Sequence[PrefillState],
    decodes: Sequence[DecodeState],
    num_before: int,
    gap_s: float | None,
) -> Forecast:
    """For a request with so many before it in the queue, which one leaves every `gap_s`."""
    workers: list[tuple[float | None, int]] = [
        (prefill.ttft_s(demand) if prefill.tokens_per_s else None, prefill.queued_tokens)
        for prefill in prefills
        if prefill.fits(demand)
    ]
    local = [(decode.ttft_s(demand), decode.queued_tokens) for decode in decodes if decode.fits(demand)]
    # Beside prefill workers, a decode worker that has computed no prompt yet is given short ones at most.
    workers += [worker for worker in local if worker[0] is not None or not workers]
    known = [(ttft_s, queued) for ttft_s, queued in workers if ttft_s is not None]
    if not workers or len(known) < len(workers):
        return Forecast(num_before * (gap_s or 0.0), 0.0, num_before > 0)
    worker_s, queued_tokens = min(known)
    return Forecast(num_before * (gap_s or 0.0), worker_s, num_before > 0 or queued_tokens > 0)
