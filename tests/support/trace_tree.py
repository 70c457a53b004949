"""What must hold of every request's trace that comes to a collector."""

import pytest
from answer import Answer
from collectors import Collector
from traces import DECODE_RPC, PREFILL_RPC, Span, orphans, parent, roots

REQUEST = ("pageferry.request", "SERVER")
CHOICE = ("choice", "INTERNAL")
PREFILL, DECODE = (PREFILL_RPC, "SERVER"), (DECODE_RPC, "SERVER")
# Of each kind of span: the service that makes it, and what its parent is.
PLACES = {
    REQUEST: ("router", ()),
    CHOICE: ("router", (REQUEST,)),
    ("queue", "INTERNAL"): ("router", (REQUEST, CHOICE)),
    ("route", "INTERNAL"): ("router", (REQUEST, CHOICE)),
    (PREFILL_RPC, "CLIENT"): ("router", (REQUEST, CHOICE)),
    (DECODE_RPC, "CLIENT"): ("router", (REQUEST, CHOICE)),
    PREFILL: ("prefill", ((PREFILL_RPC, "CLIENT"),)),
    DECODE: ("decode", ((DECODE_RPC, "CLIENT"),)),
    ("prefill.queue", "INTERNAL"): ("prefill", (PREFILL,)),
    ("prefill.chunk", "INTERNAL"): ("", (PREFILL, DECODE)),
    ("kv.push", "CLIENT"): ("prefill", (PREFILL,)),
    ("kv.push", "SERVER"): ("decode", (("kv.push", "CLIENT"),)),
    ("decode.queue", "INTERNAL"): ("decode", (DECODE,)),
    ("decode.generate", "INTERNAL"): ("decode", (DECODE,)),
}
TTFT_PARTS = ("tokenize", "queue", "reserve", "prefill_queue", "prefill", "delivery")
SECOND_PARTS = ("transfer_tail", "decode_queue", "first_step", "delivery")


def whole_trace(collector: Collector, trace_id: str) -> list[Span]:
    """The spans of a trace, once its request's own is there, the parents of all, and both ends of each call.

    A call that was given up may never have got to its server.
    """
    return _of(collector.wait(lambda spans: _is_whole(_of(spans, trace_id))), trace_id)


def _of(spans: list[Span], trace_id: str) -> list[Span]:
    return [span for span in spans if span.trace_id == trace_id]


def _is_whole(spans: list[Span]) -> bool:
    request = next((span for span in spans if (span.name, span.kind) == REQUEST), None)
    if request is None or orphans(spans, remote_parent=request.parent_id):
        return False
    called = {span.parent_id for span in spans if span.kind == "SERVER"}
    calls = [span for span in spans if span.kind == "CLIENT" and "error.type" not in span.attributes]
    return all(call.span_id in called for call in calls)


def assert_tree(spans: list[Span], *, remote_parent: bytes = b"") -> Span:
    """One trace, each span once, below the right kind of parent and made by the right service; returns its root."""
    assert len({span.trace_id for span in spans}) == 1
    assert len({span.span_id for span in spans}) == len(spans), "a span came twice"
    (root,) = roots(spans, remote_parent=remote_parent)
    assert (root.name, root.kind) == REQUEST
    for span in spans:
        service, parents = PLACES[span.name, span.kind]
        assert service in span.service, f"{span.name} is of {span.service}"
        assert root.start_ns <= span.start_ns <= span.end_ns
        if span is not root:
            above = parent(spans, span)  # fails for an orphan
            assert (above.name, above.kind) in parents, f"{span.name} {span.kind} is below {above.name} {above.kind}"
    return root


def assert_sums(request: Span, answer: Answer) -> None:
    """Its parts are its time, to 1 %, and none but the second token's delivery is negative.

    A second token that came in one message with the first has no parts: a worker that could not send sooner sends both
    at once. The router may join what came one by one; what comes to the caller one by one came to the router so.
    """
    attributes = request.attributes
    assert request.seconds == pytest.approx(attributes["gen_ai.server.request.duration"], rel=0.01)
    ttft = [attributes[f"pageferry.ttft.{part}_ms"] for part in TTFT_PARTS]
    assert min(ttft) >= 0
    assert sum(ttft) == pytest.approx(attributes["gen_ai.server.time_to_first_token"] * 1000, rel=0.01)
    assert sum(ttft) <= request.seconds * 1000 * 1.01
    if answer.num_first == 1 < len(answer.token_ids) or "pageferry.second_token.gap_ms" in attributes:
        second = [attributes[f"pageferry.second_token.{part}_ms"] for part in SECOND_PARTS]
        assert min(second[:-1]) >= 0
        assert sum(second) == pytest.approx(attributes["pageferry.second_token.gap_ms"], rel=0.01, abs=1e-6)
