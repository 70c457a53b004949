"""A trace as a waterfall of text: one line a span, with its service, duration, bar and key attributes."""

import textwrap

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from pageferry.runtime.span_trees import Node, Value, trees
from pageferry.runtime.trace_store import REQUEST_SPAN

BAR_WIDTH = 32
_LEAST_BAR_WIDTH = 8
_WIDTH_BETWEEN = 15  # of the duration, and of the gaps between columns
_PACKAGE = "pageferry.v1."
# Attributes shown beside the bar, in this order, each with its name there; `--json` has them all.
_SHOWN = {
    "gen_ai.request.model": "model",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
    "gen_ai.server.time_to_first_token": "ttft",
    "gen_ai.server.time_per_output_token": "per_token",
    "gen_ai.response.finish_reasons": "finish",
    "pageferry.choice": "choice",
    "pageferry.fallback": "fallback",
    "pageferry.reason": "reason",
    "pageferry.route.source": "source",
    "pageferry.route.reason": "reason",
    "pageferry.route.alternative": "alternative",
    "pageferry.route.alternative_ttft_ms": "alternative_ttft",
    "pageferry.chunk.start": "start",
    "pageferry.chunk.tokens": "tokens",
    "pageferry.handoff.format": "format",
    "pageferry.handoff.pages": "pages",
    "pageferry.handoff.bytes": "bytes",
    "pageferry.handoff.transport": "transport",
    "pageferry.handoff.hidden": "hidden",
    "pageferry.handoff.tail_ms": "transfer_tail",
    "pageferry.steps": "steps",
    "pageferry.preemptions": "preemptions",
    "pageferry.first_step_ms": "first_step",
    "pageferry.step.sequences": "sequences",
    "pageferry.step.tokens": "tokens",
    "pageferry.step.pages_used": "pages_used",
    "pageferry.device": "device",
    "pageferry.device_ms": "device_time",
    "pageferry.first_step_device_ms": "first_step_device_time",
}
_SECONDS = ("time_to_first_token", "time_per_output_token")


def render(data: TracesData, *, max_width: int | None = None) -> list[str]:
    """The waterfall's lines. Bars share one time axis; where hosts' clocks differ they may stand apart.

    In `max_width` columns bars are shorter, and attributes that don't fit beside them stand below.
    """
    rows = [row for root in trees(data) for row in root.walk()]
    if not rows:
        return ["the trace has no spans"]
    start = min(node.start_ns for _, node in rows)
    total = max(max(node.end_ns for _, node in rows) - start, 1)
    names = ["  " * depth + _title(node) for depth, node in rows]
    name_width = max(map(len, names))
    service_width = max(len(node.service) for _, node in rows)
    room = BAR_WIDTH if max_width is None else max_width - name_width - service_width - _WIDTH_BETWEEN
    bar_width = min(BAR_WIDTH, max(_LEAST_BAR_WIDTH, room))
    lines = [f"{len(rows)} {'span' if len(rows) == 1 else 'spans'}, {_duration(total / 1e6)}"]
    for name, (depth, node) in zip(names, rows, strict=True):
        bar = _bar((node.start_ns - start) / total, (node.end_ns - start) / total, bar_width)
        cells = f"{name:<{name_width}}  {node.service:<{service_width}}  {_duration(node.duration_ms):>9}  {bar}"
        lines += map(_printable, _row(cells, _notes(node), "  " * (depth + 1), max_width))
    return lines


def bytes_text(num_bytes: float) -> str:
    """E.g. `414 kB`; powers of ten."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _title(node: Node) -> str:
    name = node.name.removeprefix(_PACKAGE)
    return f"{name} ({node.kind})" if node.kind and node.parent_id and name != REQUEST_SPAN else name


def _row(cells: str, notes: str, indent: str, max_width: int | None) -> list[str]:
    line = f"{cells}  {notes}".rstrip()
    if max_width is None or len(line) <= max_width:
        return [line]
    if len(cells) > max_width:
        cells = cells[: max_width - 1] + "…"
    below = textwrap.wrap(notes, max_width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [cells, *below]


def _printable(line: str) -> str:
    """What a terminal would obey is not shown to it: anybody may have sent a span."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def _bar(start: float, end: float, width: int) -> str:
    first = min(int(start * width), width - 1)
    length = max(1, round(end * width) - first)
    return ("·" * first + "█" * length).ljust(width, "·")[:width]


def _notes(node: Node) -> str:
    attributes = node.attributes
    notes = [f"{label}={_text(key, attributes[key])}" for key, label in _SHOWN.items() if key in attributes]
    return " ".join([f"error: {node.error}", *notes] if node.error else notes)


def _text(key: str, value: Value) -> str:
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, bool | str):
        text = str(value)
        return f'"{text}"' if " " in text else text
    if key.endswith((*_SECONDS, "_ms")):
        return _duration(value * 1000 if key.endswith(_SECONDS) else value).replace(" ", "")
    if key.endswith("bytes"):
        return bytes_text(value).replace(" ", "")
    if key.endswith("hidden"):
        return f"{value:.0%}"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _duration(milliseconds: float) -> str:
    if milliseconds >= 10_000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"
