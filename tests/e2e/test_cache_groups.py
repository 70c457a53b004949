"""Windows with sinks beside full layers, and scales per channel with their tails, through three processes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, connected, generate, greedy, running, wait_idle
from traces import SPLIT_SPANS, one, wait_trace

from pageferry.core.groups import parse_groups
from pageferry.runtime.convert import layout_from_proto
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FINISH_REASON_LENGTH

PAGES = "k=int8:channel,v=int4:asym"
LAYERS = "0,2=window:37,sinks:4;1,3=full"
SETTINGS = {"router.local_prefill_tokens": "0", "scheduler.chunk_tokens": "64", "engine.num_pages": "256"}


@pytest.fixture(scope="module")
def grouped(tiny_model: Path) -> Iterator[Cluster]:
    options = ("--model", str(tiny_model), "--pages", PAGES, "--cache-layers", LAYERS)
    with running("--prefill", "1", "--decode", "1", *options, settings=SETTINGS) as cluster:
        yield cluster


def prompt(num_tokens: int, variant: int = 0) -> list[int]:
    return [4 + (index * 29 + variant) % 300 for index in range(num_tokens)]


async def test_the_push_carries_what_is_live_and_says_so(grouped: Cluster) -> None:
    async with connected(grouped) as stub:
        answer = await generate(stub, greedy(prompt(200), 40))
        assert answer.started is not None and answer.finished is not None
        spans = await wait_trace(stub, answer.started.trace_id, SPLIT_SPANS)
        status = await wait_idle(stub)
    # 13 pages of the full group. Computing 192 and on, the window of 37 reads from 156 on, in page 9; and the sinks'.
    assert answer.finished.pages.shipped == 13 + 4 + 1
    assert answer.finished.pages.page_format == PAGES
    for kind in ("CLIENT", "SERVER"):
        attributes = one(spans, "kv.push", kind).attributes
        assert attributes["pageferry.handoff.pages"] == 18
        assert attributes["pageferry.handoff.bytes"] == answer.finished.pages.bytes
        assert attributes["pageferry.handoff.format"] == PAGES
        assert attributes["pageferry.handoff.groups"] == LAYERS
    for worker in status.workers:
        layout = layout_from_proto(worker.layout)
        assert (str(layout.format), layout.groups) == (PAGES, parse_groups(LAYERS, 4, None))
        pools = worker.load.pools
        assert [pool.group if pool.HasField("group") else None for pool in pools] == [0, 1, None]
        assert pools[1].pages_total == 256
        assert sum(pool.pages_total for pool in pools) == worker.load.pages_total


async def test_the_context_s_end_is_the_answer_s_and_nothing_is_shifted(grouped: Cluster) -> None:
    """Quantised keys are turned to their positions once: no token can move to another."""
    async with connected(grouped) as stub:
        limit = (await stub.ListModels(pb.ListModelsRequest())).models[0].max_model_tokens
        unlimited = greedy(prompt(limit - 20), 1)
        unlimited.stop.ClearField("max_tokens")
        answer = await generate(stub, unlimited)
        assert answer.finished is not None
        assert answer.finished.reason == FINISH_REASON_LENGTH
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == limit
        with pytest.raises(grpc.aio.AioRpcError, match=rf"max_tokens is 21, together {limit + 1}; the model takes"):
            await generate(stub, greedy(prompt(limit - 20), 21))
        await wait_idle(stub)


async def test_requests_that_share_end_or_are_left_give_every_page_and_tail_back(grouped: Cluster) -> None:
    async def leave(variant: int, num_messages: int) -> None:
        call = stub.Generate(greedy(prompt(150, variant), 2000), timeout=60)
        for _ in range(num_messages):
            await call.read()
        call.cancel()

    async with connected(grouped) as stub:
        first = await generate(stub, greedy(prompt(100, 7), 20))
        shared = [generate(stub, greedy(prompt(100, 7) + [5 + index] * 30, 30)) for index in range(4)]
        left = [leave(index, index) for index in range(8)]
        answers = await asyncio.gather(*shared, *left)
        assert first.usage.cached_tokens == 0
        assert [answer.usage.cached_tokens for answer in answers[:4] if answer is not None] == [96] * 4
        await wait_idle(stub)
