"""A summary's numbers by name, unit and which way is better; all tables of results are made of them."""

from dataclasses import dataclass
from typing import Literal

from pageferry.loadgen.result import Summary

Better = Literal["higher", "lower", ""]  # empty where neither is
# What each distribution in a summary is of: its short name, its field, and the short name's meaning.
SPREADS = (
    ("TTFT", "ttft_ms", "time to first token"),
    ("ITL", "itl_ms", "every gap between tokens"),
    ("TPOT", "tpot_ms", "a request's mean gap by token"),
    ("E2E", "e2e_ms", "from sending a request to its end"),
)
POINTS = {"mean": "mean", "p50": "p50", "p90": "p90", "p99": "p99", "p99.9": "p999", "max": "max"}


@dataclass(frozen=True, slots=True)
class Metric:
    group: str
    name: str
    path: str  # of its field, from the summary
    better: Better = ""
    unit: str = ""
    scale: float = 1  # from the field's unit to this one

    @property
    def title(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name

    def value(self, summary: Summary) -> float | None:
        found: object = summary
        for name in self.path.split("."):
            if found is None:
                return None
            found = getattr(found, name)
        return found * self.scale if isinstance(found, int | float) else None

    def text(self, summary: Summary) -> str:
        return number_text(self.value(summary))


def number_text(value: float | None) -> str:
    """Four digits, or all of a whole number; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    decimals = next((decimals for limit, decimals in ((100, 1), (10, 2)) if abs(value) >= limit), 3)
    return f"{value:.{decimals}f}"


THROUGHPUT = (
    Metric("Throughput", "Requests per second", "requests_per_s", "higher"),
    Metric("Throughput", "Output tokens per second", "output_tokens_per_s", "higher"),
    Metric("Throughput", "Input and output tokens per second", "total_tokens_per_s", "higher"),
    Metric("Throughput", "Goodput, requests per second", "goodput.requests_per_s", "higher"),
    Metric("Throughput", "Requests within the limits", "goodput.share", "higher", "%", 100),
)
LATENCY = tuple(
    Metric(f"{short}: {meaning}", f"{short} {point}", f"{field}.{name}", "lower", "ms")
    for short, field, meaning in SPREADS
    for point, name in POINTS.items()
)
EXTENT = (
    Metric("Extent", "Duration", "duration_s", unit="s"),
    Metric("Extent", "Completed requests", "completed"),
    Metric("Extent", "Failed requests", "failed", "lower"),
    Metric("Extent", "Input tokens", "input_tokens"),
    Metric("Extent", "Cached input tokens", "cached_tokens"),
    Metric("Extent", "Output tokens", "output_tokens"),
    Metric("Extent", "Sent behind the schedule, p99", "send_lag_ms.p99", unit="ms"),
)
RESOURCES = (
    Metric("Resources", "Sequences running, mean", "batch_size.mean"),
    Metric("Resources", "Pages in use, mean", "pages.used_mean"),
    Metric("Resources", "Pages in use, most", "pages.used_max"),
    Metric("Resources", "Pages in all", "pages.total"),
    Metric("Resources", "CPU of the machine, mean", "cpu.machine_percent_mean", unit="%"),
    Metric("Resources", "CPU of other processes, mean", "foreign_cpu_percent", unit="%"),
    Metric("Resources", "CPU time of the server", "cpu.server_seconds", unit="s"),
    Metric("Resources", "CPU time of the client", "cpu.client_seconds", unit="s"),
    Metric("Resources", "GPU, mean", "gpu.percent_mean", unit="%"),
    Metric("Resources", "GPU memory, most", "gpu.memory_bytes_max", unit="GB", scale=1e-9),
)
ALL = (*THROUGHPUT, *LATENCY, *EXTENT, *RESOURCES)
