"""A trace's spans as trees, in the order that shows them one below the other."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status, TracesData

from pageferry.runtime.trace_store import REQUEST_SPAN, STEP_SPANS

Value = str | float | bool | list[str]
_KINDS: dict[int, str] = {Span.SPAN_KIND_CLIENT: "client", Span.SPAN_KIND_SERVER: "server"}


@dataclass(slots=True)
class Node:
    """A span with those that it is the parent of, earliest first."""

    name: str
    service: str
    kind: str  # "client", "server", or empty
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    error: str  # empty where the span is fine
    attributes: dict[str, Value]
    children: list["Node"] = field(default_factory=list)

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Node"]]:
        """The node and all below it, each with its depth, in the order of the waterfall."""
        ahead = [(depth, self)]  # no recursion: whoever sends spans decides how deep they are
        while ahead:
            depth, node = ahead.pop()
            yield depth, node
            ahead.extend((depth + 1, child) for child in reversed(node.children))


def trees(data: TracesData) -> list[Node]:
    """The spans as trees; a span whose parent is not in the trace is a root."""
    nodes = [node for resource in data.resource_spans for node in _nodes(resource)]
    nodes.sort(key=lambda node: (node.start_ns, node.end_ns))
    by_id = {node.span_id: node for node in nodes}
    roots: list[Node] = []
    for node in nodes:
        parent = by_id.get(node.parent_id)
        (parent.children if parent is not None else roots).append(node)
    return roots


def is_whole(data: TracesData) -> bool:
    """Whether the request's span is there, every parent is, and the other end of every call.

    Above the request may be the span of who picked its worker, in a router that keeps both.
    """
    roots = [root for root in trees(data) if root.name not in STEP_SPANS]
    if len(roots) != 1:
        return False
    nodes = [node for _, node in roots[0].walk()]
    calls = [node for node in nodes if node.kind == "client"]
    has_request = any(node.name == REQUEST_SPAN for node in nodes)
    return has_request and all(any(child.kind == "server" for child in call.children) for call in calls)


def as_json(data: TracesData) -> list[dict[str, object]]:
    """The spans as plain objects, in the order of the waterfall."""
    return [
        {
            "name": node.name,
            "service": node.service,
            "kind": node.kind or "internal",
            "span_id": node.span_id,
            "parent_span_id": node.parent_id,
            "depth": depth,
            "start_unix_ns": node.start_ns,
            "duration_ms": node.duration_ms,
            "error": node.error,
            "attributes": node.attributes,
        }
        for root in trees(data)
        for depth, node in root.walk()
    ]


def _nodes(resource: ResourceSpans) -> Iterator[Node]:
    service = _attributes(resource.resource.attributes).get("service.name", "")
    for scope in resource.scope_spans:
        for span in scope.spans:
            failed = span.status.code == Status.STATUS_CODE_ERROR
            yield Node(
                name=span.name,
                service=str(service).removeprefix("pageferry-"),
                kind=_KINDS.get(span.kind, ""),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                error=(span.status.message or "error") if failed else "",
                attributes=_attributes(span.attributes),
            )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    if value.HasField("array_value"):  # of plain values: lists in lists, quoted, would double with each level
        return [str(_plain(item)) for item in value.array_value.values]
    return _plain(value)


def _plain(value: AnyValue) -> str | float | bool:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value if math.isfinite(value.double_value) else str(value.double_value)  # JSON has none
        case "bool_value":
            return value.bool_value
        case _:
            return ""
