"""Spans as trees: when a trace is whole, and its spans as plain objects."""

import json

import pytest
from fake_trace import example, of_service, span
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from pageferry.runtime import span_trees


def test_nothing_is_not_whole() -> None:
    assert not span_trees.is_whole(TracesData())


@pytest.mark.parametrize("lost", [*range(1, 12), None])
def test_a_trace_is_whole_when_every_call_has_both_ends(lost: int | None) -> None:
    data = example()
    for resource in data.resource_spans:
        spans = resource.scope_spans[0].spans
        for index, candidate in enumerate(spans):
            if lost is not None and candidate.span_id == lost.to_bytes(8):
                del spans[index]
                break
    is_leaf = lost in (2, 6, 9, 11)  # spans of which nothing else tells
    assert span_trees.is_whole(data) == (lost is None or is_leaf)


def test_steps_beside_it_make_no_trace_less_whole() -> None:
    data = example()
    data.resource_spans[0].scope_spans[0].spans.append(span((77, 0), "decode.step", "", (-1, 2)))
    assert span_trees.is_whole(data)
    assert [entry["name"] for entry in span_trees.as_json(data)][:2] == ["decode.step", "pageferry.request"]


@pytest.mark.parametrize("has_request", [True, False])
def test_a_trace_that_begins_with_a_pick_is_whole_with_its_request(has_request: bool) -> None:
    data = example() if has_request else TracesData()
    data.resource_spans.append(of_service("pageferry-router", span((50, 0), "pageferry.pick", "server", (-2, 0))))
    for resource in data.resource_spans:
        for candidate in resource.scope_spans[0].spans:
            if candidate.name == "pageferry.request":
                candidate.parent_span_id = (50).to_bytes(8)
    assert span_trees.is_whole(data) == has_request


def test_json_has_the_same_order() -> None:
    spans = span_trees.as_json(example())
    assert [entry["name"] for entry in spans[:3]] == ["pageferry.request", "queue", "route"]
    assert spans[0]["parent_span_id"] == "" and spans[1]["parent_span_id"] == spans[0]["span_id"]
    chunk = next(entry for entry in spans if entry["name"] == "prefill.chunk")
    assert chunk["duration_ms"] == 48 and chunk["attributes"]["pageferry.chunk.tokens"] == 37


def test_strangers_spans_are_shown_whatever_they_are() -> None:
    chain = [span((number, number - 1), "deep", "", (0, 1)) for number in range(1, 2001)]
    spans = span_trees.as_json(TracesData(resource_spans=[of_service("x", *chain)]))
    assert [entry["depth"] for entry in spans] == list(range(2000))
    odd = span((1, 0), "odd", "", (5, 1), none=float("nan"), much=[float("-inf"), 1.5])
    odd.kind = 77  # type: ignore[assignment]  # enums are open
    (entry,) = span_trees.as_json(TracesData(resource_spans=[of_service("x", odd)]))
    json.dumps(entry, allow_nan=False)
    assert entry["attributes"] == {"none": "nan", "much": ["-inf", "1.5"]}
    cycle = [span((1, 2), "a", "", (0, 1)), span((2, 1), "b", "", (0, 1)), span((3, 3), "c", "", (0, 1))]
    assert span_trees.as_json(TracesData(resource_spans=[of_service("x", *cycle)])) == []


def test_lists_in_lists_are_left_out() -> None:
    """Quoted within each other they would hold the process up for as long as a stranger likes."""
    nested: list[object] = []
    for _ in range(20):
        nested = [nested]
    odd = span((1, 0), "odd", "", (0, 1), nested=[nested, "plain", 2], plain=[True, 0.5])
    (entry,) = span_trees.as_json(TracesData(resource_spans=[of_service("x", odd)]))
    assert entry["attributes"] == {"nested": ["", "plain", "2"], "plain": ["True", "0.5"]}
