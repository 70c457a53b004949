"""A repetitive answer through router and decode workers: drafts are accepted, and its trace says so."""

from cluster import Cluster, connected, generate, greedy
from traces import SPLIT_SPANS, one, wait_trace


async def test_drafts_are_on_the_trace_and_usage_counts_tokens(split: Cluster) -> None:
    """The tiny model soon repeats itself; so many tokens leave time to find that out where steps cost more at first."""
    async with connected(split) as stub:
        answer = await generate(stub, greedy([11, 12, 13, 14, 15] * 8, 1000))
        assert answer.started is not None
        spans = await wait_trace(stub, answer.started.trace_id, SPLIT_SPANS)
    assert len(answer.token_ids) == answer.usage.completion_tokens == 1000
    attributes = one(spans, "decode.generate").attributes
    drafted, accepted = int(attributes["pageferry.drafted"]), int(attributes["pageferry.accepted"])
    assert 0 < accepted <= drafted
    # The first token is the prefill worker's, and each step gives one and those accepted.
    assert int(attributes["pageferry.steps"]) + accepted == 999
