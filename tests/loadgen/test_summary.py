import math

import pytest
from bench_results import SLO, record, sample

from pageferry.loadgen.result import Record, Slo, Spread
from pageferry.loadgen.summary import Observed, goodput, spread, summarise

OBSERVED = Observed(wall_s=2.0, cores=2, client_cpu_s=0.2)


def test_nothing_has_no_percentiles() -> None:
    assert spread([]) == Spread(0, None, None, None, None, None, None, None)


def test_one_value_is_every_percentile() -> None:
    assert spread([7.0]) == Spread(1, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0)


def test_between_two_values_percentiles_are_linear() -> None:
    two = spread([20.0, 10.0])
    assert (two.count, two.mean, two.min, two.max) == (2, 15.0, 10.0, 20.0)
    assert two.p50 == 15.0
    assert two.p90 == pytest.approx(19.0) and two.p99 == pytest.approx(19.9) and two.p999 == pytest.approx(19.99)


def test_rates_count_from_the_first_start_to_the_last_end() -> None:
    records = [record(1.0), record(2.84), record(1.5, error="timed out")]
    summary = summarise(records, [], OBSERVED)
    assert summary.duration_s == pytest.approx(2.0)  # 100 ms to the first token and three gaps of 20 ms
    assert (summary.requests, summary.completed, summary.failed) == (3, 2, 1)
    assert summary.errors == {"timed out": 1}
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (128, 8, 32)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.output_tokens_per_s == pytest.approx(4.0)
    assert summary.total_tokens_per_s == pytest.approx(68.0)
    assert summary.ttft_ms.count == 2 and summary.itl_ms.count == 6
    assert summary.goodput is None and summary.gpu is None and summary.pages is None


def test_time_per_token_counts_tokens_not_pieces() -> None:
    merged = Record(0.0, 10.0, 70.0, 8, 7, None, (40.0, 20.0), None)  # seven tokens in three pieces
    summary = summarise([merged, record(tokens=1)], [], OBSERVED)
    assert summary.tpot_ms == Spread(1, *(10.0,) * 7)
    assert summary.itl_ms.mean == 30.0


def test_no_request_gives_zeros_and_no_division() -> None:
    summary = summarise([], [], OBSERVED, SLO)
    assert summary.duration_s == 0.0 and summary.requests_per_s == 0.0
    assert summary.cached_tokens is None and summary.batch_size is None
    assert summary.goodput is not None and summary.goodput.share == 0.0


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (record(ttft_ms=200.0), True),  # the limit itself is within
        (record(ttft_ms=200.1), False),
        (record(gap_ms=40.1), False),
        (record(gap_ms=40.1, tokens=1), True),  # without a gap
        (record(error="refused"), False),
        (record(ttft_ms=None), False),
    ],
)
def test_a_request_keeps_all_limits_or_is_not_goodput(asked: Record, kept: bool) -> None:
    assert SLO.keeps(asked) is kept


def test_goodput_is_the_rate_of_requests_that_keep_the_limits() -> None:
    good = goodput([record(), record(ttft_ms=300.0), record(error="refused"), record()], SLO, duration_s=4.0)
    assert (good.share, good.requests_per_s) == (0.5, 0.5)
    assert goodput([record()], Slo(None, None, 159.0), 1.0).share == 0.0


def test_foreign_work_is_what_neither_side_did() -> None:
    observed = Observed(wall_s=2.0, cores=2, client_cpu_s=0.2, server_cpu_s=1.0)
    summary = summarise([record()], [sample(busy=40.0), sample(busy=60.0)], observed)
    assert summary.cpu.machine_percent_mean == 50.0
    assert summary.foreign_cpu_percent == pytest.approx(50.0 - 30.0)
    idle = summarise([record()], [sample(busy=1.0)], observed)
    assert idle.foreign_cpu_percent == 0.0
    assert summarise([record()], [sample()], OBSERVED).foreign_cpu_percent is None


def test_pages_are_those_that_samples_saw() -> None:
    samples = [sample(pages=4), sample(pages=None), sample(pages=10)]
    pages = summarise([record()], samples, Observed(1.0, 2, 0.0, pages_total=64)).pages
    assert pages is not None and (pages.used_max, pages.used_mean, pages.total) == (10, 7.0, 64)
    assert summarise([record()], samples, OBSERVED).pages is None


def test_percentiles_hold_for_many_values() -> None:
    many = spread([float(value) for value in range(1001)])
    assert many.p999 is not None and math.isclose(many.p999, 999.0)
