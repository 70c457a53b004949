"""Every service restarted in turn under load, without a request that fails."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from cluster import wait_idle
from services import Deployment, Service

from pageferry.client import Client
from pageferry.core.errors import PageferryError
from pageferry.v1 import inference_pb2 as pb

NUM_CLIENTS = 8
NUM_PROMPTS = 24
LONG = 1200  # tokens of every sixth answer, which decode workers have no time for when they end
SETTLE_S = 150.0


def prompt_of(number: int) -> list[int]:
    return [4 + (number * 31 + index * 7) % 290 for index in range(24 + number * 5)]


def num_tokens_of(number: int) -> int:
    return LONG if number % 6 == 5 else 8 + number % 5 * 12


async def ask(client: Client, number: int) -> tuple[int, ...]:
    generation = client.generate(
        prompt_of(number), max_tokens=num_tokens_of(number), temperature=0, ignore_eos=True, timeout_s=120
    )
    return (await generation.result()).token_ids


@dataclass
class Load:
    """Requests of all clients, one after the other each, until told to stop; every answer is compared."""

    client: Client
    expected: list[tuple[int, ...]]
    failures: list[str] = field(default_factory=list)
    phase: str = "before"
    num_ok: Counter[str] = field(default_factory=Counter)  # by the phase in which the request began
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # a request has

    async def run(self, first: int) -> None:
        number, phase = first, ""
        while not self.stop.is_set():
            number, phase = (number + 1) % NUM_PROMPTS, self.phase
            try:
                tokens = await ask(self.client, number)
            except PageferryError as error:
                self.failures.append(f"{phase}: {error.code} {error.reason}: {error.message}")
                self.ended.set()
                return
            if tokens != self.expected[number]:
                self.failures.append(f"{phase}: other tokens for prompt {number}: {tokens}")
            self.num_ok[phase] += 1
            self.ended.set()

    async def more(self, num_requests: int) -> None:
        """Until so many requests of this phase have ended well."""
        async with asyncio.timeout(SETTLE_S):
            while self.num_ok[self.phase] < num_requests and not self.failures:
                self.ended.clear()
                await self.ended.wait()


@asynccontextmanager
async def load_on(deployment: Deployment) -> AsyncIterator[Load]:
    addresses = ",".join(router.address for router in deployment.routers)
    async with Client(addresses) as client:
        load = Load(client, [await ask(client, number) for number in range(NUM_PROMPTS)])
        async with asyncio.TaskGroup() as clients:
            for index in range(NUM_CLIENTS):
                clients.create_task(load.run(index * 3))
            try:
                yield load
            finally:
                load.stop.set()


async def all_ready(deployment: Deployment) -> None:
    """Until every router may use every worker."""
    for index in range(len(deployment.routers)):
        async with deployment.stub(index) as stub, asyncio.timeout(SETTLE_S):
            while True:
                status = await stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True)
                if all(worker.state == "ready" for worker in status.workers):
                    break
                await asyncio.sleep(0.02)


async def restart(deployment: Deployment, service: Service) -> None:
    service.signal(signal.SIGTERM)
    status = await asyncio.to_thread(service.wait_ended, SETTLE_S)
    assert status == 0, f"{service.name} ended with {status}"
    service.start()
    await asyncio.to_thread(service.wait_ready)
    await all_ready(deployment)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_rolling_restart_of_every_service_loses_no_request() -> None:
    graces = {"router": {"server.drain_grace_s": "120"}, "decode": {"server.drain_grace_s": "0.2"}}
    settings = {"engine.compute_dtype": "fp32"}  # exact: a moved stream computes what it has once more
    with Deployment(prefill=2, decode=2, routers=2, settings=settings, of_role=graces) as deployment:
        async with load_on(deployment) as load:
            await load.more(2 * NUM_CLIENTS)
            for service in deployment.services:
                load.phase = service.name
                await restart(deployment, service)
                await load.more(NUM_CLIENTS)
        assert load.failures == []
        assert min(load.num_ok.values()) >= NUM_CLIENTS
        for index in range(2):
            async with deployment.stub(index) as stub:
                await wait_idle(stub)
