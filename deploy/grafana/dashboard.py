"""Prints dashboard.json, which Grafana imports or is provisioned with. `make metrics` writes it.

Plain JSON: of the few kinds of panels here, Grafana's own SDK would be longer than what follows.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WIDTH = 24  # columns of Grafana's grid
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "$__rate_interval"
HERE = 'instance=~"$instance"'
Target = tuple[str, str]  # an expression, and how its series are called


@dataclass(frozen=True)
class Panel:
    title: str
    targets: tuple[Target, ...]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""
    stacked: bool = False
    width: int = 8
    height: int = 8


def quantiles(name: str, more: str = "", by: str = "") -> tuple[Target, ...]:
    """The median, and what one of 10 and one of 100 wait longer than."""
    rate = f"sum by (le{by and ', ' + by}) (rate({name}_bucket{{{more}}}[{WINDOW}]))"
    called = f"{{{{{by}}}}} " if by else ""
    return tuple((f"histogram_quantile({share}, {rate})", f"{called}p{share * 100:g}") for share in (0.5, 0.9, 0.99))


def mean(name: str, by: str, more: str = "") -> Target:
    rates = [f"sum by ({by}) (rate({name}_{part}{{{more}}}[{WINDOW}]))" for part in ("sum", "count")]
    return " / ".join(rates), f"{{{{{by}}}}}"


def rate(name: str, by: str, more: str = "", called: str = "") -> Target:
    return f"sum by ({by}) (rate({name}{{{more}}}[{WINDOW}]))", called or " ".join(
        f"{{{{{label.strip()}}}}}" for label in by.split(",")
    )


def now(name: str, by: str, more: str = "") -> Target:
    return f"sum by ({by}) ({name}{{{more}}})", " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))


def ratio(name: str, part: str, whole: str, more: str) -> Target:
    """Of one kind to another, by instance."""
    counts = [rate(name, "instance", f'kind="{kind}", {more}') for kind in (part, whole)]
    return f"{counts[0][0]} / {counts[1][0]}", counts[0][1]


def share(name: str, by: str, part: str, whole: str, *, is_counter: bool = True) -> Target:
    """Of the series that `whole` selects, those that `part` does, too."""
    counts = [rate(name, by, more) if is_counter else now(name, by, more) for more in (f"{part}, {whole}", whole)]
    return f"{counts[0][0]} / {counts[1][0]}", counts[0][1]


ROUTER = 'job="pageferry-router"'
FAILED = 'outcome=~"unavailable|internal|data_loss|other"'
WORKERS = f'job!="pageferry-router", {HERE}'
PAGES = (
    f"sum by (state, format) (pageferry_pages{{{HERE}}} * on (job, instance, pool, format) "
    f"group_left () pageferry_page_bytes{{{HERE}}})"
)
SERVICES = f'job=~"pageferry-.+", {HERE}'

ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel("Requests", (rate("pageferry_requests_total", "job", ROUTER, "requests"),), "reqps", "stat", width=4),
        Panel("Failed", (share("pageferry_requests_total", "job", FAILED, ROUTER),), "percentunit", "stat", width=4),
        Panel("Ready", (now("pageferry_workers", "role", 'state="ready"'),), kind="stat", width=4),
        Panel("Queue", (("sum(pageferry_queued_requests)", "queued"),), kind="stat", width=4),
        Panel("First token, p99", quantiles("pageferry_time_to_first_token_seconds")[2:], "s", "stat", width=4),
        Panel("Between tokens, p99", quantiles("pageferry_inter_token_seconds")[2:], "s", "stat", width=4),
    ),
    "Latency": (
        Panel("Time to first token", quantiles("pageferry_time_to_first_token_seconds"), "s"),
        Panel(
            "What it is made of",
            (mean("pageferry_first_token_part_seconds", "part"),),
            "s",
            text="Means, of requests that went well.",
            stacked=True,
        ),
        Panel(
            "What the second token waits for",
            (mean("pageferry_second_token_part_seconds", "part"),),
            "s",
            text="Means, of requests whose pages were handed over.",
            stacked=True,
        ),
        Panel("Between tokens", quantiles("pageferry_inter_token_seconds"), "s"),
        Panel("Whole requests", quantiles("pageferry_request_seconds"), "s"),
        Panel("In the router's queue", quantiles("pageferry_queue_seconds"), "s"),
    ),
    "Traffic": (
        Panel("Requests by outcome", (rate("pageferry_requests_total", "outcome", ROUTER),), "reqps", stacked=True),
        Panel("Tokens", (rate("pageferry_tokens_total", "kind", ROUTER),), "short", text="A second."),
        Panel(
            "Waiting and running",
            (
                ("sum by (profile) (pageferry_queued_requests)", "{{profile}} waiting"),
                ("sum by (profile) (pageferry_running_requests)", "{{profile}} running"),
            ),
        ),
        Panel("Refused, by reason", (rate("pageferry_rejections_total", "reason"),), "reqps"),
        Panel(
            "Taken over by others",
            (
                rate("pageferry_prefill_failures_total", "next", "", "prefill failed: {{next}}"),
                rate("pageferry_resumes_total", "outcome", "", "decode lost: {{outcome}}"),
                rate("pageferry_returns_total", "role", "", "no room: {{role}}"),
            ),
            "reqps",
        ),
        Panel(
            "Objectives missed",
            (share("pageferry_slo_total", "profile, objective", 'result="missed"', 'profile=~"$profile"'),),
            "percentunit",
            text="Of requests with an objective. Profiles in effect: pageferry_profile_info.",
        ),
    ),
    "Workers": (
        Panel("By state", (now("pageferry_workers", "role, state"),), stacked=True),
        Panel("Refused, by what does not fit", (now("pageferry_workers_refused", "role, reason"),)),
        Panel("Sequences", (now("pageferry_sequences", "instance, state", HERE),)),
        Panel("Pages by state", ((PAGES, "{{state}} {{format}}"),), "bytes", stacked=True),
        Panel(
            "Pages in use",
            (share("pageferry_pages", "instance, pool", 'state=~"reserved|resident"', HERE, is_counter=False),),
            "percentunit",
        ),
        Panel("Saved by quantising", (now("pageferry_kv_saved_bytes", "instance", HERE),), "bytes"),
        Panel(
            "Prompt tokens found cached",
            (ratio("pageferry_tokens_total", "cached", "prompt", WORKERS),),
            "percentunit",
        ),
        Panel("Prompt tokens that wait", (now("pageferry_queued_prompt_tokens", "instance", HERE),)),
        Panel("Waiting for a first step", quantiles("pageferry_worker_queue_seconds", HERE, "job"), "s"),
        Panel("Preemptions", (rate("pageferry_preemptions_total", "instance", HERE),), "ops"),
    ),
    "Steps": (
        Panel("Duration", quantiles("pageferry_step_seconds", HERE, "job"), "s"),
        Panel("Sequences in a step", (mean("pageferry_step_sequences", "instance", HERE),)),
        Panel("Tokens in a step", (mean("pageferry_step_tokens", "instance", HERE),)),
        Panel("Drafts accepted", (ratio("pageferry_draft_tokens_total", "accepted", "proposed", HERE),), "percentunit"),
        Panel("Tokens that a step gives an answer", (mean("pageferry_tokens_per_step", "instance", HERE),)),
        Panel("Engine stalled", (now("pageferry_engine_stalled", "instance", HERE),)),
    ),
    "Hand-offs": (
        Panel("Bytes", (rate("pageferry_handoff_bytes_total", "direction, transport", HERE),), "Bps"),
        Panel("Pages", (rate("pageferry_handoff_pages_total", "direction, transport", HERE),), "ops"),
        Panel("Pages on their way", quantiles("pageferry_handoff_seconds", HERE, "transport"), "s"),
        Panel("End of prefill to commit", quantiles("pageferry_handoff_tail_seconds", HERE), "s"),
        Panel(
            "Stalled",
            (rate("pageferry_handoff_stalled_seconds_total", "instance, transport", HERE),),
            "percentunit",
            text="Seconds a second that senders wait for receivers.",
        ),
        Panel("Broken off, by reason", (rate("pageferry_handoff_failures_total", "direction, reason", HERE),), "ops"),
        Panel("Tickets", (now("pageferry_tickets", "instance", HERE),)),
    ),
    "Processes": (
        Panel("CPU", (rate("process_cpu_seconds_total", "job, instance", SERVICES),)),
        Panel("Memory", (now("process_resident_memory_bytes", "job, instance", SERVICES),), "bytes"),
        Panel("Open calls", (now("pageferry_open_calls", "job, instance", HERE),)),
        Panel("GPU memory", (now("pageferry_gpu_memory_bytes", "instance, kind", HERE),), "bytes"),
        Panel("GPU busy", (now("pageferry_gpu_utilisation_ratio", "instance", HERE),), "percentunit"),
        Panel("Spans lost", (rate("pageferry_spans_lost_total", "job, instance", HERE),), "ops"),
        Panel("Versions", (now("pageferry_build_info", "job, instance, version", HERE),), kind="table", width=12),
        Panel(
            "Models",
            (now("pageferry_model_info", "instance, role, model, device, page_format, fingerprint", HERE),),
            kind="table",
            width=12,
        ),
    ),
}


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    is_table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": called,
            "exemplar": "_bucket" in expression,
            **({"instant": True, "format": "table"} if is_table else {}),
        }
        for index, (expression, called) in enumerate(panel.targets)
    ]
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 0}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height if panel.kind != "stat" else 4},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom if panel.kind == "timeseries" else {}},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}} if panel.kind == "timeseries" else {},
        "targets": targets,
    }


def panels() -> Iterator[dict[str, Any]]:
    """All of them in their rows, from left to right and downwards."""
    number, y = 0, 0
    for title, row in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        y, x, height = y + 1, 0, 0
        for panel in row:
            number += 1
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            made = panel_json(panel, number, x, y)
            x, height = x + panel.width, max(height, made["gridPos"]["h"])
            yield made
        y += height


def variable(name: str, metric: str, label: str) -> dict[str, Any]:
    query = f"label_values({metric}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    return {
        "uid": "pageferry",
        "title": "Pageferry",
        "tags": ["pageferry"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                variable("instance", "pageferry_build_info", "instance"),
                variable("profile", "pageferry_queued_requests", "profile"),
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Restarts",
                    "datasource": SOURCE,
                    "enable": True,
                    "expr": 'changes(process_start_time_seconds{job=~"pageferry-.+"}[1m]) > 0',
                    "titleFormat": "{{job}} {{instance}} was started",
                }
            ]
        },
        "panels": list(panels()),
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
