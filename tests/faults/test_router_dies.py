"""A router that dies without a word: its workers drop what was for it, and another router's requests go on."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import greedy, wait_idle
from services import Deployment, Service

from pageferry.v1.inference_pb2 import WorkerLoad
from pageferry.v1.worker_pb2 import WatchRequest
from pageferry.v1.worker_pb2_grpc import WorkerServiceStub

NUM_STREAMS = 6
ENDLESS = 3000
PROMPT = 3800  # tokens


@pytest.fixture
def deployment(tiny_model: Path) -> Iterator[Deployment]:
    with Deployment(prefill=1, decode=1, routers=2, model=tiny_model) as deployment:
        yield deployment


class Watched:
    """A worker's loads as they come."""

    def __init__(self, worker: Service) -> None:
        self.loads: list[WorkerLoad] = []
        self._address = worker.address
        self._came = asyncio.Event()

    async def follow(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub: Any = WorkerServiceStub(channel)
            async for message in stub.Watch(WatchRequest()):
                if message.HasField("load"):
                    self.loads.append(message.load)
                    self._came.set()

    async def until(self, reached: Callable[[int], bool]) -> WorkerLoad:
        """The first load, from now on, with a number of sequences that will do."""
        seen = len(self.loads)
        async with asyncio.timeout(60):
            while True:
                for load in self.loads[seen:]:
                    if reached(load.running + load.waiting + load.tickets):
                        return load
                seen = len(self.loads)
                self._came.clear()
                await self._came.wait()


async def test_workers_drop_the_work_of_a_router_that_was_killed(deployment: Deployment) -> None:
    dying, _ = deployment.routers
    watched = [Watched(worker) for worker in deployment.workers]
    following = [asyncio.create_task(worker.follow()) for worker in watched]
    async with deployment.stub(0) as stub, deployment.stub(1) as other:
        kept = other.Generate(greedy([9] * 50, ENDLESS))
        streams = [stub.Generate(greedy([7 + number] * 40, ENDLESS)) for number in range(NUM_STREAMS)]
        for stream in (kept, *streams):
            await stream.read()
        await watched[1].until(lambda number: number > NUM_STREAMS)
        prompts = [stub.Generate(greedy([40 + number] * PROMPT, 8)) for number in range(NUM_STREAMS)]
        await watched[0].until(lambda number: number > 0)
        waits = [watched[0].until(lambda number: number == 0), watched[1].until(lambda number: number == 1)]
        dying.kill()
        prefill, decode = await asyncio.gather(*waits)
        for call in (*streams, *prompts):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await kept.read()
        assert not kept.done()
        kept.cancel()
        await wait_idle(other)
    for task in following:
        task.cancel()
    assert prefill.prefill_tokens < NUM_STREAMS * PROMPT, "it computed all prompts"
    assert decode.generated_tokens < NUM_STREAMS * ENDLESS, "it went on to the answers' ends"
