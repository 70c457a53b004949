"""Cancels and deadlines at any moment give everything back."""

import asyncio
import contextlib
import random
from pathlib import Path

import grpc
import httpx
import pytest
from cluster import Cluster, Stub, connected, generate, greedy, running, wait_idle

ENDLESS = 3500  # tokens


async def cancel_after(stub: Stub, num_events: int, prompt: list[int]) -> int:
    """Read some events of a stream that would go on for long, then cancel it; the number read."""
    call = stub.Generate(greedy(prompt, ENDLESS), timeout=60)
    num_read = 0
    try:
        async for _ in call:
            num_read += 1
            if num_read >= num_events:
                break
    finally:
        call.cancel()
    return num_read


async def test_a_hundred_random_cancels_leave_nothing(split: Cluster) -> None:
    draws = random.Random(20)
    async with connected(split) as stub:
        await wait_idle(stub)
        await asyncio.gather(
            *(
                cancel_after(
                    stub, draws.randrange(1, 30), [draws.randrange(4, 300) for _ in range(draws.choice((9, 40, 200)))]
                )
                for _ in range(100)
            )
        )
        await wait_idle(stub)
        assert len((await generate(stub, greedy("It still works", 4))).token_ids) == 4


async def test_cancels_before_the_first_event_leave_nothing(split: Cluster) -> None:
    draws = random.Random(21)
    async with connected(split) as stub:
        calls = [stub.Generate(greedy([draws.randrange(4, 300) for _ in range(500)], 2000)) for _ in range(30)]
        for call in calls:
            await asyncio.sleep(draws.random() * 0.01)
            call.cancel()
        for call in calls:
            with contextlib.suppress(asyncio.CancelledError):
                await call.code()
        await wait_idle(stub)


async def leave_http_after(split: Cluster, num_chunks: int, prompt: list[int]) -> int:
    """As `cancel_after`, over HTTP."""
    body = {"prompt": prompt, "max_tokens": ENDLESS, "temperature": 0, "ignore_eos": True, "stream": True}
    num_read = 0
    async with (
        httpx.AsyncClient(base_url=split.http, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            num_read += line.startswith("data: ")
            if num_read >= num_chunks:
                break
    return num_read


@pytest.mark.field("sgl-project/sglang#36333", "sgl-project/sglang#37833", "ggml-org/llama.cpp#24496")
@pytest.mark.parametrize("over_http", [False, True])
async def test_decoding_ends_with_the_client(split: Cluster, over_http: bool) -> None:
    def generated(status: object) -> int:
        return sum(worker.load.generated_tokens for worker in status.workers)  # type: ignore[attr-defined]

    async with connected(split) as stub:
        before = generated(await wait_idle(stub))
        prompt = [7 + over_http] * 32
        num_read = await (leave_http_after(split, 4, prompt) if over_http else cancel_after(stub, 4, prompt))
        after = generated(await wait_idle(stub))
    assert num_read == 4
    assert after - before < ENDLESS, "it went on to its end"


@pytest.mark.field("Avarok-Cybersecurity/atlas#482", "tensorflow/serving#1265")
async def test_a_deadline_in_the_queue_starts_no_prefill(tiny_model: Path) -> None:
    settings = {"scheduler.max_num_seqs": "1", "router.local_prefill_tokens": "0"}
    with running("--prefill", "1", "--decode", "1", "--model", str(tiny_model), settings=settings) as cluster:
        async with connected(cluster) as stub:
            holder = stub.Generate(greedy([11] * 40, ENDLESS), timeout=60)
            seen = 0
            async for _ in holder:
                seen += 1
                if seen == 3:
                    break
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, greedy([12] * 40, 4), timeout_s=0.5)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            holder.cancel()
            status = await wait_idle(stub)
        prefilled = sum(worker.load.prefill_tokens for worker in status.workers if worker.role == "prefill")
        assert prefilled == 40
