"""Which plots a page has of one result, or of several in the same axes; without what there is no data for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pageferry.loadgen.plots import Frame, Panel, Series, bars, cdf, lines
from pageferry.loadgen.result import MS, BenchResult, Record, Sample, Slo

_WIDE = 1100
_MAX_BINS = 150  # of a timeline
_BIN_WIDTHS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_SPAN_FOR_LOG = 20  # lengths that differ by more have a logarithmic axis


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    note: str  # how to read it
    svg: str
    wide: bool = False


def plots(results: Mapping[str, BenchResult]) -> list[Plot]:
    """All there are, by the results' short names."""
    found = (*_distributions(results), _lengths(results), *_timelines(results), _batches(results), _goodput(results))
    return [plot for plot in found if plot is not None]


def output_rate(records: Sequence[Record], bin_s: float) -> tuple[list[float], list[float]]:
    """Middles of bins, and the tokens per second that arrived in each; a piece counts its share of the tokens."""
    times_s: list[float] = []
    weights: list[float] = []
    for record in records:
        if record.ttft_ms is None or not record.output_tokens:
            continue
        arrivals_ms = accumulate(record.gaps_ms, initial=record.ttft_ms)
        times_s += [record.start_s + arrival / MS for arrival in arrivals_ms]
        pieces = len(record.gaps_ms) + 1
        weights += [record.output_tokens / pieces] * pieces
    if not times_s:
        return [], []
    edges = bin_s * np.arange(int(max(times_s) / bin_s) + 2)
    tokens, _ = np.histogram(times_s, edges, weights=weights)
    return (edges[:-1] + bin_s / 2).tolist(), (tokens / bin_s).tolist()


def in_flight(records: Sequence[Record]) -> tuple[list[float], list[int]]:
    """When the number of requests in flight changed, and to what."""
    ends = [(record.start_s + record.e2e_ms / MS, -1) for record in records]
    changes = sorted([*((record.start_s, 1) for record in records), *ends])
    return [at for at, _ in changes], list(accumulate(change for _, change in changes))


def _distributions(results: Mapping[str, BenchResult]) -> Iterator[Plot | None]:
    slo = next(
        (goodput.slo for result in results.values() if (goodput := result.summary.goodput)), Slo(None, None, None)
    )
    done = {name: [r for r in result.requests if r.error is None] for name, result in results.items()}
    ttft = {name: [r.ttft_ms for r in records if r.ttft_ms is not None] for name, records in done.items()}
    gaps = {name: [gap for r in records for gap in r.gaps_ms] for name, records in done.items()}
    e2e = {name: [r.e2e_ms for r in records] for name, records in done.items()}
    note = "Share of values up to x; dots are the median, p90 and p99."
    for short, title, values, limit in (
        ("ttft", "Time to first token", ttft, slo.ttft_ms),
        ("itl", "Inter-token latency", gaps, None),  # its limit is for a request's time per token
        ("e2e", "End to end", e2e, slo.e2e_ms),
    ):
        if any(values.values()):
            marks = {} if limit is None else {f"limit {limit:g} ms": limit}
            alt = f"{title}: cumulative distribution. {_medians(values)}"
            frame = Frame(short, alt, f"{title.lower()} [ms]", log_x=True, marks=marks)
            yield Plot(title, note, cdf(frame, values))


def _medians(values: Mapping[str, Sequence[float]]) -> str:
    medians = {name: f"median {np.median(series):.4g} ms" for name, series in values.items() if series}
    return _each(medians, named=len(values) > 1)


def _each(texts: Mapping[str, str], named: bool) -> str:
    """What is to be said of each result."""
    return "; ".join(f"{name}: {text}" if named else text for name, text in texts.items())


def _timelines(results: Mapping[str, BenchResult]) -> Iterator[Plot | None]:
    for number, (name, result) in enumerate(results.items()):
        if not result.requests:
            continue
        of_it = f", {name}" if len(results) > 1 else ""
        alt = f"Requests in flight, output rate, CPU and pages over the time of the run{of_it}"
        frame = Frame(f"timeline-{number}", alt, "time since start [s]")
        yield Plot(f"Over time{of_it}", "", lines(frame, *_panels(result), width=_WIDE), wide=True)


