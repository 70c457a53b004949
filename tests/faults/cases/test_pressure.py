"""More than there is room for: nothing that was let in is lost, and what is not let in is told when to come back."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from cluster import Stub, greedy
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status.rpc_status import from_call
from moments import SOON_S
from pushes import hold
from services import Deployment
from streams import Golden, Stream, prompt_of

SMALL = {
    "engine.num_pages": "40",
    "scheduler.max_num_seqs": "4",
    "scheduler.max_waiting": "2",
    "router.max_queue": "16",
}


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Deployment]:
    """Workers that hold two or three requests of those here, and a router that lets few wait."""
    with Deployment(prefill=1, decode=1, settings=SMALL, model=tiny_model, linked=True) as deployment:
        yield deployment


@pytest.fixture
async def small_stub(small: Deployment) -> AsyncIterator[Stub]:
    async with small.lent() as stub:
        yield stub


async def test_requests_that_workers_refuse_for_now_wait_and_are_served(
    small: Deployment, small_stub: Stub, golden: Golden
) -> None:
    requests = [greedy(prompt_of(97_000 + number, 150 + 10 * number), 60) for number in range(16)]
    answers = await asyncio.gather(*(Stream(small_stub, request).rest() for request in requests))
    expected = [await golden(request) for request in requests]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


@pytest.mark.field("vllm-project/vllm#18826", "vllm-project/vllm#49330")
async def test_a_full_queue_refuses_at_once_and_says_when(small: Deployment, small_stub: Stub) -> None:
    gate = threading.Event()
    small.faults.extend([hold(0, gate)] * 60)  # nothing moves
    waiting = [Stream(small_stub, greedy(prompt_of(97_100 + number, 100), 20)) for number in range(60)]
    refused = [stream for stream in waiting if await is_refused(stream)]
    bodies = [{"prompt": prompt_of(97_200 + number, 100), "max_tokens": 4} for number in range(60)]
    async with httpx.AsyncClient(base_url=small.routers[0].http, timeout=SOON_S) as client:
        posts = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
        # While the gate is closed: some more may be let in, as the prefill worker computes what it can't ship.
        responses = (await post for post in asyncio.as_completed(posts))
        response = await anext(response async for response in responses if response.status_code == 429)
        assert int(response.headers["retry-after"]) >= 1
        gate.set()
        assert {response.status_code for response in await asyncio.gather(*posts)} <= {200, 429}
    served = [stream for stream in waiting if stream not in refused]
    assert len(served) >= 16
    assert {len((await stream.rest()).token_ids) for stream in served} == {20}


async def is_refused(stream: Stream) -> bool:
    """Whether it is, decided before any work is done."""
    try:
        await stream.started()
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = from_call(error)
        retries = [RetryInfo.FromString(detail.value) for detail in status.details if detail.Is(RetryInfo.DESCRIPTOR)]
        assert retries
        assert retries[0].retry_delay.ToMilliseconds() > 0
        return True
    return False
