"""Urgent work takes a slot from lesser work, which goes on later as if nothing had been; equals wait for each other."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from answer import Answer
from cluster import Cluster, connected, generate, greedy, running, wait_idle

from pageferry.v1 import inference_pb2 as pb

SLOTS = 4
SETTINGS = {"scheduler.max_num_seqs": str(SLOTS), "engine.num_pages": "1024", "router.local_prefill_tokens": "0"}
PATIENCE_S = 120


@pytest.fixture(scope="module", params=[1, 0], ids=["handed over", "computed by the decode worker"])
def cluster(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Cluster]:
    options = ("--prefill", str(request.param), "--decode", "1", "--model", str(tiny_model))
    with running(*options, settings=SETTINGS) as started:
        yield started


def work(number: int, max_tokens: int, priority: int) -> pb.GenerateRequest:
    request = greedy([4 + (index * 37 + 11 * number) % 250 for index in range(40)], max_tokens)
    request.priority = priority
    return request


async def preemptions(stub: object) -> int:
    status = await wait_idle(stub, PATIENCE_S)
    return sum(worker.load.preemptions for worker in status.workers)


@pytest.mark.slow
@pytest.mark.field("vllm-project/vllm#45561", "vllm-project/vllm#40004", "vllm-project/vllm#54530")
async def test_an_urgent_request_runs_at_once_and_its_victim_answers_as_undisturbed(cluster: Cluster) -> None:
    async with connected(cluster) as stub:
        requests = [work(number, 2000, priority=5) for number in range(SLOTS)]
        expected = [await generate(stub, request, timeout_s=PATIENCE_S) for request in requests]
        before = await preemptions(stub)
        answers = [Answer() for _ in requests]
        started = [asyncio.Event() for _ in requests]

        async def stream(index: int) -> None:
            async for response in stub.Generate(requests[index], timeout=PATIENCE_S):
                answers[index].take(response)
                if len(answers[index].token_ids) > 50:  # it runs on the decode worker
                    started[index].set()

        streams = [asyncio.create_task(stream(index)) for index in range(SLOTS)]
        await asyncio.gather(*(event.wait() for event in started))
        urgent = await generate(stub, work(9, 5, priority=0), timeout_s=PATIENCE_S)
        assert len(urgent.token_ids) == 5
        assert not any(task.done() for task in streams), "the urgent one waited for a slot"
        await asyncio.gather(*streams)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert all(answer.positions == list(range(2000)) for answer in answers)
        assert await preemptions(stub) - before == 1


@pytest.mark.field("vllm-project/vllm#45561", "vllm-project/vllm#40004", "vllm-project/vllm#54530")
async def test_equals_never_take_each_others_slots(cluster: Cluster) -> None:
    async with connected(cluster) as stub:
        before = await preemptions(stub)
        requests = [work(20 + number, 200, priority=5) for number in range(SLOTS + 2)]
        answers = await asyncio.gather(*(generate(stub, request, timeout_s=PATIENCE_S) for request in requests))
        assert all(len(answer.token_ids) == 200 for answer in answers)
        assert await preemptions(stub) == before


@pytest.mark.field("sgl-project/sglang#32549", "ROCm/ATOM#1835", "sgl-project/sglang#34623")
async def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it(cluster: Cluster) -> None:
    ended: list[str] = []
    async with connected(cluster) as stub:

        async def ask(name: str, prompt: list[int]) -> None:
            await generate(stub, greedy(prompt, 2), timeout_s=PATIENCE_S)
            ended.append(name)

        longs = [[4 + (index * 31 + 17 * number) % 250 for index in range(4000)] for number in range(8)]
        asked = [asyncio.create_task(ask(f"long-{number}", prompt)) for number, prompt in enumerate(longs)]
        while (await stub.GetStatus(pb.GetStatusRequest())).running == 0:  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.005)
        num_before = len(ended)
        await ask("short", [9] * 64)
        await asyncio.gather(*asked)
        await wait_idle(stub, PATIENCE_S)
    assert ended.index("short") - num_before <= 3, ended
