"""Prints docs/metrics.md: every metric that the services have, as their code names them. `make metrics` writes it."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pageferry.router.metrics import RouterMetrics
from pageferry.router.pick_metrics import PickMetrics
from pageferry.runtime.metrics import SECONDS, Metrics, Reading
from pageferry.runtime.worker_metrics import WorkerMetrics

HEAD = """\
# Metrics

Every service answers `GET /metrics` for [Prometheus](https://prometheus.io): the router on its HTTP port
(`server.http_port`) and, where `telemetry.metrics_port` is set, on that one too; workers on `telemetry.metrics_port`,
which `pageferry up` counts up from worker to worker, prefill workers first. Where the router knows tenants, its HTTP
port wants an admin's key (`authorization: Bearer KEY`). `telemetry.metrics_port` asks for none, and so belongs in a
network of its own; where the services show certificates ([security.md](security.md)), it does, too, and asks for them.

Scrapers that accept OpenMetrics get exemplars, which lead from an observation to its trace (`trace_id`); others get
the plain text format. Histograms of durations have the same {num_buckets} buckets, from 1 ms to an hour, each at most
twice the one before: a quantile is known within a factor of 2. Labels take values from fixed sets, or from your
configuration (`profile`); what a client sends never makes a series. A fixed set's series are there from the start, so
that `rate()` and `increase()` see the first event.

[deploy/prometheus](../deploy/prometheus) has scrape configurations and alerts, [deploy/grafana](../deploy/grafana) a
dashboard, [operate.md](operate.md) what to do about an alert. This page is made from the code: `make metrics`.
"""
PROCESS = """
## Of the process, on Linux

`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_virtual_memory_bytes`,
`process_start_time_seconds`, `process_open_fds` and `process_max_fds`, as
[prometheus_client](https://github.com/prometheus/client_python) has them.
"""


def rows(registry: CollectorRegistry) -> list[tuple[str, str, str, str]]:
    """Name, type, labels and help of each metric but the process's own, by name."""
    found = []
    for metric in set(registry._names_to_collectors.values()):
        if isinstance(metric, Reading):
            name, kind, labels, text = metric.name, metric.type, metric.labels, metric.text
        elif isinstance(metric, Counter | Gauge | Histogram):
            family: Any = metric
            name, kind, labels, text = family._name, family._type, family._labelnames, family._documentation
        else:
            raise AssertionError(f"{metric} is of no kind that this page knows")
        found.append((name + "_total" * (kind == "counter"), kind, ", ".join(labels), text))
    return sorted(found)


def section(title: str, found: list[tuple[str, str, str, str]]) -> str:
    lines = [f"\n## {title}\n", "| Name | Type | Labels | Meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in found]
    return "\n".join(lines) + "\n"


def page() -> str:
    shared = rows(Metrics().registry)
    picking = CollectorRegistry()
    PickMetrics(picking)
    parts = [HEAD.format(num_buckets=len(SECONDS) + 1)]
    parts.append(section("Of every service", shared))
    for title, registry in (
        ("Of the router", RouterMetrics().registry),
        ("Of a router that picks for gateways (`router.picker_port`)", picking),
        ("Of workers", WorkerMetrics().registry),
    ):
        parts.append(section(title, [row for row in rows(registry) if row not in shared]))
    return "".join([*parts, PROCESS])


if __name__ == "__main__":
    print(page(), end="")
