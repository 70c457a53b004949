import dataclasses
import io

import bench_results
import pytest
from rich.console import Console

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen import compare
from pageferry.loadgen.metrics import ALL, number_text

A = bench_results.result("[bold]one", error="lost")
B = bench_results.result("two", scale=0.5)


def rows_by_path(a: object = A, b: object = B) -> dict[str, compare.Row]:
    assert isinstance(a, type(A)) and isinstance(b, type(B))
    return {row.metric.path: row for row in compare.rows(a.summary, b.summary)}


def test_every_metric_is_a_field() -> None:
    summary = A.summary
    assert [metric.path for metric in ALL if metric.value(summary) is None] == [
        "gpu.percent_mean",
        "gpu.memory_bytes_max",
    ]
    assert len({metric.path for metric in ALL}) == len(ALL)


def test_lower_times_and_higher_rates_are_better() -> None:
    rows = rows_by_path()
    ttft, rate, failed = rows["ttft_ms.p50"], rows["requests_per_s"], rows["failed"]
    assert ttft.ratio is not None and ttft.ratio < 0.6 and ttft.better == "B"
    assert rate.ratio is not None and rate.ratio > 1 and rate.better == "B"
    assert (failed.a, failed.b, failed.ratio, failed.better) == (1, 0, 0.0, "B")
    assert rows["input_tokens"].better == "" and "gpu.percent_mean" not in rows
    swapped = rows_by_path(B, A)
    assert swapped["ttft_ms.p50"].better == swapped["requests_per_s"].better == swapped["failed"].better == "A"
    assert swapped["failed"].ratio is None  # of nothing


def test_a_percent_is_no_difference() -> None:
    near = bench_results.result("near", scale=0.5 * 1.0099)
    assert rows_by_path(B, near)["ttft_ms.p50"].better == "equal"
    assert rows_by_path(B, bench_results.result(scale=0.5 * 1.0101))["ttft_ms.p50"].better == "A"


def test_what_only_one_has_is_shown_without_a_verdict() -> None:
    row = rows_by_path(bench_results.empty(), A)["ttft_ms.p50"]
    assert row.a is None and row.b is not None and row.ratio is None and row.better == ""


def test_equal_loads_are_compared_and_different_ones_refused_by_name() -> None:
    compare.check_same_load(A, bench_results.result("two", seed=5, rate=None))
    other = bench_results.result(concurrency=4, rate=2.0, slo={"ttft_ms": 5})
    with pytest.raises(InvalidArgumentError) as raised:
        compare.check_same_load(A, other)
    message = raised.value.message
    assert "concurrency is 2 in A and 4 in B; rate is not given in A and 2.0 in B" in message
    assert 'slo is not given in A and {"ttft_ms": 5} in B' in message and "requests" not in message


def test_surroundings_are_told_apart() -> None:
    machine = dataclasses.replace(B.machine, cores=64)
    elsewhere = dataclasses.replace(B, machine=machine, target=dataclasses.replace(B.target, model="large"))
    assert compare.surroundings(A, B) == []
    assert compare.surroundings(A, elsewhere) == [
        "model is tiny in A and large in B",
        "number of cores is 2 in A and 64 in B",
    ]


def test_the_table_shows_both_as_they_are_named() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(compare.as_table(A, dataclasses.replace(B, load={**B.load, "rate": 2.0})))
    text = out.getvalue()
    assert "A: [bold]one" in text and "B: two" in text
    assert "at most 1% count as equal" in text and "Different load: rate is not given in A and 2.0 in B." in text
    (line,) = (line for line in text.splitlines() if "TTFT max [ms]" in line)
    assert line.split() == ["TTFT", "max", "[ms]", "230.0", "122.5", "0.53×", "B"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (12345, "12,345"),
        (0.12345, "0.123"),
        (12.346, "12.35"),
        (123.45, "123.5"),
        (1234.5, "1,234"),
    ],
)
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert number_text(value) == text
