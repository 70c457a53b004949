"""A request's trace as the router keeps it where there is no collector; test_trace_tree.py has what all must be."""

import asyncio
from collections import Counter

import pytest
from cluster import POLL_S, Cluster, connected, generate, greedy, wait_idle
from traces import DECODE_RPC, PREFILL_RPC, SPLIT_SPANS, counts, one, orphans, parent, roots, wait_trace


def in_chunks(number: int) -> Counter[tuple[str, str]]:
    """The spans of a request whose prompt was computed so."""
    return SPLIT_SPANS + Counter({("prefill.chunk", "INTERNAL"): number - 1})


async def test_a_split_request_has_all_spans_in_one_tree(split: Cluster) -> None:
    async with connected(split) as stub:
        answer = await generate(stub, greedy([9 + (index * 13) % 200 for index in range(100)], 10))
        assert answer.started is not None
        spans = await wait_trace(stub, answer.started.trace_id, in_chunks(2))
    assert counts(spans) == in_chunks(2)  # 100 tokens in chunks of 64
    assert orphans(spans) == []
    assert [span.name for span in roots(spans)] == ["pageferry.request"]
    assert len({span.service for span in spans}) == 3

    request = one(spans, "pageferry.request", "SERVER")
    assert request.attributes["pageferry.profile.in_effect"] == "interactive"
    for name in ("pageferry.request", "prefill.queue", "decode.queue", "decode.generate"):
        (span,) = (span for span in spans if span.name == name)
        assert span.attributes["pageferry.profile"] == "interactive"

    def parents(name: str, kind: str = "INTERNAL") -> tuple[str, str]:
        above = parent(spans, one(spans, name, kind))
        return above.name, above.kind

    assert parents(PREFILL_RPC, "SERVER") == (PREFILL_RPC, "CLIENT")
    assert parents(DECODE_RPC, "SERVER") == (DECODE_RPC, "CLIENT")
    assert parents("kv.push", "CLIENT") == (PREFILL_RPC, "SERVER")
    assert parents("kv.push", "SERVER") == ("kv.push", "CLIENT")
    assert parents("decode.generate") == (DECODE_RPC, "SERVER")


async def test_the_push_reports_bytes_pages_and_what_was_hidden(split: Cluster) -> None:
    async with connected(split) as stub:
        answer = await generate(stub, greedy([3 + (index * 7) % 111 for index in range(200)], 4))
        assert answer.started is not None
        assert answer.finished is not None
        spans = await wait_trace(stub, answer.started.trace_id, in_chunks(4))
    assert counts(spans) == in_chunks(4)
    pages = answer.finished.pages
    for kind in ("CLIENT", "SERVER"):
        attributes = one(spans, "kv.push", kind).attributes
        assert attributes["pageferry.handoff.pages"] == pages.shipped
        assert attributes["pageferry.handoff.bytes"] == pages.bytes
    hidden = one(spans, "kv.push", "CLIENT").attributes["pageferry.handoff.hidden"]
    assert isinstance(hidden, float)
    assert 0 <= hidden <= 1


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_call_that_is_left_ends_every_span_once(split: Cluster, num_tokens: int) -> None:
    async with connected(split) as stub:
        call = stub.Generate(greedy([11 + (index * 17) % 210 for index in range(100)], 3000), timeout=60)
        trace_id, num_seen = "", 0
        while not trace_id or num_seen < num_tokens:
            response = await call.read()
            trace_id = response.started.trace_id or trace_id
            num_seen += len(response.delta.tokens)
        call.cancel()
        wanted = Counter({("pageferry.request", "SERVER"): 1})
        if num_tokens:  # else the calls may have been cancelled before they were sent
            wanted += SPLIT_SPANS - wanted
        spans = await wait_trace(stub, trace_id, wanted)
        async with asyncio.timeout(60):
            while orphans(spans):  # whose parents a worker has yet to send
                await asyncio.sleep(POLL_S)
                spans = await wait_trace(stub, trace_id, wanted)
        await wait_idle(stub)
    ends = {(span.name, span.kind): span.attributes.get("rpc.response.status_code") for span in spans}
    assert ends["pageferry.request", "SERVER"] == "CANCELLED"
    assert {end for (name, _), end in ends.items() if name == DECODE_RPC} <= {"CANCELLED"}
    assert len({span.span_id for span in spans}) == len(spans)
