"""What tries at a request leave on its timeline."""

import pytest

from pageferry.router.timeline import Timeline, TryTimes
from pageferry.v1.decode_pb2 import FirstSteps, Reserved
from pageferry.v1.inference_pb2 import HandoffStats, Timings
from pageferry.v1.prefill_pb2 import FirstToken, Shipped


def test_what_a_try_told_that_failed_is_in_no_part() -> None:
    timeline = Timeline(0.0)
    timeline.parts.tokenize_ms, timeline.parts.queue_ms = 1.0, 2.0
    failed = TryTimes(timeline)
    failed.reserved(Reserved(), None, waited_s=0.5)
    failed.prefilled(FirstToken(queue_ms=8.0, prefill_ms=9.0))
    failed.shipped(Shipped(pages=3, bytes=300, tail_ms=7.0, in_flight_ms=70.0))
    failed.first_steps(FirstSteps(queue_ms=6.0, first_step_ms=60.0), is_local=False)
    TryTimes(timeline).first_steps(FirstSteps(queue_ms=3.0, prefill_ms=7.0, first_step_ms=5.0), is_local=True)
    assert timeline.parts == Timings(tokenize_ms=1.0, queue_ms=2.0, prefill_queue_ms=3.0, prefill_ms=4.0)
    assert timeline.first_step_ms == 5.0
    assert timeline.pages == HandoffStats()


def test_a_try_that_goes_on_after_the_first_token_tells_nothing_of_it() -> None:
    timeline = Timeline(0.0)
    first = TryTimes(timeline)
    first.prefilled(FirstToken(queue_ms=1.0, prefill_ms=2.0))
    timeline.note_tokens(0.01, 1)
    second = TryTimes(timeline)
    second.prefilled(FirstToken(queue_ms=8.0, prefill_ms=9.0))
    assert timeline.parts == Timings(prefill_queue_ms=1.0, prefill_ms=2.0)


def test_a_second_token_that_came_with_the_first_has_no_gap() -> None:
    together, apart = Timeline(0.0), Timeline(0.0)
    together.note_tokens(0.01, 2)
    apart.note_tokens(0.01, 1)
    apart.note_tokens(0.03, 1)
    assert together.second_token_ms() == {}
    assert apart.second_token_ms()["gap"] == pytest.approx(20.0)


def test_a_prompt_that_is_begun_before_word_of_its_pages_has_come_is_counted_once() -> None:
    timeline = Timeline(0.0)
    local = TryTimes(timeline)
    local.reserved(Reserved(), None, waited_s=0.020)
    timeline.note_tokens(0.021, 1)
    local.first_steps(FirstSteps(queue_ms=3.0, prefill_ms=7.0), is_local=True)
    parts = timeline.first_token_ms()
    assert (parts["reserve"], parts["delivery"]) == (pytest.approx(14.0), 0.0)
    assert sum(parts.values()) == pytest.approx(21.0)
    assert timeline.timings(1.0).reserve_ms == pytest.approx(14.0)
