"""Requests with JSON schemas among free ones, while sequences are preempted and a decode worker is killed."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from answer import Answer
from cluster import Stub, generate
from schemas import SCHEMAS, parse
from services import Deployment
from streams import prompt_of

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import Grammar, SamplingParams, StopConditions

IN_FLIGHT = 40
# Pages for the longest sequence that is asked for, or for some 4 of those that come: they are preempted.
TIGHT = {
    "engine.num_pages": "26",
    "engine.speculation": "lookup",
    "scheduler.max_num_seqs": "24",
    "scheduler.headroom_pages": "0",
}


@pytest.fixture(scope="module")
def tight(tiny_model: Path) -> Iterator[Deployment]:
    of_role = {"decode": TIGHT}
    with Deployment(prefill=1, decode=2, of_role=of_role, model=tiny_model) as deployment:
        yield deployment


@pytest.fixture
async def stub(tight: Deployment) -> AsyncIterator[Stub]:
    async with tight.lent() as stub:
        yield stub


@dataclass
class Mixture:
    """Runs requests, every third of them free; `killed_after` answers one of the decode workers dies."""

    deployment: Deployment
    stub: Stub
    num_schemas: int
    killed_after: int
    num_done: int = 0
    num_preemptions: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(IN_FLIGHT))

    async def run(self) -> list[tuple[int, Answer]]:
        requests = [self._with_schema(number) for number in range(self.num_schemas)]
        requests += [self._free(number) for number in range(self.num_schemas // 2)]
        order = sorted(range(len(requests)), key=lambda number: number * 7919 % len(requests))
        answers = await asyncio.gather(*(self._one(number, requests[number]) for number in order))
        await self._count_preemptions(self.deployment.decode[0].address)
        return [(number, answer) for number, answer in answers if number < self.num_schemas]

    async def _one(self, number: int, request: pb.GenerateRequest) -> tuple[int, Answer]:
        async with self.slots:
            answer = await generate(self.stub, request, timeout_s=300)
        self.num_done += 1
        if self.num_done == self.killed_after:
            victim = self.deployment.decode[1]
            await self._count_preemptions(victim.address)
            victim.kill()
        return number, answer

    async def _count_preemptions(self, address: str) -> None:
        """Of this worker, in its life so far."""
        status = await self.stub.GetStatus(pb.GetStatusRequest())
        self.num_preemptions += sum(one.load.preemptions for one in status.workers if one.address == address)

    def _with_schema(self, number: int) -> pb.GenerateRequest:
        grammar = Grammar(json_schema=json.dumps(SCHEMAS[number % len(SCHEMAS)]))
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt_of(70_000 + number, 20 + number % 50)),
            sampling=SamplingParams(temperature=1, seed=number, grammar=grammar),
            stop=StopConditions(max_tokens=320),
        )

    def _free(self, number: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt_of(80_000 + number, 30)),
            sampling=SamplingParams(temperature=1, seed=number),
            stop=StopConditions(max_tokens=50 + number % 100, ignore_eos=True),
        )


async def every_answer_parses(mixture: Mixture) -> None:
    answers = await mixture.run()
    assert not mixture.deployment.decode[1].is_alive
    assert len(answers) == mixture.num_schemas
    for number, answer in answers:
        assert answer.reason == "stop", f"request {number}: {answer.reason} after {answer.text!r}"
        parse(answer.text, SCHEMAS[number % len(SCHEMAS)])
    assert len({answer.text for _, answer in answers}) > mixture.num_schemas // 3, "hardly anything is drawn"
    assert mixture.num_preemptions > 0


async def test_answers_match_their_schemas_through_preemptions_and_a_death(tight: Deployment, stub: Stub) -> None:
    await every_answer_parses(Mixture(tight, stub, num_schemas=48, killed_after=20))


@pytest.mark.slow
async def test_500_answers_match_their_schemas_through_preemptions_and_a_death(tight: Deployment, stub: Stub) -> None:
    await every_answer_parses(Mixture(tight, stub, num_schemas=500, killed_after=200))
