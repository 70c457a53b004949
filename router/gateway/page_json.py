"""What the page is told, as JSON: docs/page.md is about each field.

Requests and points never change, so that their text is made once, whoever asks how often: it would hold up streams.
"""

from collections.abc import Iterable
from dataclasses import fields
from functools import lru_cache

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from pageferry.router.gateway.strict_json import Json, dump
from pageferry.router.record import INTERVAL_S, KEPT_POINTS, KEPT_REQUESTS, Past, Point, Record
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


def status_text(about: Json, status: pb.GetStatusResponse, record: Record, after: float) -> bytes:
    """What `about` says, workers as they are, and points of the last minutes that ended after a time."""
    told: Json = {
        **about,
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
    }
    history = _with_list({"interval_s": INTERVAL_S, "columns": _POINT}, "points", map(_point, record.points(after)))
    return b'%b,"history":%b}' % (dump(told)[:-1], history)


def requests_text(record: Record, after: int, limit: int) -> bytes:
    told: Json = {"started": record.started, "num_requests": record.num_requests}
    return _with_list(told, "requests", map(_past, record.requests(after, limit)))


def trace_json(response: pb.GetTraceResponse) -> Json:
    data = TracesData.FromString(response.traces_data)
    return {"trace_id": response.trace_id, "is_whole": is_whole(data), "spans": as_json(data)}


def _with_list(told: Json, name: str, items: Iterable[bytes]) -> bytes:
    """The object as text with one more field, of items that are text already."""
    return b'%b,"%b":[%b]}' % (dump(told)[:-1], name.encode(), b",".join(items))


@lru_cache(2 * KEPT_REQUESTS)  # whoever asks for all of as many as there is room for would find none of them
def _past(past: Past) -> bytes:
    return dump(dict(zip(_PAST, _values(past, _PAST), strict=True)))


@lru_cache(2 * KEPT_POINTS)
def _point(point: Point) -> bytes:
    return dump(_values(point, _POINT))


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
