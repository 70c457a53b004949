"""Workers that die without a word."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cluster import LONG_LEASES, Cluster, Stub, connected, generate, greedy, running, wait_idle

NUM_CLIENTS = 12


@pytest.fixture
def cluster(tiny_model: Path) -> Iterator[Cluster]:
    settings = {"router.local_prefill_tokens": "0", "scheduler.chunk_tokens": "32", "engine.num_pages": "1024"}
    settings |= LONG_LEASES
    with running("--prefill", "1", "--decode", "1", "--model", str(tiny_model), settings=settings) as cluster:
        yield cluster


async def outcome(stub: Stub, prompt: list[int]) -> str:
    """OK, or the name of the status."""
    try:
        answer = await generate(stub, greedy(prompt, 32))
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    assert len(answer.token_ids) == 32
    return "OK"


async def ask_on_and_on(stub: Stub, client: int, stop: asyncio.Event, ended: list[str]) -> None:
    """One request after the other until told to stop; adds how each ended."""
    for number in range(10_000):
        if stop.is_set():
            break
        prompt = [4 + (client * 31 + number * 17 + index * 7) % 290 for index in range(160)]
        ended.append(await outcome(stub, prompt))


async def kill_under_load(cluster: Cluster, module: str) -> list[str]:
    """Kill the only worker of a kind amid requests; how these ended."""
    stop, ended = asyncio.Event(), list[str]()
    async with connected(cluster) as stub:
        await outcome(stub, [5] * 20)
        before = set(cluster.pids(module))
        (victim,) = before
        clients = [asyncio.create_task(ask_on_and_on(stub, client, stop, ended)) for client in range(NUM_CLIENTS)]
        while len(ended) < NUM_CLIENTS:  # noqa: ASYNC110 - what other processes do
            await asyncio.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        stop.set()
        await asyncio.gather(*clients)
        return ended


async def works_again(cluster: Cluster, timeout_s: float = 100) -> None:
    """Until a request succeeds, which a restarted worker must let it; then everything is at rest."""
    async with connected(cluster) as stub:
        end = time.monotonic() + timeout_s
        while await outcome(stub, [6] * 100) != "OK":
            assert time.monotonic() < end, cluster.output[-4000:]
            await asyncio.sleep(0.2)
        await wait_idle(stub, timeout_s=timeout_s)


@pytest.mark.field("vllm-project/aibrix#2289")
@pytest.mark.parametrize("module", ["prefill_svc", "decode_svc"])
async def test_a_kill_under_load_ends_requests_and_a_restart_serves_again(cluster: Cluster, module: str) -> None:
    before = cluster.pids(module)
    outcomes = await kill_under_load(cluster, module)
    assert set(outcomes) <= {"OK", "UNAVAILABLE"}
    assert "OK" in outcomes
    await works_again(cluster)
    after = cluster.pids(module)
    assert len(after) == 1
    assert after != before
