"""A tenant's limits: what is refused, with which word and when to come again, and that what is over is given back."""

from contextlib import ExitStack

import pytest
from hand_clock import HandClock
from hypothesis import given, strategies as st

from pageferry.core.errors import ResourceExhaustedError
from pageferry.core.tenants import Tenant
from pageferry.router.account import Account


def account(clock: HandClock, **limits: int) -> Account:
    return Account(Tenant("acme", **limits), clock)


def refusal(refused: Account, num_prompt: int = 10, num_pages: int = 1) -> ResourceExhaustedError:
    with pytest.raises(ResourceExhaustedError) as caught, refused.live(num_prompt, num_pages):
        pass
    return caught.value


def test_without_limits_nothing_is_refused() -> None:
    free = account(HandClock(100.0))
    with ExitStack() as live:
        for _ in range(1000):
            live.enter_context(free.live(10**6, 10**6))
            free.spend(10**6)


def test_requests_at_once() -> None:
    clock = HandClock(100.0)
    busy = account(clock, max_requests=2)
    with busy.live(1, 1):
        with busy.live(1, 1):
            error = refusal(busy)
            assert (error.reason, error.message) == (
                "TENANT_MAX_REQUESTS",
                "max_requests of tenant acme is 2, 2 are live",
            )
            assert error.retry_after_ms == 1000, "none has ended yet"
            with pytest.raises(ResourceExhaustedError):
                busy.check_requests()
            clock.now += 3
        with busy.live(1, 1):
            assert refusal(busy).retry_after_ms == 1500, "of two that take 3 s, one ends every 1.5 s"


def test_those_that_are_still_looked_at_count() -> None:
    for limit, reason in (
        ("max_requests", "TENANT_MAX_REQUESTS"),
        ("requests_per_minute", "TENANT_REQUESTS_PER_MINUTE"),
    ):
        busy = account(HandClock(100.0), **{limit: 1})
        with busy.coming():
            with pytest.raises(ResourceExhaustedError) as caught, busy.coming():
                pass
            assert caught.value.reason == reason
        with busy.live(1, 1):  # what was only looked at has used nothing
            pass


def test_requests_a_minute() -> None:
    clock = HandClock(100.0)
    limited = account(clock, requests_per_minute=60)
    for _ in range(60):
        with limited.live(1, 1):
            pass
    error = refusal(limited)
    assert (error.reason, error.retry_after_ms) == ("TENANT_REQUESTS_PER_MINUTE", 1000)
    clock.now += 0.5
    assert refusal(limited).retry_after_ms == 500
    clock.now += 0.5
    limited.count_request()
    assert refusal(limited).retry_after_ms == 1000
    clock.now += 3600  # no more than a minute's worth is saved up
    for _ in range(60):
        limited.count_request()
    assert refusal(limited)


def test_tokens_a_minute_are_those_of_prompts_and_answers_and_a_debt_is_paid_off() -> None:
    clock = HandClock(100.0)
    limited = account(clock, tokens_per_minute=600)
    with limited.live(100, 1):
        limited.spend(800)
    error = refusal(limited, num_prompt=50)
    assert error.reason == "TENANT_TOKENS_PER_MINUTE"
    assert error.retry_after_ms == 35_000, "300 are owed and 50 needed, at 10 a second"
    clock.now += 35
    with limited.live(50, 1):
        pass
    clock.now += 60
    with limited.live(5000, 1):  # more than fits a minute needs a full minute, and is owed
        assert refusal(limited).retry_after_ms == 60_000
    clock.now += 439
    assert refusal(limited).retry_after_ms == 2000


def test_pages() -> None:
    limited = account(HandClock(100.0), max_pages=10)
    with limited.live(1, 6):
        error = refusal(limited, num_pages=5)
        assert error.reason == "TENANT_MAX_PAGES"
        assert "is 10, live requests may come to 6 pages, this one to 5" in error.message
        with limited.live(1, 4):
            assert refusal(limited, num_pages=1)
    with limited.live(1, 10):
        pass


def test_what_is_refused_uses_nothing() -> None:
    clock = HandClock(100.0)
    limited = account(clock, max_requests=1, requests_per_minute=2, tokens_per_minute=100, max_pages=10)
    with limited.live(1, 1):
        for _ in range(10):
            refusal(limited)
    for _ in range(10):
        refusal(limited, num_pages=11)
    with limited.live(99, 10):
        pass


def test_new_limits_hold_at_once() -> None:
    clock = HandClock(100.0)
    changed = account(clock)
    changed.spend(10**9)  # without a limit nothing is owed
    with changed.live(1, 1):
        changed.change(Tenant("acme", max_requests=1))
        assert refusal(changed).reason == "TENANT_MAX_REQUESTS"
        changed.change(Tenant("acme", max_requests=2, requests_per_minute=1, tokens_per_minute=60))
        with changed.live(1, 1):
            pass
        assert refusal(changed).reason == "TENANT_REQUESTS_PER_MINUTE"
        changed.change(Tenant("acme", requests_per_minute=1))
        assert refusal(changed).reason == "TENANT_REQUESTS_PER_MINUTE", "the same limit starts no new minute"


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=50))
def test_over_any_time_no_more_is_used_than_the_rate_and_one_minute_and_the_last_answer(
    calls: list[tuple[float, int, int]],
) -> None:
    clock = HandClock(100.0)
    limited = account(clock, tokens_per_minute=600)
    used = 0
    for pause_s, num_prompt, num_answer in calls:
        clock.now += pause_s
        earlier, began = used, clock.now
        try:
            with limited.live(num_prompt, 1):
                limited.spend(num_answer)
        except ResourceExhaustedError as error:
            assert error.retry_after_ms is not None
            continue
        used += num_prompt + num_answer
        assert earlier + num_prompt <= 600 + (began - 100) * 10 + 1e-6
