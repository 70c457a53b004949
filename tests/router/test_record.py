"""What the router remembers for its page: bounded, in order, and right as figures."""

from dataclasses import asdict

import pytest
from hand_clock import HandClock

from pageferry.router import record as record_module
from pageferry.router.record import KEPT_POINTS, KEPT_REQUESTS, Point, Record
from pageferry.router.timeline import Timeline
from pageferry.v1.types_pb2 import Usage


def end(record: Record, request_id: str, reason: str = "", outcome: str = "internal", **fields: object) -> None:
    timeline = Timeline(5.0, request_id=request_id, **fields)  # type: ignore[arg-type]
    record.ended(timeline, "tiny", "f" * 32, outcome if reason else "stop", reason, 7.5)


def test_the_newest_requests_are_kept_and_told_newest_first() -> None:
    record = Record()
    for number in range(KEPT_REQUESTS + 5):
        end(record, f"r-{number + 1}")
    assert record.num_requests == KEPT_REQUESTS + 5
    told = record.requests(0, 2 * KEPT_REQUESTS)
    assert [past.number for past in told] == list(range(KEPT_REQUESTS + 5, 5, -1))
    assert [past.request_id for past in record.requests(0, 2)] == ["r-1005", "r-1004"]
    assert [past.number for past in record.requests(KEPT_REQUESTS + 3, 100)] == [1005, 1004]
    assert record.requests(KEPT_REQUESTS + 5, 100) == record.requests(10**9, 100) == []


def test_a_request_is_told_with_its_last_try() -> None:
    record = Record(wall=lambda: 1000.0)
    end(record, "r", "FAILED", num_tries=2, workers=("p:2", "d:2"), first_token=5.5, last_token=6.5, num_tokens=3)
    end(record, "early", usage=Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=2))
    early, past = record.requests(0, 9)
    assert (past.prefill, past.decode, past.tries) == ("p:2", "d:2", 2)
    assert (past.arrived, past.ttft_s, past.per_token_s, past.total_s) == (997.5, 0.5, 0.5, 2.5)
    assert (past.outcome, past.reason, past.trace_id) == ("internal", "FAILED", "f" * 32)
    assert (early.prefill, early.decode, early.tries, early.ttft_s) == ("", "", 0, None)
    assert (early.prompt_tokens, early.cached_tokens, early.completion_tokens) == (9, 4, 2)


def test_a_point_has_the_figures_of_its_interval_alone() -> None:
    clock = HandClock()
    record = Record(wall=lambda: 1000 + clock.now, clock=clock)
    record.ttfts.extend(index / 100 for index in range(101))
    record.gaps.append(0.25)
    record.num_tokens = 30
    end(record, "a")
    end(record, "b", "FAILED")
    end(record, "c", "CANCELLED", "cancelled")  # by its caller: no failure
    end(record, "d")
    clock.now += 2
    record.close_point(queued=3, running=4)
    clock.now += 4
    record.close_point(queued=0, running=0)
    first, second = record.points(0)
    assert first == Point(1000 + clock.now - 4, 0.5, 0.99, 0.25, 0.25, 15.0, 2.0, 0.5, 3, 4)
    assert second == Point(1000 + clock.now, None, None, None, None, 0.0, 0.0, 0.0, 0, 0)
    assert record.points(first.time) == [second]


def test_points_and_samples_are_bounded() -> None:
    clock = HandClock()
    record = Record(clock=clock)
    for index in range(KEPT_POINTS + 3):
        clock.now += 2
        record.num_tokens = index
        record.close_point(0, 0)
    assert len(record.points(0)) == KEPT_POINTS
    assert record.points(0)[0].tokens_per_s == 3 / 2
    record.gaps.extend(range(10**5))  # type: ignore[arg-type]
    assert len(record.gaps) < 10**5


def test_transfers_are_counted_by_pairs_and_the_first_pairs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "_MAX_PAIRS", 2)
    record = Record()
    for prefill in ("p:1", "p:2", "p:2", "p:3"):
        record.transferred(prefill, "d:1", 3, 300)
    assert {pair: asdict(sums) for pair, sums in record.transfers.items()} == {
        ("p:2", "d:1"): {"handoffs": 2, "pages": 6, "num_bytes": 600},
        ("p:3", "d:1"): {"handoffs": 1, "pages": 3, "num_bytes": 300},
    }