def _panels(result: BenchResult) -> Iterator[Panel]:
    wanted = result.summary.duration_s / _MAX_BINS
    bin_s = next((width for width in _BIN_WIDTHS_S if width >= wanted), wanted)
    samples = result.samples[:: -(-len(result.samples) // (4 * _MAX_BINS)) or 1]
    yield Panel(
        "requests",
        [
            Series("in flight", *in_flight(result.requests), mark="steps"),
            *_sampled(samples, running="running on the server", waiting="waiting on the server"),
        ],
    )
    yield Panel("tokens/s", [Series("output", *output_rate(result.requests, bin_s))])
    busy = _sampled(samples, machine_cpu_percent="CPU, machine", server_cpu_percent="CPU, server", gpu_percent="GPU")
    if busy:
        yield Panel("busy [%]", busy, y_max=105)
    if pages := _sampled(samples, pages_used="in use"):
        yield Panel("pages", pages)


def _sampled(samples: Sequence[Sample], **labels: str) -> list[Series]:
    found = []
    for name, label in labels.items():
        points = [(sample.t_s, value) for sample in samples if (value := getattr(sample, name)) is not None]
        if points:
            found.append(Series.of(label, points))
    return found


def _lengths(results: Mapping[str, BenchResult]) -> Plot | None:
    series = []
    lengths: set[int] = set()
    for name, result in results.items():
        points = [(r.input_tokens, r.ttft_ms) for r in result.requests if r.error is None and r.ttft_ms is not None]
        series.append(Series.of(name, points, "dots"))
        lengths |= {length for length, _ in points}
    if len(lengths) < 2:
        return None
    log_x = min(lengths) > 0 and max(lengths) / min(lengths) > _SPAN_FOR_LOG
    frame = Frame("lengths", "Time to first token of each request by its input length", "input length [tokens]", log_x)
    svg = lines(frame, Panel("time to first token [ms]", series, log_y=True))
    return Plot("Time to first token by input length", "One dot a request.", svg)


def _batches(results: Mapping[str, BenchResult]) -> Plot | None:
    sizes = {name: found.counts if (found := result.summary.batch_size) else {} for name, result in results.items()}
    if not any(sizes.values()):
        return None
    categories = [str(size) for size in range(1, max(int(size) for counts in sizes.values() for size in counts) + 1)]
    shares = {
        name: [100 * counts.get(category, 0) / sum(counts.values()) for category in categories] if counts else []
        for name, counts in sizes.items()
    }
    of_each = {name: f"mean {r.summary.batch_size.mean:.3g}" for name, r in results.items() if r.summary.batch_size}
    means = _each(of_each, named=len(results) > 1)
    frame = Frame("batches", f"Share of samples by how many sequences ran. {means}", "sequences running")
    return Plot(
        "Batch sizes",
        f"Sequences that ran on a decode worker, a step of the model each, by samples ({means}).",
        bars(frame, "share of samples [%]", categories, shares),
    )


def _goodput(results: Mapping[str, BenchResult]) -> Plot | None:
    series = []
    for name, result in results.items():
        trials = result.goodput_search.trials if result.goodput_search else ()
        series.append(Series.of(name, sorted((trial.rate, 100 * trial.share) for trial in trials)))
    if not any(one.x for one in series):
        return None
    shares = [result.load.get("goodput_share") for result in results.values()]
    limit = 100 * shares[0] if isinstance(shares[0], float | int) and shares == shares[:1] * len(shares) else None
    best = {name: _best(found.rate) for name, result in results.items() if (found := result.goodput_search)}
    rates = _each(best, named=len(results) > 1)
    alt = f"Share of requests within the limits by request rate. {rates}"
    frame = Frame("goodput", alt, "requests per second", log_x=True)
    svg = lines(frame, Panel("within the limits [%]", series, y_max=103, limit=limit))
    return Plot("Goodput", f"Highest rate that keeps the limits ({rates}).", svg)


def _best(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:.4g} requests/s"
