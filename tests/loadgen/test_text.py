import dataclasses

import bench_results

from pageferry.loadgen import text
from pageferry.loadgen.result import Gpu, Spread


def test_the_summary_names_what_there_is() -> None:
    result = bench_results.result(error="HTTP 503: busy")
    lag = Spread(11, 1.0, 0.0, 1.0, 2.0, 3.0, 3.0, 4.0)
    summary = dataclasses.replace(result.summary, gpu=Gpu(50.0, 2_000_000_000), send_lag_ms=lag)
    lines = list(text.lines(dataclasses.replace(result, summary=summary, notes=("mind this",))))
    assert lines[0] == "first: grpc 127.0.0.1:8000, tiny"
    assert lines[1].startswith("requests   11 completed, 1 failed, in ")
    assert lines[2] == "           1 × HTTP 503: busy"
    starts = [line.split()[0] for line in lines]
    assert starts[3:] == [
        "tokens", "rate", "ms", "ttft", "itl", "tpot", "e2e", "lag", "cpu", "gpu", "batch", "pages", "goodput",
        "highest", "note:",
    ]  # fmt: skip
    by_start = dict(zip(starts, lines, strict=True))
    assert by_start["highest"].endswith("4 requests/s, of 3 trials") and by_start["note:"] == "note: mind this"
    assert by_start["lag"].split()[1:] == ["1.00", "0.00", "1.00", "2.00", "3.00", "3.00", "4.00"]


def test_an_empty_result() -> None:
    starts = [line.split()[0] for line in text.lines(bench_results.empty())]
    assert starts == ["first:", "requests", "tokens", "rate", "cpu"]
