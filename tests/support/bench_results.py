"""Small results of `pageferry bench`, made up."""

import dataclasses

from pageferry.loadgen.result import (
    SCHEMA,
    BenchResult,
    GoodputSearch,
    Machine,
    Record,
    Sample,
    Slo,
    Target,
    Trial,
)
from pageferry.loadgen.summary import Observed, summarise

SLO = Slo(ttft_ms=200.0, itl_ms=40.0, e2e_ms=None)


def record(
    start_s: float = 0.0,
    *,
    ttft_ms: float | None = 100.0,
    gap_ms: float = 20.0,
    length: int = 64,
    tokens: int = 4,
    error: str | None = None,
) -> Record:
    gaps_ms = (gap_ms,) * (tokens - 1)
    return Record(start_s, ttft_ms, (ttft_ms or 0.0) + sum(gaps_ms), length, tokens, 16, gaps_ms, error)


def sample(t_s: float = 0.0, *, busy: float = 50.0, pages: int | None = 10) -> Sample:
    return Sample(t_s, busy, busy / 2, 2, 1, pages, None)


def result(label: str = "first", *, scale: float = 1.0, error: str | None = None, **load: object) -> BenchResult:
    """Twelve requests, the last of which fails where `error` says how; times are `scale` times as long."""
    starts = [0.25 * index for index in range(12)]
    records = [
        record(
            start,
            ttft_ms=scale * (80 + 15 * index),
            gap_ms=scale * (15 + index),
            length=64 + index,
            error=error if index == 11 else None,
        )
        for index, start in enumerate(starts)
    ]
    samples = [sample(0.25 * index, busy=40 + 3 * index, pages=8 + index) for index in range(12)]
    observed = Observed(
        wall_s=3.0,
        cores=2,
        client_cpu_s=0.1,
        server_cpu_s=2.5,
        batch_counts={1: 4, 2: 6, 4: 2},
        pages_total=64,
        send_lags_ms=[0.0, 1.0],
    )
    trials = (Trial(2.0, 1.0, True), Trial(8.0, 0.5, False), Trial(4.0, 0.99, True))
    return BenchResult(
        schema=SCHEMA,
        label=label,
        started="2026-01-02T03:04:05+00:00",
        command="pageferry bench --requests 12",
        target=Target("grpc", "127.0.0.1:8000", "tiny"),
        load={"requests": 12, "concurrency": 2, "input_tokens": "64", "output_tokens": "4"} | load,
        machine=Machine("A processor", 2, 8 << 30, "Linux", "3.12.1"),
        summary=summarise(records, samples, observed, SLO),
        requests=tuple(records),
        samples=tuple(samples),
        goodput_search=GoodputSearch(4.0, trials),
        notes=("the client was busy",),
    )


def empty() -> BenchResult:
    """A run that got nothing at all: no request, no sample, nothing known of the server."""
    summary = summarise([], [], Observed(wall_s=0.0, cores=2, client_cpu_s=0.0))
    whole = result()
    return dataclasses.replace(whole, summary=summary, requests=(), samples=(), goodput_search=None, notes=())
