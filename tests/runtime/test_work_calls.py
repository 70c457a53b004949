import asyncio
import time

import pytest
from opentelemetry import context as otel_context
from prometheus_client import generate_latest
from spans import SpanLog

from pageferry.core.errors import AlreadyExistsError, ResourceExhaustedError
from pageferry.runtime.metrics import Metrics
from pageferry.runtime.telemetry import PastSpans
from pageferry.runtime.work_calls import LiveIds, counted, deadline_of, wall_offset_ns


def test_an_id_is_live_for_as_long_as_its_block_runs() -> None:
    ids = LiveIds()
    with ids.claim("a"):
        with ids.claim("b"), pytest.raises(AlreadyExistsError, match="'a'"), ids.claim("a"):
            pass
        assert len(ids) == 1
    with ids.claim("a"):
        pass
    assert len(ids) == 0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "stop"),
        (ResourceExhaustedError("full"), "resource_exhausted"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyError("x"), "other"),
    ],
)
def test_a_call_is_counted_once_by_its_outcome(error: BaseException | None, outcome: str) -> None:
    metrics = Metrics()
    try:
        with counted(metrics) as counting:
            if error is not None:
                raise error
            counting.name = "stop"
    except BaseException as raised:
        assert raised is error
    text = generate_latest(metrics.registry).decode()
    lines = [line for line in text.splitlines() if line.startswith("pageferry_requests_total{")]
    counted_lines = [line for line in lines if not line.endswith(" 0.0")]
    assert counted_lines == [f'pageferry_requests_total{{outcome="{outcome}"}} 1.0']


async def test_spans_of_the_past_lie_as_far_back_on_the_wall_clock_as_on_the_workers() -> None:
    log = SpanLog()
    spans = PastSpans(log.tracer(), lambda: wall_offset_ns(lambda: 500.0))
    spans.record("chunk", otel_context.get_current(), 490.0, 492.5, {"pageferry.chunk.tokens": 7})
    spans.record("later", otel_context.get_current(), 492.5, 493.0, {})
    chunk, later = log.spans
    assert chunk.start_time is not None
    assert chunk.end_time is not None
    assert later.start_time is not None
    assert chunk.end_time - chunk.start_time == pytest.approx(2.5e9)
    assert later.start_time - chunk.end_time == pytest.approx(0, abs=5e8)
    assert dict(chunk.attributes or {}) == {"pageferry.chunk.tokens": 7}


@pytest.mark.parametrize(("remaining", "deadline"), [(None, None), (2.5, 102.5)])
def test_a_deadline_is_counted_on_the_workers_clock(remaining: float | None, deadline: float | None) -> None:
    class Context:
        def time_remaining(self) -> float | None:
            return remaining

    assert deadline_of(Context(), lambda: 100.0) == deadline


def test_a_thread_that_is_held_up_between_two_clocks_reads_them_again() -> None:
    readings = iter([500.0, 530.0, 530.0, 530.0])  # half a minute passes behind the first one
    began_ns = time.time_ns()
    assert 0 <= wall_offset_ns(lambda: next(readings)) + 530 * 10**9 - began_ns < 10e9
