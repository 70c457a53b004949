"""What the page is told, as plain objects: docs/page.md is about each field."""

from dataclasses import fields

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from pageferry.router.gateway.strict_json import Json
from pageferry.router.record import INTERVAL_S, Past, Point, Record
from pageferry.runtime.convert import format_from_proto, groups_from_proto
from pageferry.runtime.span_trees import as_json, is_whole
from pageferry.v1 import inference_pb2 as pb

_STATES = ("total", "free", "cached", "reserved", "resident")
_COUNTS = (
    "running",
    "waiting",
    "tickets",
    "queued_prompt_tokens",
    "prefill_tokens_per_s",
    "step_s",
    "preemptions",
    "generated_tokens",
    "prefill_tokens",
    "handoffs",
    "handoff_pages",
    "handoff_bytes",
    "handoff_failures",
)
_PAST, _POINT = ([field.name for field in fields(kind)] for kind in (Past, Point))


def router_json(status: pb.GetStatusResponse, record: Record, after: float) -> Json:
    """Workers as they are, and points of the last minutes that ended after a time."""
    return {
        "started": record.started,
        "queued": status.queued,
        "running": status.running,
        "num_requests": record.num_requests,
        "workers": [_worker(worker) for worker in status.workers],
        "transfers": [
            {
                "prefill": prefill,
                "decode": decode,
                "handoffs": sums.handoffs,
                "pages": sums.pages,
                "bytes": sums.num_bytes,
            }
            for (prefill, decode), sums in record.transfers.items()
        ],
        "profiles": [
            {"name": one.name, "in_effect": one.in_effect, "queued": one.queued, "running": one.running}
            for one in status.profiles
        ],
        "history": {
            "interval_s": INTERVAL_S,
            "columns": _POINT,
            "points": [_values(point, _POINT) for point in record.points(after)],
        },
    }


def requests_json(record: Record, after: int, limit: int) -> Json:
    return {
        "started": record.started,
        "num_requests": record.num_requests,
        "requests": [_past(past) for past in record.requests(after, limit)],
    }


def trace_json(response: pb.GetTraceResponse) -> Json:
    data = TracesData.FromString(response.traces_data)
    return {"trace_id": response.trace_id, "is_whole": is_whole(data), "spans": as_json(data)}


def _past(past: Past) -> Json:
    return dict(zip(_PAST, _values(past, _PAST), strict=True))


def _worker(worker: pb.WorkerStatus) -> Json:
    load = worker.load
    entry: Json = {
        "role": worker.role,
        "address": worker.address,
        "state": worker.state,
        "reason": worker.reason,
        **{name: _short(getattr(load, name)) for name in _COUNTS},
        "pages": _pages(load),
        "page_format": "",
        "page_size": worker.layout.page_size,
        "pools": [],
    }
    groups = []
    if worker.HasField("layout"):
        entry["page_format"] = str(format_from_proto(worker.layout))
        groups = [str(group) for group in groups_from_proto(worker.layout)]
    entry["pools"] = [_pool(pool, groups) for pool in load.pools]
    return entry


def _pool(pool: pb.PoolLoad, groups: list[str]) -> Json:
    layers = groups[pool.group] if pool.HasField("group") and pool.group < len(groups) else "tails"
    return {"layers": layers, **_pages(pool), "promised": pool.pages_promised}


def _pages(load: pb.WorkerLoad | pb.PoolLoad) -> Json:
    return {state: getattr(load, f"pages_{state}") for state in _STATES}


def _values(of: object, names: list[str]) -> list[object]:
    return [_short(getattr(of, name)) for name in names]


def _short(value: object) -> object:
    """Without digits that nobody reads: they would be half of the text."""
    return (round(value, 3) if value > 1e6 else float(f"{value:.4g}")) if isinstance(value, float) else value
