"""From single requests to a run's numbers; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pageferry.loadgen.result import MS, BatchSize, Cpu, Goodput, Gpu, Pages, Record, Sample, Slo, Spread, Summary


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of the processes over the run, beside its requests and samples; None where it can't be known."""

    wall_s: float  # over which the seconds of CPU were counted
    cores: int
    client_cpu_s: float
    server_cpu_s: float | None = None
    batch_counts: Mapping[int, int] | None = None  # samples of a decode worker by how many ran on it
    pages_total: int | None = None
    gpu_memory_bytes_max: int | None = None
    send_lags_ms: Sequence[float] | None = None  # by how much requests were sent late


def summarise(
    records: Sequence[Record], samples: Sequence[Sample], observed: Observed, slo: Slo | None = None
) -> Summary:
    """All of a run's numbers; `slo` where there are limits to keep."""
    completed = [record for record in records if record.error is None]
    ends_s = [record.start_s + record.e2e_ms / MS for record in records]
    duration_s = max(ends_s) - min(record.start_s for record in records) if records else 0.0
    input_tokens = sum(record.input_tokens for record in completed)
    output_tokens = sum(record.output_tokens for record in completed)
    cached = [record.cached_tokens for record in completed if record.cached_tokens is not None]
    busy = _mean(sample.machine_cpu_percent for sample in samples)
    return Summary(
        duration_s=duration_s,
        requests=len(records),
        completed=len(completed),
        failed=len(records) - len(completed),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        requests_per_s=_per_s(len(completed), duration_s),
        output_tokens_per_s=_per_s(output_tokens, duration_s),
        total_tokens_per_s=_per_s(input_tokens + output_tokens, duration_s),
        goodput=None if slo is None else goodput(records, slo, duration_s),
        ttft_ms=spread([record.ttft_ms for record in completed if record.ttft_ms is not None]),
        itl_ms=spread([gap for record in completed for gap in record.gaps_ms]),
        tpot_ms=spread([record.tpot_ms for record in completed if record.tpot_ms is not None]),
        e2e_ms=spread([record.e2e_ms for record in completed]),
        send_lag_ms=None if observed.send_lags_ms is None else spread(observed.send_lags_ms),
        batch_size=BatchSize.of(observed.batch_counts or {}),
        pages=_pages(samples, observed.pages_total),
        cpu=Cpu(busy or 0.0, observed.server_cpu_s, observed.client_cpu_s),
        gpu=_gpu(samples, observed.gpu_memory_bytes_max),
        foreign_cpu_percent=_foreign_percent(busy, observed),
    )


def spread(values: Sequence[float]) -> Spread:
    """Percentiles by linear interpolation over all values."""
    if not values:
        return Spread(0, None, None, None, None, None, None, None)
    array = np.asarray(values, dtype=np.float64)
    points = [float(point) for point in np.percentile(array, (0, 50, 90, 99, 99.9, 100))]
    return Spread(len(values), float(array.mean()), *points)


def goodput(records: Sequence[Record], slo: Slo, duration_s: float) -> Goodput:
    """A failed request keeps no limit, and counts."""
    kept = sum(slo.keeps(record) for record in records)
    return Goodput(slo, kept / len(records) if records else 0.0, _per_s(kept, duration_s))


def _pages(samples: Sequence[Sample], total: int | None) -> Pages | None:
    used = [sample.pages_used for sample in samples if sample.pages_used is not None]
    return Pages(max(used), sum(used) / len(used), total) if used and total is not None else None


def _gpu(samples: Sequence[Sample], memory_bytes_max: int | None) -> Gpu | None:
    percent = _mean(sample.gpu_percent for sample in samples if sample.gpu_percent is not None)
    return None if percent is None or memory_bytes_max is None else Gpu(percent, memory_bytes_max)


def _foreign_percent(busy: float | None, observed: Observed) -> float | None:
    """Of all cores; clocks of the machine and of processes tick apart, so never below zero."""
    if busy is None or observed.server_cpu_s is None or observed.wall_s <= 0:
        return None
    ours = (observed.server_cpu_s + observed.client_cpu_s) / (observed.wall_s * observed.cores)
    return max(0.0, busy - 100 * ours)


def _mean(values: Iterable[float]) -> float | None:
    array = list(values)
    return sum(array) / len(array) if array else None


def _per_s(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
