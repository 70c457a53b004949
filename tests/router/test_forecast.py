"""Early refusal: what would have its first token after its deadline is refused at once, and nothing on a guess."""

from dataclasses import replace

import pytest
from fake_workers import LAYOUT

from pageferry.core.errors import ResourceExhaustedError
from pageferry.router.candidates import DecodeState, Demand, PrefillState
from pageferry.router.forecast import Forecast, forecast

PROMPT = Demand(400, 100)
P = PrefillState("p1", LAYOUT, num_waiting=8, queued_tokens=1600, tokens_per_s=1000, chunk_tokens=256, cached_tokens=0)
IDLE = replace(P, num_waiting=0, queued_tokens=0)
UNKNOWN = replace(IDLE, address="p2", tokens_per_s=0)
D = DecodeState(
    "d1",
    LAYOUT,
    num_active=0,
    max_num_seqs=8,
    available_pages=(100,),
    chunk_tokens=128,
    queued_tokens=0,
    tokens_per_s=0,
    cached_tokens=0,
)
LOCAL = replace(D, tokens_per_s=200, queued_tokens=100)


@pytest.mark.parametrize(
    ("prefills", "decodes", "num_before", "gap_s", "expected"),
    [
        ([P], [D], 0, None, Forecast(0, 2.0, True)),
        ([P], [D], 10, 0.5, Forecast(5.0, 2.0, True)),
        ([IDLE], [D], 0, 0.5, Forecast(0, 0.4, False)),
        ([IDLE], [D], 1, None, Forecast(0, 0.4, True)),
        ([P, IDLE], [D], 0, None, Forecast(0, 0.4, False)),
        ([P], [LOCAL], 0, None, Forecast(0, 2.0, True)),
        ([replace(P, tokens_per_s=100)], [LOCAL], 0, None, Forecast(0, 2.5, True)),
        ([replace(P, capacity_tokens=399)], [LOCAL], 0, None, Forecast(0, 2.5, True)),
        ([], [LOCAL], 2, 1.0, Forecast(2.0, 2.5, True)),
        # Where a speed is not known, the worker may be fast.
        ([P, UNKNOWN], [D], 3, 1.0, Forecast(3.0, 0, True)),
        ([], [D], 0, None, Forecast(0, 0, False)),
        ([], [], 3, 1.0, Forecast(3.0, 0, True)),
    ],
)
def test_the_first_token_is_expected_from_the_queue_and_the_soonest_worker(
    prefills: list[PrefillState], decodes: list[DecodeState], num_before: int, gap_s: float | None, expected: Forecast
) -> None:
    assert forecast(PROMPT, prefills, decodes, num_before, gap_s) == expected


def test_what_comes_too_late_is_refused_with_when_it_would_not() -> None:
    late = Forecast(5.0, 2.0, has_company=True)
    late.check(7.0)
    with pytest.raises(
        ResourceExhaustedError, match=r"expected in 7\.0 s, 5\.0 s of them in .* deadline is in 3\.5 s"
    ) as caught:
        late.check(3.5)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("TTFT_BEYOND_DEADLINE", 3500)


def test_what_has_nothing_before_it_is_let_in_so_that_a_wrong_speed_is_measured_again() -> None:
    Forecast(0.0, 100.0, has_company=False).check(1.0)
