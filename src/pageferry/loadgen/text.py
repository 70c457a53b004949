"""A result in a terminal's lines."""

from collections.abc import Iterator

from pageferry.loadgen.result import BenchResult, Goodput, Spread, Summary

_COLUMNS = ("mean", "min", "p50", "p90", "p99", "p999", "max")


def lines(result: BenchResult) -> Iterator[str]:
    """The summary, and below it the notes."""
    summary, target = result.summary, result.target
    label = f"{result.label}: " if result.label else ""
    yield f"{label}{target.kind} {target.address}, {target.model}{_seed(result)}"
    yield f"requests   {summary.completed} completed, {summary.failed} failed, in {summary.duration_s:.2f} s"
    for text, count in summary.errors.items():
        yield f"           {count} × {text}"
    yield f"tokens     {summary.input_tokens} in{_cached(summary)}, {summary.output_tokens} out"
    yield (
        f"rate       {summary.requests_per_s:.3g} requests/s, {summary.output_tokens_per_s:.4g} output tokens/s, "
        f"{summary.total_tokens_per_s:.4g} tokens/s in all"
    )
    yield from _latencies(summary)
    yield from _server(summary)
    if summary.goodput is not None:
        yield _goodput(summary.goodput)
    if result.goodput_search is not None:
        rate = result.goodput_search.rate
        found = "none" if rate is None else f"{rate:.3g} requests/s"
        yield f"highest    {found}, of {len(result.goodput_search.trials)} trials"
    for note in result.notes:
        yield f"note: {note}"


def _seed(result: BenchResult) -> str:
    return f", seed {result.load['seed']}" if "seed" in result.load else ""


def _cached(summary: Summary) -> str:
    return "" if summary.cached_tokens is None else f" ({summary.cached_tokens} cached)"


def _latencies(summary: Summary) -> Iterator[str]:
    spreads: list[tuple[str, Spread | None]] = [
        ("ttft", summary.ttft_ms),
        ("itl", summary.itl_ms),
        ("tpot", summary.tpot_ms),
        ("e2e", summary.e2e_ms),
        ("lag", summary.send_lag_ms),
    ]
    if summary.completed:
        yield "ms      " + "".join(f"{name:>10}" for name in _COLUMNS)
    for name, spread in spreads:
        if spread is not None and spread.count:
            values = (getattr(spread, column) for column in _COLUMNS)
            yield f"{name:<8}" + "".join(f"{value:>10.2f}" for value in values)


def _server(summary: Summary) -> Iterator[str]:
    cpu = summary.cpu
    parts = [f"machine {cpu.machine_percent_mean:.0f}% busy"]
    if cpu.server_seconds is not None:
        parts.append(f"server {cpu.server_seconds:.2f} s")
    parts.append(f"this client {cpu.client_seconds:.2f} s")
    if summary.foreign_cpu_percent is not None:
        parts.append(f"others {summary.foreign_cpu_percent:.0f}% of the machine")
    yield f"cpu        {', '.join(parts)}"
    if summary.gpu is not None:
        yield f"gpu        {summary.gpu.percent_mean:.0f}% busy, {summary.gpu.memory_bytes_max / 1e9:.2f} GB"
    if summary.batch_size is not None:
        yield f"batch      {summary.batch_size.mean:.2f} sequences on average"
    if summary.pages is not None:
        pages = summary.pages
        yield f"pages      {pages.used_max} of {pages.total} used at most, {pages.used_mean:.1f} on average"


def _goodput(goodput: Goodput) -> str:
    slo = goodput.slo
    limits = {"ttft": slo.ttft_ms, "itl": slo.itl_ms, "e2e": slo.e2e_ms}
    kept = ", ".join(f"{name} {limit:g} ms" for name, limit in limits.items() if limit is not None)
    return f"goodput    {goodput.requests_per_s:.3g} requests/s; {goodput.share:.1%} of requests keep {kept}"
